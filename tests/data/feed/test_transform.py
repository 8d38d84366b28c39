"""What a transform draws for a sample: crops (against published arithmetic), shifts, flips and mixing."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from drumline.config.learning import Data
from drumline.core.errors import UserError
from drumline.data.feed.draws import Purpose, exp_small, uniform
from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import (
    ATTEMPTS,
    COLUMNS,
    Column,
    Transform,
    channel_statistics,
    evaluation_geometry,
    make_transform,
    mirrored,
    mixing_plan,
    random_resized_crops,
    resize_array,
    shift_offsets,
    training_geometry,
)
from drumline.data.image.augment import Augmentation
from drumline.data.image.resize import resize
from drumline.data.sources import ArrayDataset, DatasetSpec, PooledDataset, open_dataset

SEED = 11


def request(count: int, epoch: int = 3) -> Request:
    """Samples in no particular order."""
    return Request(epoch, np.random.default_rng(1).permutation(count).astype(np.int64))


@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip", "crop-flip"])
def test_only_crop_flip_crops_at_random(augment: str) -> None:
    sizes, samples = np.random.default_rng(0).integers(5, 90, (12, 2)), request(12).samples
    transform = Transform(24, augment, eval_crop=0.8)  # type: ignore[arg-type]
    expected = (
        training_geometry(sizes, 24, SEED, 3, samples)
        if augment == "crop-flip"
        else evaluation_geometry(sizes, 24, 0.8)
    )
    assert np.array_equal(transform.geometry(SEED, 3, samples, sizes), expected)
    assert np.array_equal(transform.geometry(SEED, 3, samples.tolist(), sizes), expected)


def test_the_chance_of_a_horizontal_flip_is_the_recipes() -> None:
    sizes, samples = np.full((20_000, 2), 90), np.arange(20_000)
    for augment, hflip, expected in (
        ("crop-flip", "auto", 0.5),
        ("crop-flip", 0.2, 0.2),
        ("crop-flip", 0.0, 0.0),
        ("none", "auto", 0.0),
        ("none", 1.0, 1.0),
    ):
        transform = Transform(24, augment, hflip=hflip)  # type: ignore[arg-type]
        rows = transform.geometry(SEED, 3, samples, sizes)
        assert abs(rows[:, Column.MIRROR].mean() - expected) < 0.01
        assert not transform.for_evaluation().geometry(SEED, 3, samples, sizes)[:, Column.MIRROR].any()
        without = Transform(24, augment).geometry(SEED, 3, samples, sizes)  # type: ignore[arg-type]
        assert np.array_equal(rows[:, : Column.MIRROR], without[:, : Column.MIRROR])


def test_crop_areas_without_resizing_crops_are_rejected_in_training_only() -> None:
    source = ArrayDataset("noise", np.zeros((2, 8, 8, 1), np.uint8), np.arange(2), ("a", "b"))
    data = Data(crop_scale=(0.5, 1.0), transform="mine:f")
    with pytest.raises(
        UserError, match=r"data.augment = auto means shift for noise, which does not resize crops"
    ):
        make_transform(data, source, ())
    assert make_transform(data, source, (), training=False).own == ""
    assert make_transform(replace(data, augment="crop-flip"), source, ()).own == "mine:f"


def test_crops_have_the_areas_of_the_recipe() -> None:
    sizes = np.full((5000, 2), 1000)
    rows = Transform(24, "crop-flip", crop_scale=(0.5, 0.6)).geometry(SEED, 3, np.arange(5000), sizes)
    area = np.prod(rows[:, 2:4].astype(np.int64) - rows[:, :2], axis=1) / 1000**2
    assert 0.498 < area.min() < 0.505 < 0.595 < area.max() < 0.602
    whole = Transform(24, "crop-flip", crop_scale=(1.0, 1.0)).geometry(SEED, 3, np.arange(5000), sizes)
    assert np.prod(whole[:, 2:4] - whole[:, :2], axis=1).min() >= 0.75 * 1000**2


def test_evaluation_has_no_randomness_and_keeps_the_resize() -> None:
    transform = Transform(
        24,
        "crop-flip",
        hflip=1.0,
        eval_crop=0.7,
        exif="apply",
        mixup=0.2,
        cutmix=1.0,
        resize="pillow13",
        interpolation="bicubic",
        augmentation=Augmentation(jitter=(0.4, 0.4, 0.4, 0.1), erasing=0.5),
        on_bad="substitute",
    )
    seen = transform.for_evaluation()
    assert seen == Transform(
        24,
        "none",
        eval_crop=0.7,
        exif="apply",
        resize="pillow13",
        interpolation="bicubic",
        on_bad="black",
    )
    assert not seen.mixes
    assert not seen.augmentation.active
    assert Transform(24, "crop-flip", on_bad="raise").for_evaluation().on_bad == "raise"
    assert seen.for_evaluation() == seen


@pytest.mark.parametrize("channels", [1, 3])
def test_array_sets_are_resized_image_by_image_or_unchanged(channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 20, channels), dtype=np.uint8)
    square = np.ascontiguousarray(images[:, :, :16])
    assert resize_array(square, Transform(16, "none")) is square
    for version, filter in (("pillow12", "bilinear"), ("pillow13", "lanczos")):
        transform = Transform(7, "none", resize=version, interpolation=filter)  # type: ignore[arg-type]
        for image, found in zip(images, resize_array(images, transform), strict=True):
            assert np.array_equal(
                found, resize(image, (7, 7), None, transform.resize, transform.interpolation)
            )


def test_shifts_reach_every_offset_about_equally_and_flips_are_half() -> None:
    wanted = Request(0, np.arange(20_000))
    offsets = shift_offsets(SEED, wanted, 4)
    counts = np.histogram2d(offsets[:, 0], offsets[:, 1], bins=9, range=((-0.5, 8.5), (-0.5, 8.5)))[0]
    assert counts.sum() == 20_000
    assert counts.min() > 180
    assert counts.max() < 320
    assert abs(mirrored(SEED, wanted.epoch, wanted.samples).mean() - 0.5) < 0.015


MIXES = [
    Transform(16, "none", mixup=0.4),
    Transform(16, "none", cutmix=1.0),
    Transform(16, "none", mixup=0.2, cutmix=1.0),
]


@pytest.mark.parametrize("transform", MIXES)
@given(cuts=st.lists(st.integers(0, 20), max_size=4))
def test_a_mixing_plan_does_not_depend_on_the_slicing(transform: Transform, cuts: list[int]) -> None:
    wanted = request(40)
    edges = sorted({0, 40, *(2 * cut for cut in cuts)})
    parts = [
        mixing_plan(transform, SEED, Request(3, wanted.samples[low:high])) for low, high in pairwise(edges)
    ]
    assert np.array_equal(np.concatenate(parts), mixing_plan(transform, SEED, wanted))


def test_mixup_fractions_are_beta_and_equal_for_labels_and_pixels() -> None:
    plan = mixing_plan(Transform(16, "none", mixup=0.4), SEED, Request(0, np.arange(20_000)))
    assert np.array_equal(plan[:, 0], plan[:, 1])
    assert not plan[:, 2:].any()
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1)).
    assert abs(plan[:, 0].mean() - 0.5) < 0.01
    assert abs(plan[:, 0].var() - 1 / (4 * 1.8)) < 0.005


def test_cutmix_boxes_are_inside_and_labels_count_their_pixels() -> None:
    plan = mixing_plan(Transform(16, "none", cutmix=1.0), SEED, Request(0, np.arange(20_000)))
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


def test_with_mixup_and_cutmix_each_sample_takes_one_of_them_about_equally() -> None:
    plan = mixing_plan(Transform(16, "none", mixup=0.2, cutmix=1.0), SEED, Request(0, np.arange(10_000)))
    blended = plan[:, 0] < 1
    assert not plan[blended, 2:].any()
    assert 0.46 < blended.mean() < 0.54


Box = tuple[int, int, int, int]
sides = st.one_of(st.integers(1, 600), st.sampled_from([1, 2, 3, 20_000, 65_500]))


def published(draws: NDArray[np.float64], width: int, height: int) -> tuple[Box, float]:
    """RandomResizedCrop.get_params of torchvision in its own words, from four numbers a try; and how near a side of
    any try came to a half, where the last bit of a logarithm may decide the rounding."""
    low, high = math.log(3.0 / 4.0), math.log(4.0 / 3.0)
    nearest = 1.0
    for area_draw, aspect_draw, x_draw, y_draw in draws.reshape(-1, 4).tolist():
        target = width * height * (0.08 + area_draw * (1.0 - 0.08))
        aspect = math.exp(low + aspect_draw * (high - low))
        exact = math.sqrt(target * aspect), math.sqrt(target / aspect)
        nearest = min(nearest, *(abs(side % 1.0 - 0.5) for side in exact))
        w, h = round(exact[0]), round(exact[1])
        if 0 < w <= width and 0 < h <= height:
            left, top = math.floor(x_draw * (width - w + 1)), math.floor(y_draw * (height - h + 1))
            return (left, top, left + w, top + h), nearest
    ratio = width / height
    w, h = width, height
    if ratio < 3.0 / 4.0:
        h = round(w / (3.0 / 4.0))
    elif ratio > 4.0 / 3.0:
        w = round(h * (4.0 / 3.0))
    left, top = (width - w) // 2, (height - h) // 2
    return (left, top, left + w, top + h), nearest


def crop(width: int, height: int, draws: NDArray[np.float64]) -> Box:
    found = random_resized_crops(np.array([[width, height]], np.int32), draws[None])[0]
    return tuple(found.tolist())


@settings(max_examples=400)
@given(width=sides, height=sides, sample=st.integers(0, 2**40))
def test_a_random_crop_is_inside_and_as_published(width: int, height: int, sample: int) -> None:
    draws = uniform(SEED, 0, np.array([sample]), Purpose.CROP, 4 * ATTEMPTS)[0]
    left, top, right, bottom = found = crop(width, height, draws)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    expected, nearest = published(draws, width, height)
    assert found == expected or nearest < 1e-9


def test_thousands_of_crops_are_as_published() -> None:
    draw = np.random.default_rng(0)
    sizes = np.concatenate(
        [
            draw.integers(1, 30, (1500, 2)),
            draw.integers(100, 900, (2500, 2)),
            draw.integers(1, 20_000, (1000, 2)),
        ]
    )
    draws = draw.random((len(sizes), 4 * ATTEMPTS))
    found = random_resized_crops(sizes, draws)
    unsure = 0
    for box, size, row in zip(found.tolist(), sizes.tolist(), draws, strict=True):
        expected, nearest = published(row, *size)
        if tuple(box) != expected:
            assert nearest < 1e-9, (size, box, expected)
            unsure += 1
    assert unsure < 3


@pytest.mark.parametrize("width", [1, 2, 3, 7, 20_000])
@pytest.mark.parametrize("height", [1, 2, 3, 7, 20_000])
def test_crops_stay_inside_for_extreme_draws(width: int, height: int) -> None:
    most = 1 - 2**-32
    for values in (
        (0.0,) * 4,
        (most,) * 4,
        (0.0, most, most, 0.0),
        (most, 0.0, 0.0, most),
        (0.5, 0.5, most, most),
    ):
        left, top, right, bottom = crop(width, height, np.tile(np.array(values), ATTEMPTS))
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (1000, 10, (493, 0, 506, 10)),
        (10, 1000, (0, 493, 10, 506)),
        (100, 90, (0, 0, 100, 90)),
        (20_000, 3, (9998, 0, 10_002, 3)),
        (3, 20_000, (0, 9998, 3, 10_002)),
    ],
)
def test_the_centre_at_the_nearest_allowed_aspect_is_used_if_no_try_fits(
    width: int, height: int, expected: Box
) -> None:
    # The whole area, as wide as allowed: too wide ten times over.
    never = np.full(4 * ATTEMPTS, 1 - 2**-32)
    assert published(never, width, height)[0] == expected
    assert crop(width, height, never) == expected


def test_area_and_aspect_have_the_published_distribution() -> None:
    """Area uniform on 8 to 100 % and log-aspect uniform on 3/4 to 4/3, in a square large enough that only the
    largest areas fail to fit; those are compared below 70 %, where every aspect fits."""
    rows = training_geometry(np.full((20_000, 2), 4000), 224, SEED, 0, np.arange(20_000))
    boxes = rows[:, :4].astype(np.int64)
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, aspect = width * height / 4000**2, np.log(width / height)
    small = area < 0.7
    assert area.min() > 0.079
    # A try fails only beyond 75 %; the failed ones are drawn again, so smaller areas are raised by one factor.
    counts = np.histogram(area[small], bins=10, range=(0.08, 0.7))[0]
    assert counts.min() > 0.9 * counts.mean()
    assert counts.max() < 1.1 * counts.mean()
    limit = math.log(4 / 3)
    assert np.abs(aspect).max() < limit + 0.01
    counts = np.histogram(aspect[small], bins=10, range=(-limit, limit))[0]
    assert counts.min() > 0.9 * counts.mean()
    assert counts.max() < 1.1 * counts.mean()
    place = boxes[small, 0] / np.maximum(1, 4000 - width[small])
    assert abs(place.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(place, boxes[small, 1])[0, 1]) < 0.05
    assert abs(rows[:, Column.MIRROR].mean() - 0.5) < 0.015


def test_a_training_row_has_the_models_size() -> None:
    sizes, samples = np.array([[40, 30], [7, 900]]), np.array([5, 3])
    rows = training_geometry(sizes, 96, SEED, 2, samples)
    assert rows.shape == (2, COLUMNS)
    assert rows.dtype == np.int32
    assert (rows[:, Column.WIDTH : Column.HEIGHT + 1] == 96).all()
    assert not rows[:, Column.X : Column.Y + 1].any()
    assert rows[:, Column.MIRROR].tolist() == mirrored(SEED, 2, samples).tolist()
    flip = uniform(SEED, 2, samples, Purpose.FLIP, 1)[:, 0]
    assert mirrored(SEED, 2, samples).tolist() == (flip < 0.5).tolist()


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 40), max_size=5), seed=st.integers(0, 2**63), epoch=st.integers(0, 90))
def test_a_row_does_not_depend_on_its_batch(cuts: list[int], seed: int, epoch: int) -> None:
    draw = np.random.default_rng(1)
    samples = draw.permutation(1000)[:40]
    sizes = draw.integers(1, 700, (40, 2))
    whole = training_geometry(sizes, 32, seed, epoch, samples)
    edges = sorted({0, 40, *cuts})
    parts = [
        training_geometry(sizes[low:high], 32, seed, epoch, samples[low:high])
        for low, high in pairwise(edges)
    ]
    assert np.array_equal(np.concatenate(parts), whole)
    back = np.argsort(samples)
    assert np.array_equal(training_geometry(sizes[back], 32, seed, epoch, samples[back]), whole[back])


def test_seeds_epochs_and_samples_have_different_rows() -> None:
    sizes, samples = np.full((50, 2), 500), np.arange(50)
    first = training_geometry(sizes, 32, 1, 0, samples)
    for other in (
        training_geometry(sizes, 32, 2, 0, samples),
        training_geometry(sizes, 32, 1, 1, samples),
        training_geometry(sizes, 32, 1, 0, samples + 50),
    ):
        assert (other != first).any(axis=1).mean() > 0.9


def resize_and_centre_crop(width: int, height: int, size: int, share: float) -> list[int]:
    """torchvision's Resize(int(size / share)) and CenterCrop(size), in their words, as a geometry row."""
    short_side = math.floor(size / share)
    short, long = (width, height) if width <= height else (height, width)
    new_short, new_long = short_side, int(short_side * long / short)
    new_width, new_height = (new_short, new_long) if width <= height else (new_long, new_short)
    top = int(round((new_height - size) / 2.0))  # noqa: RUF046
    left = int(round((new_width - size) / 2.0))  # noqa: RUF046
    return [0, 0, width, height, new_width, new_height, left, top, 0]


