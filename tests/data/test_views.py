"""What a model sees: geometry against published arithmetic, pixels against Pillow, one image at a time."""

from __future__ import annotations

import io
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from drumline.data.draws import Purpose, uniform
from drumline.data.order import Request
from drumline.data.sources import ArraySource, SourceSpec, open_source
from drumline.data.sources.base import EncodedSource
from drumline.data.views import (
    View,
    centre_view,
    flips,
    make_batch,
    mixing_plan,
    random_resized_crop,
    resize_array,
    shift_offsets,
)
from drumline.errors import UserError

SEED = 11


def request(count: int, epoch: int = 3) -> Request:
    """Samples in no particular order."""
    return Request(epoch, np.random.default_rng(1).permutation(count).astype(np.int64))


def array_source(channels: int, size: int = 16, count: int = 12) -> ArraySource:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (count, size, size, channels), dtype=np.uint8)
    return ArraySource("noise", images, np.arange(count) % 5, tuple("abcde"))


class Files(EncodedSource):
    """PNG files of many shapes, in memory."""

    SHAPES = ((40, 30), (30, 40), (33, 33), (200, 20), (7, 90), (1, 1), (256, 256))

    def __init__(self) -> None:
        super().__init__("files", np.arange(len(self.SHAPES)) % 3, ("a", "b", "c"))

    def picture(self, sample: int) -> Image.Image:
        width, height = self.SHAPES[sample]
        pixels = np.random.default_rng(sample).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(pixels)

    def read(self, sample: int) -> bytes:
        buffer = io.BytesIO()
        self.picture(sample).save(buffer, "PNG")
        return buffer.getvalue()

    def where(self, sample: int) -> str:
        return f"file {sample}"


def tried(draws: NDArray[np.float64], width: int, height: int) -> tuple[int, int, int, int] | None:
    """Inception's crop as published (and as torchvision's get_params computes it), from four numbers a try."""
    for area_draw, aspect_draw, x_draw, y_draw in draws.reshape(-1, 4):
        target = width * height * (0.08 + area_draw * (1.0 - 0.08))
        low, high = math.log(3.0 / 4.0), math.log(4.0 / 3.0)
        ratio = math.exp(low + aspect_draw * (high - low))
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = math.floor(x_draw * (width - w + 1)), math.floor(y_draw * (height - h + 1))
            return left, top, left + w, top + h
    return None


sides = st.integers(1, 600)


@settings(max_examples=150, deadline=None)
@given(width=sides, height=sides, sample=st.integers(0, 10**6))
def test_a_random_crop_is_inside_and_as_published(width: int, height: int, sample: int) -> None:
    draws = uniform(SEED, 0, np.array([sample]), Purpose.CROP, 40)[0]
    box = random_resized_crop(width, height, draws)
    assert 0 <= box[0] < box[2] <= width
    assert 0 <= box[1] < box[3] <= height
    published = tried(draws, width, height)
    if published is not None:
        assert box == published


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(1000, 10, (493, 0, 506, 10)), (10, 1000, (0, 493, 10, 506)), (100, 90, (0, 0, 100, 90))],
)
def test_when_no_try_fits_the_centre_is_taken_at_the_nearest_allowed_aspect(
    width: int, height: int, expected: tuple[int, int, int, int]
) -> None:
    never = np.full(40, 1 - 2**-32)
    if width == 100:
        # The whole area, as wide as allowed: too wide ten times over.
        assert tried(never, width, height) is None
    assert random_resized_crop(width, height, never) == expected


def test_area_and_aspect_have_the_published_distribution() -> None:
    """Area uniform on 8 to 100 % and log-aspect uniform on 3/4 to 4/3, in a square large enough that only the
    largest areas fail to fit; those are compared below 70 %, where every aspect fits."""
    draws = uniform(SEED, 0, np.arange(20_000), Purpose.CROP, 40)
    boxes = np.array([random_resized_crop(4000, 4000, row) for row in draws])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, aspect = width * height / 4000**2, np.log(width / height)
    small = area < 0.7
    assert area.min() > 0.079
    # A try fails only beyond 75 %; the failed ones are drawn again, so smaller areas are all raised alike.
    counts = np.histogram(area[small], bins=10, range=(0.08, 0.7))[0]
    assert counts.min() > 0.9 * counts.mean()
    assert counts.max() < 1.1 * counts.mean()
    limit = math.log(4 / 3)
    assert np.abs(aspect).max() < limit + 0.01
    counts = np.histogram(aspect[small], bins=10, range=(-limit, limit))[0]
    assert counts.min() > 0.9 * counts.mean()
    assert counts.max() < 1.1 * counts.mean()
    room = 4000 - width[small]
    place = boxes[small, 0] / np.maximum(1, room)
    assert abs(place.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(place, boxes[small, 1])[0, 1]) < 0.05


