"""Sets on a GPU: the loader's batches, no wait for the device, little time on the host."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from drumline.data.feed.batch import Batch
from drumline.data.feed.resident import ResidentSet, resident_feed
from drumline.data.feed.transform import Transform
from drumline.data.image.augment import Augmentation
from tests.data.feed.test_resident import SEED, array_source, assert_same, expected, training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STRONG = Augmentation(jitter=(0.4, 0.4, 0.4, 0.1), randaugment=(2, 9), erasing=0.5, fill=(1, 2, 3))
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip"])
@pytest.mark.parametrize("strong", [Augmentation(), STRONG])
def test_resident_batches_are_the_loaders(augment: str, strong: Augmentation) -> None:
    source = array_source(count=5000, size=32)
    transform = Transform(32, augment, mixup=0.2, cutmix=1.0, augmentation=strong)  # type: ignore[arg-type]
    held = ResidentSet.upload(source, transform, DEVICE)
    for ours, request in zip(
        resident_feed(held, SEED, training(source, 128, 60)), training(source, 128, 60), strict=True
    ):
        assert all(tensor.device == DEVICE for tensor in ours[:4])
        assert_same(Batch(*(tensor.cpu() for tensor in ours)), expected(source, transform, request))


def test_batches_are_right_while_the_device_is_busy_and_the_next_ones_are_prepared() -> None:
    source = array_source(count=5000, size=32)
    transform = Transform(32, "shift-flip", cutmix=1.0)
    held = ResidentSet.upload(source, transform, DEVICE)
    matrix = torch.randn(4096, 4096, device=DEVICE)
    sums = []
    for batch in resident_feed(held, SEED, training(source, 128, 300)):
        matrix = (matrix @ matrix).clamp_(-1, 1)
        sums.append(torch.stack([batch.images.sum(), batch.labels.sum(), batch.samples.sum()]))
    for ours, request in zip(torch.stack(sums).tolist(), training(source, 128, 300), strict=True):
        plain = expected(source, transform, request)
        assert ours == [int(plain.images.sum()), int(plain.labels.sum()), int(plain.samples.sum())]


@pytest.mark.usefixtures("no_waiting")
def test_feeding_never_waits_for_the_device_and_costs_the_loop_little() -> None:
    source = array_source(count=50_000, size=32)
    held = ResidentSet.upload(source, Transform(32, "shift-flip"), DEVICE)
    feed = resident_feed(held, SEED, training(source, 128, 3000))
    for _ in range(1000):
        next(feed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    took = []  # the machine may have other work, so the fastest tenth counts
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(200):
            next(feed)
        took.append((time.perf_counter() - began) / 200)
    print(f"{min(took) * 1e6:.0f} us a batch of 128")
    assert min(took) < 120e-6
