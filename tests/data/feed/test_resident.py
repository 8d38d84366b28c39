"""Sets on the device beside the loader: the same batches, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from drumline.data.feed.batch import Batch, make_batch
from drumline.data.feed.resident import CHUNK_BATCHES, ResidentSet, fits_on_device, resident_feed
from drumline.data.feed.sampler import Request, evaluation_requests, training_requests
from drumline.data.feed.transform import Transform
from drumline.data.image.augment import Augmentation, apply
from drumline.data.sources import ArrayDataset, DatasetSpec, EncodedDataset, PooledDataset, open_dataset

CPU, SEED = torch.device("cpu"), 3


def array_source(count: int = 90, size: int = 16, channels: int = 3, pool: int = 0) -> ArrayDataset:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (pool or count, size, size, channels), dtype=np.uint8)
    kind = PooledDataset if pool else ArrayDataset
    return kind("noise", images, draw.integers(0, 5, count), tuple("abcde"))


def training(source: ArrayDataset, batch: int, steps: int) -> Iterator[Request]:
    part = slice(0, batch)
    return training_requests(
        seed=SEED, samples=len(source), batch=batch, first_step=0, last_step=steps, local=part
    )


def evaluation(source: ArrayDataset, batch: int) -> Iterator[Request]:
    return evaluation_requests(samples=len(source), batch=batch, rank=0, world=1)


def expected(source: ArrayDataset, transform: Transform, request: Request) -> Batch:
    """The loader's batch, augmented."""
    made = make_batch(source, transform, SEED, request)
    if made.plan is None:
        return made.batch
    return made.batch._replace(images=apply(made.batch.images, made.plan))


def assert_same(ours: Batch, theirs: Batch) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [16, 21, 7])
@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip"])
def test_resident_batches_are_the_loaders(augment: str, size: int, channels: int) -> None:
    source = array_source(channels=channels)
    transform = Transform(size, augment)  # type: ignore[arg-type]
    held = ResidentSet.upload(source, transform, CPU)
    asked = list(chain(training(source, 8, 30), evaluation(source, 25)))
    fed = list(resident_feed(held, SEED, iter(asked)))
    assert len(fed) == len(asked)
    for ours, request in zip(fed, asked, strict=True):
        assert_same(ours, expected(source, transform, request))


@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip"])
def test_flips_of_any_chance_are_those_of_the_loader(augment: str) -> None:
    source = array_source()
    for hflip in (0.0, 0.3, 1.0):
        transform = Transform(16, augment, hflip=hflip, augmentation=Augmentation(vflip=0.5, rotation=20.0))  # type: ignore[arg-type]
        held = ResidentSet.upload(source, transform, CPU)
        for ours, request in zip(
            resident_feed(held, SEED, training(source, 20, 5)), training(source, 20, 5), strict=True
        ):
            assert_same(ours, expected(source, transform, request))
            plain = make_batch(source, Transform(16, "none"), SEED, request).batch.images
            bare = replace(transform, augmentation=Augmentation())
            made = make_batch(source, bare, SEED, request).batch.images
            if augment == "none":
                mirrored = (made == plain.flip(2)).flatten(1).all(1)
                assert torch.equal(
                    mirrored | (made == plain).flatten(1).all(1), torch.ones(20, dtype=torch.bool)
                )
                assert mirrored.float().mean() == pytest.approx(hflip, abs=0.35)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0)])
def test_mixing_plans_are_those_of_the_loader(mixup: float, cutmix: float) -> None:
    source = array_source()
    transform = Transform(16, "shift-flip", mixup=mixup, cutmix=cutmix)
    held = ResidentSet.upload(source, transform, CPU)
    for ours, request in zip(
        resident_feed(held, SEED, training(source, 7, 30)), training(source, 7, 30), strict=True
    ):
        assert_same(ours, expected(source, transform, request))


def test_a_pooled_set_of_any_length_is_resident() -> None:
    source = array_source(count=1000, pool=17)
    transform = Transform(16, "shift-flip")
    held = ResidentSet.upload(source, transform, CPU)
    for ours, request in zip(
        resident_feed(held, SEED, training(source, 100, 12)), training(source, 100, 12), strict=True
    ):
        assert_same(ours, expected(source, transform, request))


def test_a_memory_mapped_or_embedded_set_is_uploaded_whole() -> None:
    source = open_dataset(DatasetSpec(source="digits", path="", split="train"))
    assert isinstance(source, ArrayDataset)
    transform = Transform(source.shape[0], "shift")
    held = ResidentSet.upload(source, transform, CPU)
    for ours, request in zip(
        resident_feed(held, SEED, training(source, 64, 9)), training(source, 64, 9), strict=True
    ):
        assert_same(ours, expected(source, transform, request))


def test_augmentation_is_applied_to_each_batch() -> None:
    source = array_source()
    strong = Augmentation(jitter=(0.4, 0.4, 0.4, 0.1), randaugment=(2, 9), erasing=0.5, fill=(1, 2, 3))
    transform = Transform(16, "shift-flip", mixup=0.2, augmentation=strong)
    held = ResidentSet.upload(source, transform, CPU)
    for ours, request in zip(
        resident_feed(held, SEED, training(source, 20, 10)), training(source, 20, 10), strict=True
    ):
        assert_same(ours, expected(source, transform, request))
        plain = replace(transform, augmentation=Augmentation())
        assert not torch.equal(ours.images, expected(source, plain, request).images)


def test_later_batches_do_not_change_earlier_ones() -> None:
    source = array_source()
    held = ResidentSet.upload(source, Transform(16, "shift-flip", cutmix=1.0), CPU)
    kept, copies = [], []
    for batch in resident_feed(held, SEED, training(source, 2, 3 * CHUNK_BATCHES)):
        kept.append(batch)
        copies.append(Batch(*(tensor.clone() for tensor in batch)))
    for batch, copy in zip(kept, copies, strict=True):
        assert_same(batch, copy)


def test_several_feeds_can_use_a_set_at_once() -> None:
    source = array_source()
    transform = Transform(16, "shift-flip")
    held = ResidentSet.upload(source, transform, CPU)
    feeds = [resident_feed(held, seed, training(source, 8, 20)) for seed in (SEED, SEED + 1)]
    for ours, other, request in zip(*feeds, training(source, 8, 20), strict=True):
        assert_same(ours, expected(source, transform, request))
        assert torch.equal(ours.samples, other.samples)
        assert not torch.equal(ours.images, other.images)


def test_image_files_and_random_crops_are_not_resident() -> None:
    class Files(EncodedDataset):
        def read(self, sample: int) -> bytes:
            raise AssertionError

        def where(self, sample: int) -> str:
            raise AssertionError

    assert fits_on_device(array_source(), Transform(16, "shift-flip"), CPU)
    assert not fits_on_device(array_source(), Transform(16, "crop-flip"), CPU)
    assert not fits_on_device(Files("files", np.zeros(3, np.int64), ("a",)), Transform(16, "none"), CPU)


@pytest.mark.parametrize(
    ("augment", "stored"), [("none", 16 * 16), ("shift", 20**2), ("shift-flip", 2 * 20**2)]
)
def test_a_set_takes_at_most_a_tenth_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, augment: str, stored: int
) -> None:
    source, transform = array_source(count=50), Transform(16, augment)  # type: ignore[arg-type]
    bytes_ = 50 * 3 * stored
    assert ResidentSet.upload(source, transform, CPU).windows.untyped_storage().nbytes() == bytes_
    for free, fits in ((bytes_ * 10, True), (bytes_ * 10 - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 1 << 40))
        assert fits_on_device(source, transform, torch.device("cuda", 0)) == fits