@settings(max_examples=300)
@given(
    width=sides,
    height=sides,
    size=st.integers(1, 320),
    share=st.one_of(st.sampled_from([0.875, 1.0, 0.9, 0.95, 0.5]), st.floats(0.2, 1.0)),
)
def test_evaluation_is_resize_and_centre_crop(width: int, height: int, size: int, share: float) -> None:
    row = evaluation_geometry(np.array([[width, height]]), size, share)[0]
    assert row.tolist() == resize_and_centre_crop(width, height, size, share)
    assert 0 <= row[Column.X] <= row[Column.WIDTH] - size
    assert 0 <= row[Column.Y] <= row[Column.HEIGHT] - size


def test_evaluation_of_the_usual_sizes() -> None:
    rows = evaluation_geometry(np.array([[500, 375], [375, 500], [224, 224]]), 224, 0.875)
    assert rows.tolist() == [
        [0, 0, 500, 375, 341, 256, 58, 16, 0],
        [0, 0, 375, 500, 256, 341, 16, 58, 0],
        [0, 0, 224, 224, 256, 256, 16, 16, 0],
    ]


@pytest.mark.parametrize(("reach", "units"), [(math.log(4 / 3), 2), (1.25, 4), (2.0, 20)])
def test_the_series_is_the_exponential_function_to_its_last_bits(reach: float, units: int) -> None:
    """Crops use it up to log(4/3), erased boxes up to 1.2. Below 0 the sum cancels, and a bit or two are lost."""
    x = np.concatenate([np.linspace(-reach, reach, 20_001), np.array([0.0, -0.0, 1e-300, 2**-30])])
    for value, found in zip(x.tolist(), exp_small(x).tolist(), strict=True):
        exact = math.exp(value)
        assert abs(found - exact) <= (units if value < 0 else 2) * math.ulp(exact), value
    assert exp_small(np.array([0.0]))[0] == 1.0