def resize_and_centre_crop(
    width: int, height: int, size: int, crop: float
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """torchvision's Resize(int(size / crop)) and CenterCrop(size), in their words."""
    short_side = math.floor(size / crop)
    short, long = (width, height) if width <= height else (height, width)
    new_short, new_long = short_side, int(short_side * long / short)
    new_width, new_height = (new_short, new_long) if width <= height else (new_long, new_short)
    top = int(round((new_height - size) / 2.0))  # noqa: RUF046
    left = int(round((new_width - size) / 2.0))  # noqa: RUF046
    return (new_width, new_height), (left, top, left + size, top + size)


@given(
    width=sides, height=sides, size=st.integers(1, 320), crop=st.sampled_from([0.875, 1.0, 0.9, 0.95, 0.5])
)
def test_the_centre_view_is_resize_and_centre_crop(width: int, height: int, size: int, crop: float) -> None:
    scaled, box = centre_view(width, height, size, crop)
    assert (scaled, box) == resize_and_centre_crop(width, height, size, crop)
    assert box[0] >= 0
    assert box[1] >= 0
    assert box[2] <= scaled[0]
    assert box[3] <= scaled[1]


def test_the_centre_view_of_the_usual_sizes() -> None:
    assert centre_view(500, 375, 224, 0.875) == ((341, 256), (58, 16, 282, 240))
    assert centre_view(375, 500, 224, 0.875) == ((256, 341), (16, 58, 240, 282))


def test_files_are_cropped_resized_and_mirrored_as_pillow_does() -> None:
    source, wanted = Files(), request(len(Files.SHAPES))
    batch = make_batch(source, View(24, "crop-flip"), SEED, wanted)
    mirrored = flips(SEED, wanted)
    for slot, sample in enumerate(wanted.samples):
        image = source.picture(sample)
        draws = uniform(SEED, wanted.epoch, np.array([sample]), Purpose.CROP, 40)[0]
        box = random_resized_crop(*image.size, draws)
        expected = image.crop(box).resize((24, 24), Image.Resampling.BILINEAR)
        if mirrored[slot]:
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        assert np.array_equal(batch.images[slot], np.asarray(expected))
    assert batch.images.shape == (7, 24, 24, 3)
    assert batch.labels.tolist() == [int(source.labels[sample]) for sample in wanted.samples]
    assert batch.samples.tolist() == wanted.samples.tolist()


def test_evaluation_files_are_resized_and_cut_from_the_centre() -> None:
    source, wanted = Files(), request(len(Files.SHAPES))
    batch = make_batch(source, View(24, "crop-flip", mixup=0.5).for_evaluation(), SEED, wanted)
    for slot, sample in enumerate(wanted.samples):
        image = source.picture(sample)
        scaled, box = resize_and_centre_crop(*image.size, 24, 0.875)
        expected = image.resize(scaled, Image.Resampling.BILINEAR).crop(box)
        assert np.array_equal(batch.images[slot], np.asarray(expected))
    assert batch.mix.shape == (7, 0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("augment", "pad"), [("shift", 2), ("shift-flip", 2)])
def test_shifting_is_padding_and_cutting_each_image(channels: int, augment: str, pad: int) -> None:
    source, wanted = array_source(channels), request(12)
    batch = make_batch(source, View(16, augment), SEED, wanted)  # type: ignore[arg-type]
    offsets, mirrored = shift_offsets(SEED, wanted, pad), flips(SEED, wanted)
    for slot, sample in enumerate(wanted.samples):
        canvas = np.zeros((16 + 2 * pad, 16 + 2 * pad, channels), np.uint8)
        canvas[pad:-pad, pad:-pad] = source.images[sample]
        x, y = offsets[slot]
        expected = canvas[y : y + 16, x : x + 16]
        if augment == "shift-flip" and mirrored[slot]:
            expected = expected[:, ::-1]
        assert np.array_equal(batch.images[slot], expected)
    assert mirrored.any()
    assert not mirrored.all()


@pytest.mark.parametrize("channels", [1, 3])
def test_random_crops_of_arrays_are_pillows(channels: int) -> None:
    source, wanted = array_source(channels), request(12)
    batch = make_batch(source, View(20, "crop-flip"), SEED, wanted)
    assert batch.images.shape == (12, 20, 20, channels)
    for slot, sample in enumerate(wanted.samples):
        stored = source.images[sample]
        image = Image.fromarray(stored[..., 0] if channels == 1 else stored)
        draws = uniform(SEED, wanted.epoch, np.array([sample]), Purpose.CROP, 40)[0]
        image = image.crop(random_resized_crop(16, 16, draws)).resize((20, 20), Image.Resampling.BILINEAR)
        expected = np.asarray(image)[:, ::-1] if flips(SEED, wanted)[slot] else np.asarray(image)
        assert np.array_equal(batch.images[slot], expected.reshape(20, 20, channels))


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_seen_plainly_are_themselves_or_pillows_resize(channels: int) -> None:
    source, wanted = array_source(channels), request(12)
    same = make_batch(source, View(16, "none"), SEED, wanted).images
    assert np.array_equal(same, source.images[wanted.samples])
    same[0] = 0
    assert source.images[wanted.samples[0]].any()
    for size in (9, 25):
        seen = make_batch(source, View(size, "none"), SEED, wanted).images
        for slot, sample in enumerate(wanted.samples):
            stored = source.images[sample]
            image = Image.fromarray(stored[..., 0] if channels == 1 else stored)
            expected = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
            assert np.array_equal(seen[slot], expected.reshape(size, size, channels))
    assert resize_array(source.images, 16) is source.images


def test_shifts_reach_every_offset_about_equally_and_flips_are_half() -> None:
    wanted = Request(0, np.arange(20_000))
    offsets = shift_offsets(SEED, wanted, 4)
    counts = np.histogram2d(offsets[:, 0], offsets[:, 1], bins=9, range=((-0.5, 8.5), (-0.5, 8.5)))[0]
    assert counts.sum() == 20_000
    assert counts.min() > 180
    assert counts.max() < 320
    assert abs(flips(SEED, wanted).mean() - 0.5) < 0.015


def test_epochs_and_seeds_see_an_image_differently() -> None:
    source, view = array_source(3), View(16, "shift-flip")
    seen = [
        make_batch(source, view, seed, request(12, epoch)).images for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert torch.equal(seen[0], make_batch(source, view, 0, request(12, 0)).images)


@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip", "crop-flip"])
def test_a_sample_is_seen_the_same_in_any_company(augment: str) -> None:
    source, view = array_source(3), View(16, augment)  # type: ignore[arg-type]
    wanted = request(12)
    whole = make_batch(source, view, SEED, wanted).images
    parts = [make_batch(source, view, SEED, Request(3, wanted.samples[i : i + 5])).images for i in (0, 5, 10)]
    assert torch.equal(torch.cat(parts), whole)


MIXES = [View(16, "none", mixup=0.4), View(16, "none", cutmix=1.0), View(16, "none", mixup=0.2, cutmix=1.0)]


@pytest.mark.parametrize("view", MIXES)
@given(cuts=st.lists(st.integers(0, 20), max_size=4))
def test_a_mixing_plan_is_the_same_for_every_slicing(view: View, cuts: list[int]) -> None:
    wanted = request(40)
    edges = sorted({0, 40, *(2 * cut for cut in cuts)})
    parts = [mixing_plan(view, SEED, Request(3, wanted.samples[low:high])) for low, high in pairwise(edges)]
    assert np.array_equal(np.concatenate(parts), mixing_plan(view, SEED, wanted))


def test_mixup_shares_are_beta_and_labels_go_with_pixels() -> None:
    plan = mixing_plan(View(16, "none", mixup=0.4), SEED, Request(0, np.arange(20_000)))
    assert np.array_equal(plan[:, 0], plan[:, 1])
    assert not plan[:, 2:].any()
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1)).
    assert abs(plan[:, 0].mean() - 0.5) < 0.01
    assert abs(plan[:, 0].var() - 1 / (4 * 1.8)) < 0.005


