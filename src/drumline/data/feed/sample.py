"""Loads one sample: from its bytes to the cropped pixels that the model sees. Replaces a broken one by a substitute,
and counts the broken ones.

Promises: the same pixels with and without the native extension. What Pillow rejects is rejected, by name. The
substitute of a broken sample is a function of (seed, epoch, sample id), so every run and every world size takes the
same one. It is cropped with the draws of the broken sample and has its own label. A broken sample counts once,
however often it is read; too many of them end the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drumline import native
from drumline.core.errors import LostError, UserError
from drumline.core.text import counted, printable
from drumline.data.feed.draws import Purpose, bits
from drumline.data.feed.transform import Column, Geometry, Transform
from drumline.data.image.decode import decode
from drumline.data.image.limits import MAX_PIXELS
from drumline.data.image.resize import resize_by_pillow, vertical_first
from drumline.data.reading import lost
from drumline.data.sources import EncodedDataset

Pixels = NDArray[np.uint8]
GeometryOf = Callable[[NDArray[np.int32]], Geometry]
"""The crops of images of these stored sizes, (n, 2)."""
SUBSTITUTES = 100
"""Tries before the dataset counts as unreadable."""


class BadSample(NamedTuple):
    """A sample whose content cannot be used."""

    sample: int
    what: str


class LoadedSample(NamedTuple):
    """One row of a batch: pixels, their label, and the broken samples that were tried first."""

    pixels: Pixels
    label: int
    bad: tuple[BadSample, ...] = ()


def load_sample(
    dataset: EncodedDataset, transform: Transform, seed: int, epoch: int, sample: int
) -> LoadedSample:
    """The crop of a sample, or what `transform.on_bad` puts in place of a broken one."""
    bad: list[BadSample] = []
    candidate = sample
    for attempt in range(SUBSTITUTES):
        try:
            pixels = _load(dataset, transform, seed, epoch, sample, candidate)
            return LoadedSample(pixels, int(dataset.labels[candidate]), tuple(bad))
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
        candidate = substitute(seed, epoch, sample, attempt, len(dataset))
    tried = counted(len({each.sample for each in bad}), "sample")
    raise UserError(
        f"no readable substitute for a broken sample: {tried} cannot be read, the last of them: {bad[-1].what}",
        fix="check the disk or the network file system; `drumline verify` lists every broken sample",
    )


def _load(
    dataset: EncodedDataset, transform: Transform, seed: int, epoch: int, sample: int, shown: int
) -> Pixels:
    """The crop of the sample that is shown, by the draws of the one that was requested."""

    def geometry(sizes: NDArray[np.int32]) -> Geometry:
        return transform.geometry(seed, epoch, [sample], sizes)

    stored = dataset.decoded(shown)
    if stored is None:
        return crop_encoded(dataset.read(shown), dataset.where(shown), transform, geometry)
    pixels = crop_decoded(stored, dataset.where(shown), transform, geometry)
    return pixels if pixels.shape[2] == 3 else np.repeat(pixels, 3, axis=2)


def substitute(seed: int, epoch: int, sample: int, attempt: int, samples: int) -> int:
    """Which sample to try in place of a broken one."""
    high, low = bits(seed, epoch, np.array([sample]), Purpose.SUBSTITUTE, attempt)[0, :2].tolist()
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


SHOWN = 3


class BadSamples:
    """The broken samples of one dataset. `limit` is how many there may be."""

    def __init__(self, what: str, samples: int, fraction: float) -> None:
        self.what, self.samples = what, samples
        # From the decimal number as it was written: 0.29 of 100 is 29, although the float is a little less.
        self.limit = math.ceil(Fraction(repr(float(fraction))) * samples)
        self.bad: dict[int, str] = {}

    def add(self, bad: Iterable[BadSample]) -> None:
        """Adds broken samples. Refuses to continue if there are too many."""
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
