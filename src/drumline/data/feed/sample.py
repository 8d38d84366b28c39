"""One sample's bytes to the square of pixels that the model sees, or to a substitute's when they are broken.

Promises: the same pixels with and without the native part; whatever Pillow refuses is refused, with its name. A
broken sample's substitute is a function of (seed, epoch, sample id), so every run and every world size takes the same
one; it is seen with the broken sample's own crop draws and brings its own label.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drumline import native
from drumline.core.errors import LostError, UserError
from drumline.core.text import counted
from drumline.data.feed.draws import Purpose, bits
from drumline.data.feed.transform import Transform
from drumline.data.image.decode import decode
from drumline.data.image.geometry import Column, Geometry
from drumline.data.image.limits import MAX_PIXELS
from drumline.data.image.resize import resize_by_pillow, vertical_first
from drumline.data.reading import lost
from drumline.data.sources import EncodedDataset

Window = NDArray[np.uint8]
GeometryOf = Callable[[NDArray[np.int32]], Geometry]
"""What is cut from images of these stored sizes, (n, 2)."""
SUBSTITUTES = 100
"""Tries before a set is called unreadable."""


class BadSample(NamedTuple):
    """A sample whose content could not be used."""

    sample: int
    what: str


class LoadedSample(NamedTuple):
    """What stands in a slot of the batch: pixels, the label that goes with them, and what was broken on the way."""

    pixels: Window
    label: int
    bad: tuple[BadSample, ...] = ()


def load_sample(
    source: EncodedDataset, transform: Transform, seed: int, epoch: int, sample: int
) -> LoadedSample:
    """The window of a sample; of a broken one what `transform.on_bad` says."""
    bad: list[BadSample] = []
    candidate = sample
    for attempt in range(SUBSTITUTES):
        try:
            pixels = _window(source, transform, seed, epoch, sample, candidate)
            return LoadedSample(pixels, int(source.labels[candidate]), tuple(bad))
        except MemoryError as error:
            raise lost(source.where(candidate), error) from error
        except LostError:  # says nothing about the sample
            raise
        except UserError as error:
            if transform.on_bad == "raise":
                raise
            bad.append(BadSample(candidate, error.what))
        if transform.on_bad == "black":
            return LoadedSample(
                np.zeros((transform.size, transform.size, 3), np.uint8),
                int(source.labels[sample]),
                tuple(bad),
            )
        candidate = substitute(seed, epoch, sample, attempt, len(source))
    tried = counted(len({each.sample for each in bad}), "sample")
    raise UserError(
        f"no readable substitute for a broken sample: {tried} cannot be read, the last of them: {bad[-1].what}",
        fix="check the disk or the network share; `drumline verify` lists every broken sample",
    )


def _window(
    source: EncodedDataset, transform: Transform, seed: int, epoch: int, sample: int, shown: int
) -> Window:
    """The window of the sample that is shown, cut by the draws of the one that was asked for."""

    def geometry(sizes: NDArray[np.int32]) -> Geometry:
        return transform.geometry(seed, epoch, [sample], sizes)

    stored = source.decoded(shown)
    if stored is None:
        return crop_encoded(source.read(shown), source.where(shown), transform, geometry)
    pixels = crop_decoded(stored, source.where(shown), transform, geometry)
    return pixels if pixels.shape[2] == 3 else np.repeat(pixels, 3, axis=2)


def substitute(seed: int, epoch: int, sample: int, attempt: int, samples: int) -> int:
    """Which sample to try in the place of a broken one."""
    high, low = bits(seed, epoch, np.array([sample]), Purpose.SUBSTITUTE, attempt)[0, :2].tolist()
    return int((high << 32 | low) % samples)


def crop_encoded(data: bytes, where: str, transform: Transform, geometry: GeometryOf) -> Window:
    """The window of an encoded image; `geometry` tells what to cut once the stored size is known."""
    stored = native.jpeg_size(data) if native.decodes_jpeg() else None
    if stored is not None and native_decodes(np.array([stored], np.int32), transform)[0]:
        row = _checked_row((stored[0], stored[1]), where, geometry)
        pixels = native.jpeg_crop(
            data, stored[:2], row, transform.size, transform.interpolation, transform.resize
        )
        if pixels is not None:
            return pixels
    return crop_decoded(np.asarray(decode(data, where, transform.exif)), where, transform, geometry)


def cut(image: Window, row: NDArray[np.int32], transform: Transform) -> Window:
    """The window that a geometry row asks for, of a decoded image (1 or 3 channels)."""
    left, top, right, bottom, width, height, x, y, mirror = row.tolist()
    columns_first = vertical_first(transform.resize, right - left, bottom - top, width, height)
    size = transform.size
    if native.available():
        return native.window(image, row, (size, size), transform.interpolation, columns_first)
    resized = resize_by_pillow(
        image[top:bottom, left:right], (width, height), columns_first, transform.interpolation
    )
    window = resized[y : y + size, x : x + size]
    return np.ascontiguousarray(window[:, ::-1] if mirror else window)


def native_decodes(stored: NDArray[np.int32], transform: Transform) -> NDArray[np.bool_]:
    """Which JPEGs the native part may decode, by what their headers tell (`native.STORED` numbers each): those within
    limits, and not to be turned."""
    wide, high, has_exif = stored.T.astype(np.int64)
    within = (wide > 0) & (wide * high <= MAX_PIXELS)
    return within & (has_exif == 0) if transform.exif == "apply" else within


def elongated(rows: Geometry) -> NDArray[np.bool_]:
    """Which images are so long and thin that resizing their short side would make them huge."""
    return rows[:, Column.WIDTH].astype(np.int64) * rows[:, Column.HEIGHT] > MAX_PIXELS


def crop_decoded(image: Window, where: str, transform: Transform, geometry: GeometryOf) -> Window:
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