def test_cutmix_boxes_are_inside_and_labels_count_their_pixels() -> None:
    plan = mixing_plan(View(16, "none", cutmix=1.0), SEED, Request(0, np.arange(20_000)))
    share, x0, y0, x1, y1 = plan[:, 1], *plan[:, 2:].T
    assert (plan[:, 0] == 1).all()
    assert (plan[:, 2:] == np.rint(plan[:, 2:])).all()
    assert ((x0 >= 0) & (x0 <= x1) & (x1 <= 16) & (y0 >= 0) & (y0 <= y1) & (y1 <= 16)).all()
    assert np.allclose(share, 1 - (x1 - x0) * (y1 - y0) / 256, atol=1e-6)
    # Away from the border a box of share s is a square of side sqrt(1 - s) times the image's.
    whole = (x0 > 0) & (y0 > 0) & (x1 < 16) & (y1 < 16)
    assert (np.abs((x1 - x0) - (y1 - y0))[whole] <= 1).all()
    centre = (x0 + x1)[whole] / 2
    assert abs(centre.mean() - 8) < 0.2


def test_with_both_each_sample_takes_one_of_them_about_equally() -> None:
    plan = mixing_plan(View(16, "none", mixup=0.2, cutmix=1.0), SEED, Request(0, np.arange(10_000)))
    blended = plan[:, 0] < 1
    assert not plan[blended, 2:].any()
    assert 0.46 < blended.mean() < 0.54


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "train" / label).mkdir(parents=True)
        Image.new("RGB", (30, 20)).save(tmp_path / "train" / label / "good.png")
    (tmp_path / "train" / "dog" / "bad.jpg").write_bytes(b"\xff\xd8\xff nothing more")
    (tmp_path / "val").symlink_to(tmp_path / "train")
    source = open_source(SourceSpec("folder", str(tmp_path), "train"))
    with pytest.raises(UserError, match=r"dog/bad\.jpg"):
        make_batch(source, View(8, "crop-flip"), SEED, Request(0, np.arange(3)))
