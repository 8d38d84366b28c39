"""Augmentation on a GPU: the bits of the CPU, and never a wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from drumline.data.feed.sampler import Request
from drumline.data.image import pixels
from drumline.data.image.augment import Augmentation, apply, plan
from tests.data.image.test_pixels import SHAPES, coefficients, every_kind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Kernel = Callable[[Tensor, Tensor], Tensor]
EVERYTHING = Augmentation(jitter=(0.4, 0.4, 0.4, 0.1), randaugment=(2, 9), erasing=0.5, fill=(124, 116, 104))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def equal(kernel: Kernel, images: Tensor, parameters: Tensor) -> bool:
    return torch.equal(kernel(images.cuda(), parameters.cuda()).cpu(), kernel(images, parameters))


@pytest.mark.parametrize("shape", [*SHAPES, (224, 224, 3)])
def test_every_operation_has_the_bits_of_the_cpu(shape: tuple[int, int, int]) -> None:
    images = torch.from_numpy(every_kind(shape, 300 if shape[0] < 100 else 8))
    draw = np.random.default_rng(0)

    def drawn(low: float, high: float) -> Tensor:
        return torch.from_numpy(draw.uniform(low, high, len(images)))

    for kernel in (pixels.brightness, pixels.contrast, pixels.saturation, pixels.sharpness):
        for high in (1.0, 2.0, 6.0):
            assert equal(kernel, images, drawn(0, high).float()), kernel.__name__
    assert equal(pixels.hue, images, drawn(-127, 128).int())
    assert equal(pixels.posterize, images, drawn(1, 9).int())
    assert equal(pixels.solarize, images, drawn(0, 257).int())
    for alone in (pixels.autocontrast, pixels.equalize):
        assert equal(lambda given, _, alone=alone: alone(given), images, drawn(0, 1)), alone.__name__
    angles = drawn(-180, 180).tolist()
    assert equal(pixels.affine, images, coefficients([pixels.rotate(a, shape[1], shape[0]) for a in angles]))
    shears = drawn(-0.3, 0.3).tolist()
    assert equal(pixels.affine, images, coefficients([pixels.shear_x(level) for level in shears]))


@pytest.mark.parametrize(("size", "channels"), [(32, 3), (28, 1), (224, 3)])
def test_a_batch_has_the_bits_of_the_cpu(size: int, channels: int) -> None:
    images = torch.from_numpy(every_kind((size, size, channels), 120 if size < 100 else 28))
    for epoch in range(4):
        made = plan(EVERYTHING, 1, Request(epoch, np.arange(len(images))), size)
        assert torch.equal(apply(images.cuda(), made).cpu(), apply(images, made))


@pytest.mark.usefixtures("deterministic")
def test_the_deterministic_mode_changes_nothing() -> None:
    images = torch.from_numpy(every_kind((32, 32, 3), 120))
    made = plan(EVERYTHING, 2, Request(0, np.arange(len(images))), 32)
    assert torch.equal(apply(images.cuda(), made).cpu(), apply(images, made))


@pytest.mark.usefixtures("no_waiting")
def test_augmenting_never_waits_for_the_device() -> None:
    images = torch.from_numpy(every_kind((32, 32, 3), 120)).cuda()
    several = [plan(EVERYTHING, 3, Request(epoch, np.arange(len(images))), 32) for epoch in range(3)]
    apply(images, several[0])  # The tables are copied once.
    torch.cuda.set_sync_debug_mode("error")
    for made in several:
        apply(images, made)
