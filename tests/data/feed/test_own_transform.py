"""A user's own augmentation: the same pixels from any kind of worker, and mistakes reported with the sample."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.core.errors import UserError
from drumline.data.feed.batch import BadSamples, make_batch
from drumline.data.feed.choose import choose_workers
from drumline.data.feed.loader import LoaderWorkers, batches
from drumline.data.feed.own_transform import generator_of, unrepeatable
from drumline.data.feed.resident import fits_on_device
from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import Transform
from drumline.data.image.augment import Augmentation, apply
from drumline.data.sources import ArrayDataset, Dataset, DatasetSpec, open_dataset
from tests import own_code
from tests.data.test_native import needs_jpeg

CPU, SEED = torch.device("cpu"), 9
DIGITS = DatasetSpec("digits", "", "train")
NOISY = "tests.own_code:noisy"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> DatasetSpec:
    """JPEGs, a PNG, and a file that is broken."""
    folder, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(2)
    for number in range(10):
        place = folder / "train" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (30 + number, 25, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.{'png' if number == 4 else 'jpg'}")
    (folder / "train/a/8.jpg").write_bytes(b"\xff\xd8\xff broken")
    return DatasetSpec("folder", str(folder), "train")


def requests() -> Iterator[Request]:
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(10)
        yield from (Request(epoch, order[first : first + 4]) for first in (0, 4))


def fed(spec: DatasetSpec, transform: Transform, workers: LoaderWorkers) -> list[torch.Tensor]:
    source = open_dataset(spec)
    bad = BadSamples("training", len(source), 1)
    made = batches(spec, source, transform, SEED, requests(), workers, CPU, bad)
    with closing(made) as feed:
        return [batch.images.clone() for batch in feed]


def plain(spec: DatasetSpec, transform: Transform) -> list[torch.Tensor]:
    """What the function makes of the batches without it, one image at a time."""
    source, bare = open_dataset(spec), replace(transform, own="", augmentation=Augmentation())
    found = []
    for request in requests():
        images = make_batch(source, bare, SEED, request).batch.images.numpy()
        for row, sample in enumerate(request.samples.tolist()):
            images[row] = own_code.noisy(images[row], generator_of(SEED, request.epoch, sample))
        plan = make_batch(source, replace(transform, own=""), SEED, request).plan
        assert plan is not None
        found.append(apply(torch.from_numpy(images), plan))
    return found


WORKERS = [
    LoaderWorkers("threads", 0),
    pytest.param(LoaderWorkers("threads", 3), marks=needs_jpeg),
    pytest.param(LoaderWorkers("processes", 2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_the_pixels_are_the_same_from_any_kind_of_worker(
    kind: str, workers: LoaderWorkers, photos: DatasetSpec
) -> None:
    spec = photos if kind == "files" else DIGITS
    transform = Transform(
        16 if kind == "files" else 8,
        "crop-flip" if kind == "files" else "shift",
        augmentation=Augmentation(vflip=0.5, erasing=0.5),
        own=NOISY,
        on_bad="substitute",
    )
    ours, expected = fed(spec, transform, workers), plain(spec, transform)
    assert len(ours) == 4
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
    without = fed(spec, replace(transform, own=""), LoaderWorkers("threads", 0))
    assert not any(torch.equal(one, other) for one, other in zip(ours, without, strict=True))


def digits() -> Dataset:
    return open_dataset(DIGITS)


def test_a_sample_has_the_same_pixels_in_any_batch_and_others_in_another_epoch() -> None:
    source, transform, ids = digits(), Transform(8, "none", own=NOISY), np.array([7, 3, 900])
    whole = make_batch(source, transform, SEED, Request(1, ids)).batch.images
    for row in range(3):
        alone = make_batch(source, transform, SEED, Request(1, ids[row : row + 1])).batch.images
        assert torch.equal(alone[0], whole[row])
    assert not torch.equal(make_batch(source, transform, SEED, Request(2, ids)).batch.images, whole)
    assert not torch.equal(make_batch(source, transform, SEED + 1, Request(1, ids)).batch.images, whole)


def test_a_sample_that_is_drawn_twice_in_an_epoch_is_augmented_twice() -> None:
    transform, ids = Transform(8, "none", own=NOISY), np.array([7, 7, 7])
    request = Request(1, ids, repeats=np.array([0, 1, 0]))
    first, second, third = make_batch(digits(), transform, SEED, request).batch.images
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def test_a_class_is_constructed_and_may_write_to_its_image() -> None:
    source, request = digits(), Request(0, np.arange(5))
    assert isinstance(source, ArrayDataset)
    before = source.images.copy()
    bare = make_batch(source, Transform(8, "none"), SEED, request).batch.images
    shaded = make_batch(source, Transform(8, "none", own="tests.own_code:Shade"), SEED, request).batch.images
    assert (shaded <= bare).all()
    assert not torch.equal(shaded, bare)
    assert np.array_equal(source.images, before)


def test_evaluation_is_not_augmented() -> None:
    assert Transform(8, "none", own=NOISY).for_evaluation().own == ""


def test_it_keeps_arrays_on_the_host_and_jpegs_on_the_cpu(photos: DatasetSpec) -> None:
    transform = Transform(8, "none", own=NOISY)
    assert not fits_on_device(digits(), transform, CPU)
    chosen, why = choose_workers(
        DIGITS, digits(), transform, SEED, CPU, count=2, pool="processes", decode="auto"
    )
    assert (chosen, why) == (LoaderWorkers("processes", 2), "data.transform runs in 2 processes")
    chosen, _ = choose_workers(DIGITS, digits(), transform, SEED, CPU, count=2, pool="auto", decode="auto")
    assert chosen.count == 0


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        (
            "cut_off",
            r"returned a uint8 array of shape \(4, 16, 3\) for .*train/",
            r"image's shape, \(16, 16, 3\)",
        ),
        ("scaled", "returned a float64 array of shape", "return a uint8 NumPy array"),
        ("empty", "returned a NoneType for", "return a uint8 NumPy array"),
        ("failing", r"raised KeyError for .*train/.* \(epoch 1\): 'a mistake'", "correct the function"),
        ("without_generator", r"cannot be called as \(image, rng\)", "the first two parameters"),
        ("nosy", "has nothing called nosy", "did you mean noisy?"),
    ],
)
def test_a_mistake_names_the_field_the_sample_and_the_fix(
    name: str, words: str, fix: str, photos: DatasetSpec
) -> None:
    transform = Transform(16, "crop-flip", own=f"tests.own_code:{name}", on_bad="substitute")
    with pytest.raises(UserError, match=rf"^data.transform tests.own_code:{name}: .*{words}") as error:
        make_batch(open_dataset(photos), transform, SEED, Request(1, np.array([0, 1])))
    assert fix.replace("\\", "") in error.value.fix


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("noisy", ""),
        ("Shade", ""),
        ("by_random", "it draws from Python's `random`"),
        ("by_numpy", "it draws from `numpy.random`"),
        ("by_torch", "it draws from torch's generator"),
        ("by_its_own", "two calls with the same image and generator return different pixels"),
    ],
)
def test_random_numbers_from_elsewhere_are_found_and_leave_no_trace(name: str, why: str) -> None:
    source, request = digits(), Request(0, np.arange(8))
    transform = Transform(8, "none", own=f"tests.own_code:{name}")
    images = make_batch(source, Transform(8, "none"), SEED, request).batch.images.numpy()
    before = images.copy(), random.getstate(), torch.get_rng_state(), np.random.get_state()[1:3]
    assert unrepeatable(images, source, transform, SEED, request) == why
    assert np.array_equal(images, before[0])
    assert random.getstate() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert str(np.random.get_state()[1:3]) == str(before[3])


def test_a_feed_takes_it_too(photos: DatasetSpec) -> None:
    import drumline

    path = Path(photos.path)
    made = []
    for workers in (0, 2):
        with drumline.open_feed(
            path, 4, 16, workers=workers, pool="auto", transform=NOISY, strict=False, bad_limit=1
        ) as feed:
            made.append([batch.images for batch in feed])
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
