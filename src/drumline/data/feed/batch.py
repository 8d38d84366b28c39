"""A batch, and the reference way to make one: by one thread.

Promises: `make_batch` is a pure function of (dataset, transform, seed, request). Loader processes call it; the
threads of `threads.py` and the GPU path are tested against it bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.data.feed.sample import BadSample, cut, load_sample
from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import (
    Geometry,
    Transform,
    mirrored,
    mixing_plan,
    resize_array,
    shift_offsets,
)
from drumline.data.image.augment import AugmentPlan, plan
from drumline.data.sources import ArrayDataset, Dataset

NOTHING = torch.empty((0, 0), dtype=torch.uint8)


class Batch(NamedTuple):
    """What the loader gives to the step."""

    images: torch.Tensor
    """(n, height, width, channels) uint8."""
    labels: torch.Tensor
    """(n,) int64."""
    samples: torch.Tensor
    """(n,) int64: the requested sample ids. A broken sample keeps its id, although a substitute is shown."""
    mix: torch.Tensor
    """(n, MIX_COLUMNS) float32, or (n, 0) when nothing is mixed."""
    extra: torch.Tensor = NOTHING
    """(n, k) uint8: what an objective stored for each sample, such as its teacher's outputs; `NOTHING` if it stored
    nothing."""


class Undecoded(NamedTuple):
    """Samples of a batch that are still JPEGs: the device decodes and crops them."""

    slots: NDArray[np.int64]
    """Their rows in the batch."""
    samples: NDArray[np.int64]
    data: torch.Tensor
    """Their bytes, one after the other, in page-locked memory."""
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int32]
    """(k, 2): stored width and height."""
    layouts: NDArray[np.int8]
    """How the device decodes each: `gpu.layout`."""
    geometry: Geometry
    status: NDArray[np.int32]
    """0 where the coded data is clean up to its end marker."""


class HostBatch(NamedTuple):
    """A batch on the host, the augmentation that its device has still to apply, and the broken samples."""

    batch: Batch
    plan: AugmentPlan | None
    bad: tuple[BadSample, ...]
    epoch: int
    undecoded: Undecoded | None = None


def make_batch(dataset: Dataset, transform: Transform, seed: int, request: Request) -> HostBatch:
    """The batch of a request."""
    if isinstance(dataset, ArrayDataset):
        pixels, labels, bad = (
            _array_pixels(dataset, transform, seed, request),
            dataset.labels[request.samples],
            (),
        )
        return finished(torch.from_numpy(pixels), labels, bad, transform, seed, request)
    found = [load_sample(dataset, transform, seed, request.epoch, int(sample)) for sample in request.samples]
    return finished(
        torch.from_numpy(np.stack([one.pixels for one in found])),
        np.array([one.label for one in found], np.int64),
        tuple(bad for one in found for bad in one.bad),
        transform,
        seed,
        request,
    )


def finished(
    images: torch.Tensor,
    labels: NDArray[np.int64],
    bad: tuple[BadSample, ...],
    transform: Transform,
    seed: int,
    request: Request,
) -> HostBatch:
    """Adds to pixels and labels what the request and its draws decide."""
    batch = Batch(
        images=images,
        labels=torch.from_numpy(labels),
        samples=torch.from_numpy(request.samples.copy()),
        mix=torch.from_numpy(mixing_plan(transform, seed, request)),
    )
    pixels = (
        plan(transform.augmentation, seed, request, transform.size) if transform.augmentation.active else None
    )
    return HostBatch(batch, pixels, bad, request.epoch)


def _array_pixels(
    dataset: ArrayDataset, transform: Transform, seed: int, request: Request
) -> NDArray[np.uint8]:
    stored = dataset.take(request.samples)
    if transform.augment == "crop-flip":
        sizes = np.full((len(stored), 2), stored.shape[2:0:-1], np.int32)
        rows = transform.geometry(seed, request.epoch, request.samples, sizes)
        return np.stack([cut(image, row, transform) for image, row in zip(stored, rows, strict=True)])
    images = resize_array(stored, transform)
    if transform.augment == "none":
        return np.ascontiguousarray(images)
    count, height, width, _ = images.shape
    pad = transform.pad
    offsets = shift_offsets(seed, request, pad)
    rows = offsets[:, 1, None] + np.arange(height)
    columns = offsets[:, 0, None] + np.arange(width)
    if transform.augment == "shift-flip":
        flipped = mirrored(seed, request.epoch, request.samples)
        columns[flipped] = columns[flipped, ::-1]
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
