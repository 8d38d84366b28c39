"""A whole batch made by one thread: the plain way that every faster way must equal.

Promises: a pure function of (source, view, seed, request). Loader processes use it as it is; the threads of
`threads.py` and the GPU path are tested against it bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.data.feed.order import Request
from drumline.data.feed.views import Batch, View, flips, mixing_plan, resize_array, shift_offsets
from drumline.data.image.augment import AugmentPlan, plan
from drumline.data.image.geometry import Geometry
from drumline.data.image.window import Bad, cut, find_window
from drumline.data.sources import ArraySource, Source


class Coded(NamedTuple):
    """Samples of a batch that are still JPEGs, to be decoded and cut on the device."""

    slots: NDArray[np.int64]
    """Which rows of the batch they are."""
    samples: NDArray[np.int64]
    data: torch.Tensor
    """Their bytes, one after the other, page-locked."""
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int32]
    """(k, 2): stored width and height."""
    layouts: NDArray[np.int8]
    """How the device decodes each: `gpu.rule`."""
    geometry: Geometry
    status: NDArray[np.int32]
    """0 where the coded data runs clean to its end marker."""


class Made(NamedTuple):
    """A batch on the host, what is still to be done to its pixels on its device, and the samples that were broken."""

    batch: Batch
    plan: AugmentPlan | None
    bad: tuple[Bad, ...]
    epoch: int
    coded: Coded | None = None


def make_batch(source: Source, view: View, seed: int, request: Request) -> Made:
    """The batch that a request asks for."""
    if isinstance(source, ArraySource):
        pixels, labels, bad = _array_pixels(source, view, seed, request), source.labels[request.samples], ()
        return finished(torch.from_numpy(pixels), labels, bad, view, seed, request)
    found = [find_window(source, view, seed, request.epoch, int(sample)) for sample in request.samples]
    return finished(
        torch.from_numpy(np.stack([one.pixels for one in found])),
        np.array([one.label for one in found], np.int64),
        tuple(bad for one in found for bad in one.bad),
        view,
        seed,
        request,
    )


def finished(
    images: torch.Tensor,
    labels: NDArray[np.int64],
    bad: tuple[Bad, ...],
    view: View,
    seed: int,
    request: Request,
) -> Made:
    """Pixels and labels together with all that a request and its draws decide."""
    batch = Batch(
        images=images,
        labels=torch.from_numpy(labels),
        samples=torch.from_numpy(request.samples.copy()),
        mix=torch.from_numpy(mixing_plan(view, seed, request)),
    )
    pixels = plan(view.augmentation, seed, request, view.size) if view.augmentation.active else None
    return Made(batch, pixels, bad, request.epoch)


def _array_pixels(source: ArraySource, view: View, seed: int, request: Request) -> NDArray[np.uint8]:
    stored = source.take(request.samples)
    if view.augment == "crop-flip":
        sizes = np.full((len(stored), 2), stored.shape[2:0:-1], np.int32)
        rows = view.geometry(seed, request.epoch, request.samples, sizes)
        return np.stack([cut(image, row, view) for image, row in zip(stored, rows, strict=True)])
    images = resize_array(stored, view)
    if view.augment == "none":
        return np.ascontiguousarray(images)
    count, height, width, _ = images.shape
    pad = view.pad
    offsets = shift_offsets(seed, request, pad)
    rows = offsets[:, 1, None] + np.arange(height)
    columns = offsets[:, 0, None] + np.arange(width)
    if view.augment == "shift-flip":
        mirrored = flips(seed, request)
        columns[mirrored] = columns[mirrored, ::-1]
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
