"""Small array datasets that stay on the device: a batch is one gather there, with the same draws as in the loader.

Promises: the batches of `loader.batches`, bit for bit, in the order of the requests. Draws, labels and mixing plans
are made for many batches at once and sent in one copy, so a batch costs the loop one launch. `fits_on_device`
excludes crop-flip, which resizes, and datasets larger than a tenth of the free memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.data.feed.batch import Batch
from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import Transform, mirrored, mixing_plan, resize_array, shift_offsets
from drumline.data.image.augment import AugmentPlan, apply, plans
from drumline.data.sources import ArrayDataset, Dataset

FREE_FRACTION = 0.1
"""Of the device's free memory that a dataset may take."""
CHUNK_SAMPLES, CHUNK_BATCHES = 4096, 64
"""A chunk ends with whichever comes first. 4096 samples: a draw costs 46 ns a sample there, 230 in a batch of 512,
and 110 at 32768, where the numbers leave the cache."""
UPLOAD_BYTES = 1 << 26


def fits_on_device(dataset: Dataset, transform: Transform, device: torch.device) -> bool:
    """Whether the dataset can be resident: images of one size, no resizing crops, no data.transform (which runs on
    the host), at most a tenth of the free memory."""
    if not isinstance(dataset, ArrayDataset) or transform.augment == "crop-flip" or transform.own:
        return False
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return _stored_bytes(dataset, transform) <= FREE_FRACTION * free


@dataclass(frozen=True)
class ResidentSet:
    """A dataset on a device. Make it once with `upload`; any number of feeds can use it."""

    dataset: ArrayDataset
    transform: Transform
    windows: torch.Tensor
    """(starts, H, W, C): every window of the padded images, by the pixel it starts at. A view of memory that holds
    each pixel once; where samples are mirrored, the mirrored images follow the plain ones."""

    @staticmethod
    def upload(dataset: ArrayDataset, transform: Transform, device: torch.device) -> ResidentSet:
        """Copies the dataset to the device, resized to the transform's size, and pads it there."""
        assert transform.augment != "crop-flip"
        count, size, channels, pad = len(dataset.images), transform.size, dataset.shape[2], transform.pad
        copies, side = _copies(transform), size + 2 * pad
        stored = torch.zeros((copies, count, side, side, channels), dtype=torch.uint8, device=device)
        inner = stored[:, :, pad : pad + size, pad : pad + size]
        step = max(1, UPLOAD_BYTES // (size * size * channels))
        for first in range(0, count, step):
            ids = np.arange(first, min(first + step, count))
            images = torch.from_numpy(resize_array(dataset.take(ids), transform)).to(device)
            inner[0, first : first + len(ids)] = images
            if copies == 2:
                inner[1, first : first + len(ids)] = images.flip(2)
        starts = copies * count * side * side - (size - 1) * side - (size - 1)
        strides = (channels, side * channels, channels, 1)
        return ResidentSet(dataset, transform, stored.as_strided((starts, size, size, channels), strides))

    def starts(self, seed: int, request: Request) -> NDArray[np.int64]:
        """The window of each sample: the shift and the mirroring that the loader would draw for it."""
        count, size, pad = len(self.dataset.images), self.transform.size, self.transform.pad
        image, side = request.samples % count, size + 2 * pad
        if not pad and not self.transform.mirror:
            return image * side**2
        offsets = shift_offsets(seed, request, pad)
        if self.transform.mirror:
            flipped = mirrored(seed, request.epoch, request.keys, self.transform.mirror)
            offsets[flipped, 0] = 2 * pad - offsets[flipped, 0]
            image = image + flipped * count
        return (image * side + offsets[:, 1]) * side + offsets[:, 0]


def resident_feed(
    resident: ResidentSet, seed: int, requests: Iterable[Request]
) -> Generator[Batch, None, None]:
    """The augmented batches of the requests, in their order, made on the current stream of the dataset's device."""
    for several in _chunks(requests):
        # On the step's own stream: the 100 KB of a chunk are copied quickly, and no other stream has to wait or keep
        # memory alive. In the step's own thread: a second thread would need the GIL after each of NumPy's hundreds of
        # small operations, and on two busy cores a batch then waited for up to 0.4 s.
        yield from _prepared(resident, seed, several).batches(resident.windows)


@dataclass(frozen=True)
class _Chunk:
    """What several batches of one epoch and one length need, on the host."""

    count: int
    """Batches."""
    numbers: NDArray[np.int64]
    """Starts, labels and samples of all batches, then the mixing plans by their bits."""
    plans: list[AugmentPlan]
    """One for each batch, or none."""

    def batches(self, windows: torch.Tensor) -> Iterator[Batch]:
        numbers = torch.from_numpy(self.numbers)
        if windows.is_cuda:
            numbers = numbers.pin_memory().to(windows.device, non_blocking=True)
        starts, labels, samples = (column.unbind() for column in numbers[:3].unflatten(1, (self.count, -1)))
        # Without mixing there are no rows left, and so no columns of plans.
        mixes = numbers[3:].reshape(self.count, samples[0].numel(), -1).view(torch.float32).unbind()
        for slot in range(self.count):
            images = windows[starts[slot]]
            if self.plans:
                images = apply(images, self.plans[slot])
            yield Batch(images, labels[slot], samples[slot], mixes[slot])


def _prepared(resident: ResidentSet, seed: int, requests: list[Request]) -> _Chunk:
    samples = np.concatenate([request.samples for request in requests])
    repeats = [request.repeats for request in requests if request.repeats is not None]
    together = Request(requests[0].epoch, samples, np.concatenate(repeats) if repeats else None)
    transform, dataset = resident.transform, resident.dataset
    # Six float32 to a sample lie in three rows of int64, or there are none.
    mix = mixing_plan(transform, seed, together).reshape(-1).view(np.int64).reshape(-1, len(samples))
    rows = resident.starts(seed, together), dataset.labels[samples], samples
    numbers = np.concatenate([np.stack(rows), mix])
    todo = (
        plans(transform.augmentation, seed, requests, transform.size) if transform.augmentation.active else []
    )
    return _Chunk(len(requests), numbers, todo)


def _chunks(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Neighbouring requests of one epoch and one length, up to a chunk."""
    several: list[Request] = []
    for request in requests:
        if several and not (
            request.epoch == several[0].epoch
            and len(request.samples) == len(several[0].samples)
            and len(several) < min(CHUNK_BATCHES, max(1, CHUNK_SAMPLES // len(request.samples)))
        ):
            yield several
            several = []
        several.append(request)
    if several:
        yield several


def _copies(transform: Transform) -> int:
    return 2 if transform.mirror else 1


def _stored_bytes(dataset: ArrayDataset, transform: Transform) -> int:
    side = transform.size + 2 * transform.pad
    return _copies(transform) * len(dataset.images) * side * side * dataset.shape[2]
