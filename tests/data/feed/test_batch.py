"""A whole batch made plainly: pixels against Pillow one image at a time, the same in any company."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.core.errors import UserError
from drumline.data.feed.batch import BadSample, finished, load_sample, make_batch
from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import Transform, mirrored, mixing_plan, shift_offsets
from drumline.data.image.augment import Augmentation, plan
from drumline.data.sources import ArrayDataset, DatasetSpec, open_dataset
from drumline.data.sources.base import EncodedDataset

SEED = 11


def request(count: int, epoch: int = 3) -> Request:
    """Samples in no particular order."""
    return Request(epoch, np.random.default_rng(1).permutation(count).astype(np.int64))


def array_source(channels: int, size: int = 16, count: int = 12) -> ArrayDataset:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (count, size, size, channels), dtype=np.uint8)
    return ArrayDataset("noise", images, np.arange(count) % 5, tuple("abcde"))


class Files(EncodedDataset):
    """Files of many shapes and formats, in memory."""

    SHAPES = ((40, 30), (30, 40), (33, 33), (200, 20), (7, 90), (1, 1), (256, 256), (64, 48), (65, 47))
    FORMATS = ("PNG", "JPEG", "WEBP", "JPEG", "BMP", "JPEG", "JPEG", "PPM", "TIFF")

    def __init__(self) -> None:
        super().__init__("files", np.arange(len(self.SHAPES)) % 3, ("a", "b", "c"))

    def read(self, sample: int) -> bytes:
        width, height = self.SHAPES[sample]
        pixels = np.random.default_rng(sample).integers(0, 256, (height, width, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        image = Image.fromarray(pixels)
        (image.convert("L") if sample == 5 else image).save(buffer, self.FORMATS[sample])
        return buffer.getvalue()

    def picture(self, sample: int) -> Image.Image:
        return Image.open(io.BytesIO(self.read(sample))).convert("RGB")

    def where(self, sample: int) -> str:
        return f"file {sample}"


@pytest.mark.parametrize("evaluating", [False, True])
def test_files_are_cropped_resized_and_mirrored_as_pillow_does(evaluating: bool) -> None:
    source, wanted = Files(), request(len(Files.SHAPES))
    transform = Transform(24, "crop-flip", mixup=0.5)
    transform = transform.for_evaluation() if evaluating else transform
    batch = make_batch(source, transform, SEED, wanted).batch
    for slot, sample in enumerate(wanted.samples.tolist()):
        image = source.picture(sample)
        row = transform.geometry(SEED, wanted.epoch, [sample], np.array([image.size]))[0].tolist()
        left, top, right, bottom, width, height, x, y, mirror = row
        expected = image.crop((left, top, right, bottom)).resize((width, height), Image.Resampling.BILINEAR)
        expected = expected.crop((x, y, x + 24, y + 24))
        if mirror:
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        assert np.array_equal(batch.images[slot], np.asarray(expected)), Files.FORMATS[sample]
    assert batch.images.shape == (9, 24, 24, 3)
    assert batch.labels.tolist() == [int(source.labels[sample]) for sample in wanted.samples]
    assert batch.samples.tolist() == wanted.samples.tolist()
    assert batch.mix.shape == ((9, 0) if evaluating else (9, 6))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("augment", "pad"), [("shift", 2), ("shift-flip", 2)])
def test_shifting_is_padding_and_cutting_each_image(channels: int, augment: str, pad: int) -> None:
    source, wanted = array_source(channels), request(12)
    batch = make_batch(source, Transform(16, augment), SEED, wanted).batch  # type: ignore[arg-type]
    offsets = shift_offsets(SEED, wanted, pad)
    flipped = mirrored(SEED, wanted.epoch, wanted.samples)
    for slot, sample in enumerate(wanted.samples):
        canvas = np.zeros((16 + 2 * pad, 16 + 2 * pad, channels), np.uint8)
        canvas[pad:-pad, pad:-pad] = source.images[sample]
        x, y = offsets[slot]
        expected = canvas[y : y + 16, x : x + 16]
        if augment == "shift-flip" and flipped[slot]:
            expected = expected[:, ::-1]
        assert np.array_equal(batch.images[slot], expected)
    assert flipped.any()
    assert not flipped.all()


@pytest.mark.parametrize("channels", [1, 3])
def test_random_crops_of_arrays_are_pillows(channels: int) -> None:
    source, wanted, transform = array_source(channels), request(12), Transform(20, "crop-flip")
    batch = make_batch(source, transform, SEED, wanted).batch
    assert batch.images.shape == (12, 20, 20, channels)
    rows = transform.geometry(SEED, wanted.epoch, wanted.samples, np.full((12, 2), 16)).tolist()
    for slot, sample in enumerate(wanted.samples):
        stored = source.images[sample]
        image = Image.fromarray(stored[..., 0] if channels == 1 else stored)
        image = image.crop(rows[slot][:4]).resize((20, 20), Image.Resampling.BILINEAR)
        expected = np.asarray(image)[:, ::-1] if rows[slot][8] else np.asarray(image)
        assert np.array_equal(batch.images[slot], expected.reshape(20, 20, channels))


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_without_augmentation_are_unchanged_or_pillows_resize(channels: int) -> None:
    source, wanted = array_source(channels), request(12)
    same = make_batch(source, Transform(16, "none"), SEED, wanted).batch.images
    assert np.array_equal(same, source.images[wanted.samples])
    same[0] = 0
    assert source.images[wanted.samples[0]].any()
    for size in (9, 25):
        seen = make_batch(source, Transform(size, "none"), SEED, wanted).batch.images
        for slot, sample in enumerate(wanted.samples):
            stored = source.images[sample]
            image = Image.fromarray(stored[..., 0] if channels == 1 else stored)
            expected = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
            assert np.array_equal(seen[slot], expected.reshape(size, size, channels))


def test_epochs_and_seeds_crop_an_image_differently() -> None:
    source, transform = array_source(3), Transform(16, "shift-flip")
    seen = [
        make_batch(source, transform, seed, request(12, epoch)).batch.images
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert torch.equal(seen[0], make_batch(source, transform, 0, request(12, 0)).batch.images)


@pytest.mark.parametrize(
    ("augment", "files"),
    [
        ("none", False),
        ("shift", False),
        ("shift-flip", False),
        ("crop-flip", False),
        ("none", True),
        ("crop-flip", True),
    ],
)
def test_the_pixels_of_a_sample_do_not_depend_on_its_batch(augment: str, files: bool) -> None:
    source, transform = Files() if files else array_source(3), Transform(16, augment)  # type: ignore[arg-type]
    wanted = request(9)
    whole = make_batch(source, transform, SEED, wanted).batch.images
    parts = [make_batch(source, transform, SEED, Request(3, wanted.samples[i : i + 4])) for i in (0, 4, 8)]
    assert torch.equal(torch.cat([part.batch.images for part in parts]), whole)


def test_the_augmentation_plan_is_part_of_the_batch() -> None:
    source, wanted = array_source(3), request(12)
    transform = Transform(16, "none", cutmix=1.0, augmentation=Augmentation(erasing=0.7))
    made = make_batch(source, transform, SEED, wanted)
    expected = plan(transform.augmentation, SEED, wanted, 16)
    assert made.plan is not None
    assert np.array_equal(made.plan.table, expected.table)
    assert made.plan.runs == expected.runs
    assert np.array_equal(made.batch.mix, mixing_plan(transform, SEED, wanted))
    assert make_batch(source, Transform(16, "none"), SEED, wanted).plan is None
    assert made.bad == ()


def test_a_batch_does_not_share_memory_with_its_request() -> None:
    wanted = request(5)
    labels = np.arange(5, dtype=np.int64)
    made = finished(
        torch.zeros(5, 4, 4, 3, dtype=torch.uint8), labels, (), Transform(4, "none"), SEED, wanted
    )
    made.batch.samples[0] = 99
    assert 99 not in wanted.samples


def broken_folder(place: Path) -> DatasetSpec:
    for label in ("cat", "dog"):
        (place / "train" / label).mkdir(parents=True)
        for number in range(3):
            pixels = np.full((20, 30, 3), 40 * number + 60 * (label == "dog"), np.uint8)
            Image.fromarray(pixels).save(place / "train" / label / f"good{number}.png")
    (place / "train" / "dog" / "bad.jpg").write_bytes(b"\xff\xd8\xff nothing more")
    (place / "val").symlink_to(place / "train")
    return DatasetSpec("folder", str(place), "train")


def test_a_broken_file_is_rejected_by_name(tmp_path: Path) -> None:
    source = open_dataset(broken_folder(tmp_path))
    with pytest.raises(UserError, match=r"dog/bad\.jpg"):
        make_batch(source, Transform(8, "crop-flip"), SEED, Request(0, np.arange(7)))


@pytest.mark.parametrize("on_bad", ["substitute", "black"])
def test_a_broken_file_is_replaced_and_recorded_in_its_row(tmp_path: Path, on_bad: str) -> None:
    source = open_dataset(broken_folder(tmp_path))
    assert isinstance(source, EncodedDataset)
    transform = Transform(8, "crop-flip", on_bad=on_bad)  # type: ignore[arg-type]
    made = make_batch(source, transform, SEED, Request(0, np.arange(7)))
    found = load_sample(source, transform, SEED, 0, 3)
    assert made.batch.samples.tolist() == list(range(7))
    assert made.bad == found.bad
    assert all(isinstance(bad, BadSample) and bad.sample == 3 for bad in made.bad)
    assert "bad.jpg" in made.bad[0].what
    assert np.array_equal(made.batch.images[3], found.pixels)
    assert made.batch.labels[3] == found.label
    assert made.batch.images[3].any() == (on_bad == "substitute")