def test_channel_statistics_are_exact_for_any_chunk(monkeypatch):
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (37, 9, 11, 3), np.uint8)
    source = ArrayDataset("x", images, np.zeros(37, np.int64), ("a",))
    mean, std = channel_statistics(source)
    flat = images.reshape(-1, 3).astype(np.float64) / 255
    assert np.allclose(mean, flat.mean(axis=0), rtol=1e-12)
    assert np.allclose(std, flat.std(axis=0), rtol=1e-12)
    assert all(type(value) is float for value in mean + std)
    monkeypatch.setattr("drumline.data.feed.transform.CHUNK_BYTES", 1000)
    assert channel_statistics(source) == (mean, std)


def test_channel_statistics_count_each_repetition_of_an_image():
    rng = np.random.default_rng(4)
    pooled = PooledDataset("x", rng.integers(0, 256, (3, 4, 4, 1), np.uint8), np.zeros(8, np.int64), ("a",))
    whole = ArrayDataset("x", pooled.take(np.arange(8)), pooled.labels, pooled.classes)
    assert channel_statistics(pooled) == channel_statistics(whole)


def test_channel_statistics_of_digits_are_known():
    digits = open_dataset(DatasetSpec("digits", "", "train"))
    assert isinstance(digits, ArrayDataset)
    mean, std = channel_statistics(digits)
    assert (round(mean[0], 4), round(std[0], 4)) == (0.305, 0.3764)


def test_channel_statistics_reject_a_constant_channel():
    images = np.random.default_rng(5).integers(0, 256, (4, 4, 4, 3), np.uint8)
    images[..., 2] = 9
    with pytest.raises(UserError, match="channel 2 has the same value") as caught:
        channel_statistics(ArrayDataset("x", images, np.zeros(4, np.int64), ("a",)))
    assert "data.std" in caught.value.fix
