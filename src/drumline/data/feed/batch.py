"""A batch, and the reference way to make one: sample by sample, in one thread.

Promises: `make_batch` is a pure function of (dataset, transform, seed, request). Loader processes call it; the
threads of `threads.py` and the GPU path are tested against it bit for bit. `load_sample` gives the same pixels with
and without the native extension, and rejects by name every file that Pillow rejects.

A broken sample is replaced by a substitute, which is a function of (seed, epoch, sample id), so every run and every
world size takes the same one. It is cropped with the draws of the broken sample and has its own label. A broken
sample counts once, however often it is read; too many of them end the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from drumline import native
from drumline.core.errors import LostError, UserError
from drumline.core.text import counted, printable
from drumline.data.feed.draws import KEY_BITS, Purpose, bits
from drumline.data.feed.own_transform import transform_images
from drumline.data.feed.sampler import Request
from drumline.data.feed.times import Spent, Stopwatch
from drumline.data.feed.transform import (
    Column,
    Geometry,
    Transform,
    mirrored,
    mixing_plan,
    resize_array,
    shift_offsets,
)
from drumline.data.image.augment import AugmentPlan, plan
from drumline.data.image.decode import MAX_PIXELS, decode
from drumline.data.image.resize import resize_by_pillow, vertical_first
from drumline.data.reading import lost
from drumline.data.sources import ArrayDataset, Dataset, EncodedDataset

NOTHING = torch.empty((0, 0), dtype=torch.uint8)
Pixels = NDArray[np.uint8]
GeometryOf = Callable[[NDArray[np.int32]], Geometry]
"""The crops of images of these stored sizes, (n, 2)."""
SUBSTITUTES = 100
"""Tries before the dataset counts as unreadable."""
SHOWN = 3
"""Broken samples that a message names."""


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
    request: Request
    undecoded: Undecoded | None = None
    spent: Spent = Spent()
    """By workers other than native threads."""


def make_batch(dataset: Dataset, transform: Transform, seed: int, request: Request) -> HostBatch:
    """The batch of a request."""
    if isinstance(dataset, ArrayDataset):
        pixels, labels, bad = (
            _array_pixels(dataset, transform, seed, request),
            dataset.labels[request.samples],
            (),
        )
        own_s = transform_images(pixels, dataset, transform, seed, request)
        made = finished(torch.from_numpy(pixels), labels, bad, transform, seed, request)
        return made._replace(spent=Spent(own_s=own_s))
    found = [load_sample(dataset, transform, seed, request.epoch, int(key)) for key in request.keys]
    pixels = np.stack([one.pixels for one in found])
    own = Spent(own_s=transform_images(pixels, dataset, transform, seed, request))
    made = finished(
        torch.from_numpy(pixels),
        np.array([one.label for one in found], np.int64),
        tuple(bad for one in found for bad in one.bad),
        transform,
        seed,
        request,
    )
    return made._replace(spent=reduce(Spent.plus, (one.spent for one in found), own))


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
    return HostBatch(batch, pixels, bad, request)


def _array_pixels(
    dataset: ArrayDataset, transform: Transform, seed: int, request: Request
) -> NDArray[np.uint8]:
    stored = dataset.take(request.samples)
    if transform.augment == "crop-flip":
        sizes = np.full((len(stored), 2), stored.shape[2:0:-1], np.int32)
        rows = transform.geometry(seed, request.epoch, request.keys, sizes)
        return np.stack([cut(image, row, transform) for image, row in zip(stored, rows, strict=True)])
    images = resize_array(stored, transform)
    if transform.augment == "none" and not transform.mirror:
        return np.ascontiguousarray(images)
    count, height, width, _ = images.shape
    pad = transform.pad
    offsets = shift_offsets(seed, request, pad)  # zeros if nothing is padded
    rows = offsets[:, 1, None] + np.arange(height)
    columns = offsets[:, 0, None] + np.arange(width)
    if transform.mirror:
        flipped = mirrored(seed, request.epoch, request.keys, transform.mirror)
        columns[flipped] = columns[flipped, ::-1]
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


class BadSample(NamedTuple):
    """A sample whose content cannot be used."""

    sample: int
    what: str


class LoadedSample(NamedTuple):
    """One row of a batch: pixels, their label, and the broken samples that were tried first."""

    pixels: Pixels
    label: int
    bad: tuple[BadSample, ...] = ()
    spent: Spent = Spent()


def load_sample(
    dataset: EncodedDataset, transform: Transform, seed: int, epoch: int, key: int
) -> LoadedSample:
    """The crop of a sample, or what `transform.on_bad` puts in place of a broken one. `key`: the sample id, or that
    of `Request.keys`."""
    bad: list[BadSample] = []
    watch = Stopwatch()
    candidate = sample = key & (1 << KEY_BITS) - 1
    for attempt in range(SUBSTITUTES):
        try:
            pixels = _load(dataset, transform, seed, epoch, key, candidate, watch)
            return LoadedSample(pixels, int(dataset.labels[candidate]), tuple(bad), watch.spent())
        except MemoryError as error:
            raise lost(dataset.where(candidate), error) from error
        except LostError:  # not the sample's fault
            raise
        except UserError as error:
            if transform.on_bad == "raise":
                raise
            bad.append(BadSample(candidate, error.what))
        if transform.on_bad == "black":
            return LoadedSample(
                np.zeros((transform.size, transform.size, 3), np.uint8),
                int(dataset.labels[sample]),
                tuple(bad),
            )
        candidate = substitute(seed, epoch, key, attempt, len(dataset))
    tried = counted(len({each.sample for each in bad}), "sample")
    raise UserError(
        f"no readable substitute for a broken sample: {tried} cannot be read, the last of them: {bad[-1].what}",
        fix="check the disk or the network file system; `drumline verify` lists every broken sample",
    )


def _load(
    dataset: EncodedDataset,
    transform: Transform,
    seed: int,
    epoch: int,
    key: int,
    shown: int,
    watch: Stopwatch,
) -> Pixels:
    """The crop of the sample that is shown, by the draws of the one that was requested."""

    def geometry(sizes: NDArray[np.int32]) -> Geometry:
        return transform.geometry(seed, epoch, [key], sizes)

    stored = dataset.decoded(shown)
    if stored is None:
        data = dataset.read(shown)
        watch.read(len(data))
        return crop_encoded(data, dataset.where(shown), transform, geometry)
    watch.read(stored.nbytes)
    pixels = crop_decoded(stored, dataset.where(shown), transform, geometry)
    return pixels if pixels.shape[2] == 3 else np.repeat(pixels, 3, axis=2)


def substitute(seed: int, epoch: int, key: int, attempt: int, samples: int) -> int:
    """Which sample to try in place of a broken one."""
    high, low = bits(seed, epoch, np.array([key]), Purpose.SUBSTITUTE, attempt)[0, :2].tolist()
    return int((high << 32 | low) % samples)


def crop_encoded(data: bytes, where: str, transform: Transform, geometry: GeometryOf) -> Pixels:
    """The crop of an encoded image; `geometry` decides it once the stored size is known."""
    stored = native.jpeg_size(data) if native.decodes_jpeg() else None
    if stored is not None and native_decodes(np.array([stored], np.int32), transform)[0]:
        row = _checked_row((stored[0], stored[1]), where, geometry)
        pixels = native.jpeg_crop(
            data, stored[:2], row, transform.size, transform.interpolation, transform.resize
        )
        if pixels is not None:
            return pixels
    return crop_decoded(np.asarray(decode(data, where, transform.exif)), where, transform, geometry)


def cut(image: Pixels, row: NDArray[np.int32], transform: Transform) -> Pixels:
    """The crop of a decoded image (1 or 3 channels) by a geometry row."""
    left, top, right, bottom, width, height, x, y, mirror = row.tolist()
    columns_first = vertical_first(transform.resize, right - left, bottom - top, width, height)
    size = transform.size
    if native.available():
        return native.crop(image, row, (size, size), transform.interpolation, columns_first)
    resized = resize_by_pillow(
        image[top:bottom, left:right], (width, height), columns_first, transform.interpolation
    )
    cropped = resized[y : y + size, x : x + size]
    return np.ascontiguousarray(cropped[:, ::-1] if mirror else cropped)


def native_decodes(stored: NDArray[np.int32], transform: Transform) -> NDArray[np.bool_]:
    """Which JPEGs the native part may decode, by their headers (`native.STORED` numbers each): those within the
    limits that need no rotation."""
    wide, high, has_exif = stored.T.astype(np.int64)
    within = (wide > 0) & (wide * high <= MAX_PIXELS)
    return within & (has_exif == 0) if transform.exif == "apply" else within


def elongated(rows: Geometry) -> NDArray[np.bool_]:
    """Which images are so long and thin that resizing their short side would make them huge."""
    return rows[:, Column.WIDTH].astype(np.int64) * rows[:, Column.HEIGHT] > MAX_PIXELS


def crop_decoded(image: Pixels, where: str, transform: Transform, geometry: GeometryOf) -> Pixels:
    height, width = image.shape[:2]
    return cut(image, _checked_row((width, height), where, geometry), transform)


def _checked_row(size: tuple[int, int], where: str, geometry: GeometryOf) -> NDArray[np.int32]:
    rows = geometry(np.array([size], np.int32))
    if elongated(rows)[0]:
        left, top, right, bottom = rows[0, :4].tolist()
        raise UserError(
            f"{where} is {right - left} x {bottom - top} pixels, too elongated to be resized by its short side",
            fix="crop it, or remove it from the data",
        )
    return rows[0]


class BadSamples:
    """The broken samples of one dataset. `limit` is how many there may be."""

    def __init__(self, what: str, samples: int, fraction: float) -> None:
        self.what, self.samples = what, samples
        # From the decimal number as it was written: 0.29 of 100 is 29, although the float is a little less.
        self.limit = math.ceil(Fraction(repr(float(fraction))) * samples)
        self.bad: dict[int, str] = {}

    def add(self, bad: Iterable[BadSample]) -> None:
        """Adds broken samples. Raises an error if there are too many."""
        for sample, why in bad:
            self.bad.setdefault(sample, printable(why))
        if len(self.bad) > self.limit:
            raise UserError(
                f"{len(self.bad):,} of {self.samples:,} {self.what} samples are broken; data.bad_limit allows "
                f"{self.limit:,}: {self.some()}",
                fix="`drumline verify` lists all of them; restore or remove them, or raise data.bad_limit",
            )

    def merge(self, others: Sequence[dict[int, str]]) -> None:
        """Adds what other processes found."""
        for other in others:
            self.add(BadSample(sample, why) for sample, why in other.items())

    def lines(self) -> list[str]:
        """Every broken sample, one per line, in the order of sample ids."""
        return [f"{self.what}\t{sample}\t{why}" for sample, why in sorted(self.bad.items())]

    def some(self) -> str:
        """The first of them, for a message."""
        shown = [why for _, why in sorted(self.bad.items())[:SHOWN]]
        rest = len(self.bad) - len(shown)
        return "; ".join(shown) + (f"; and {rest:,} more" if rest else "")
