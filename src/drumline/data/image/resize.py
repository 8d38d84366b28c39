"""Pillow's resize as our own arithmetic: the same pixels whatever Pillow is installed.

Promises: bit-equal to `Image.crop(box).resize(size, filter)` of the named Pillow version. `pillow12` (the last of 12;
9.5 to 12.1 differ from it only for images over a hundred times as high as wide) resamples rows before columns;
`pillow13` takes columns first when the height shrinks by more than twice what the width does, which changes pixels by
one here and there. The version is part of the recipe, so that an upgrade of a
library cannot change training. Boxes outside the image, types other than uint8, and alpha channels are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from drumline import native
from drumline.core.errors import UserError
from drumline.data.image.decode import MAX_PIXELS

Box = tuple[int, int, int, int]
Pixels = NDArray[np.uint8]
Version = Literal["pillow12", "pillow13"]
Smooth = Literal["bilinear", "bicubic", "box", "lanczos"]
Filter = Literal["bilinear", "bicubic", "box", "lanczos", "nearest"]

FRACTION_BITS = 22
"""Weights are multiples of 2**-22: the finest that keep a sum of 8-bit pixels within 32 bits."""


class Coefficients(NamedTuple):
    """Which source pixels make each target pixel of one axis, and with which weights."""

    first: NDArray[np.int32]
    counts: NDArray[np.int32]
    weights: NDArray[np.int32]
    """(target, taps); columns from `counts` on are zero."""


def resize(
    array: Pixels,
    size: tuple[int, int],
    box: Box | None = None,
    version: Version = "pillow12",
    filter: Filter = "bilinear",
) -> Pixels:
    """Crop `box` (left, top, right, bottom) from an (H, W), (H, W, 1) or (H, W, 3) uint8 image, then resize the
    crop to `size` (width, height). Gives a new array with the same axes. Runs without the GIL where the native
    part is built, else through Pillow, one axis at a time; the pixels are the same."""
    _check(array, size, box, version, filter)
    size = int(size[0]), int(size[1])
    left, top, right, bottom = box or (0, 0, array.shape[1], array.shape[0])
    crop = array[top:bottom, left:right]
    if crop.shape[1::-1] == tuple(size):
        return crop.copy()
    if filter == "nearest":
        return crop[_nearest(crop.shape[0], size[1])][:, _nearest(crop.shape[1], size[0])]
    columns_first = vertical_first(version, crop.shape[1], crop.shape[0], *size)
    if native.available():
        return native.resize(crop, size, filter, columns_first)
    return resize_by_pillow(crop, size, columns_first, filter)


def vertical_first(version: Version, width: int, height: int, new_width: int, new_height: int) -> bool:
    """Whether this version of Pillow resamples columns before rows."""
    shrinks_by = height - new_height
    if version == "pillow12":
        return shrinks_by > 0 and height > 100 * width
    return shrinks_by > 0 and shrinks_by > 2 * (width - new_width)


@lru_cache(maxsize=16384)
def coefficients(source: int, target: int, filter: Smooth = "bilinear") -> Coefficients:
    """Pillow's weights for an axis of `source` pixels made into `target`: the filter stretched to the reduction,
    in float64, normalised, rounded half away from zero. Only +, -, *, / in a fixed order, so every machine agrees
    (lanczos also takes the C library's sine, as Pillow does)."""
    shape, reach = _SHAPES[filter]
    scale = source / target
    stretch = max(scale, 1.0)
    support = reach * stretch
    taps = math.ceil(support) * 2 + 1
    centre = (np.arange(target) + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + support + 0.5).astype(np.int64), source)
    weights = np.zeros((target, taps))
    total = np.zeros(target)
    for tap in range(taps):
        distance = (tap + first - centre + 0.5) * (1.0 / stretch)
        weights[:, tap] = np.where(first + tap < last, shape(distance), 0.0)
        total += weights[:, tap]
    weights /= np.where(total == 0.0, 1.0, total)[:, None]
    scaled = weights * (1 << FRACTION_BITS)
    fixed = np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int32)
    result = Coefficients(first.astype(np.int32), (last - first).astype(np.int32), fixed)
    for part in result:
        part.flags.writeable = False
    return result


def resize_by_pillow(
    image: Pixels, size: tuple[int, int], columns_first: bool, filter: Filter = "bilinear"
) -> Pixels:
    """The same resize by the installed Pillow, one axis at a time, which gives the same pixels in every version."""
    grey = image.ndim == 3 and image.shape[2] == 1
    picture = Image.fromarray(np.ascontiguousarray(image[..., 0] if grey else image))
    width, height = size
    one_axis = (picture.width, height) if columns_first else (width, picture.height)
    kind = Image.Resampling[filter.upper()]
    resized = np.asarray(picture.resize(one_axis, kind).resize(size, kind))
    return resized[..., None] if grey else resized


def _triangle(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _box(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys' cubic with a = -0.5."""
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """A sinc under a wider one. Python's sine is the C library's; NumPy's differs."""

    def sinc(value: float) -> float:
        return 1.0 if value == 0.0 else math.sin(value * math.pi) / (value * math.pi)

    return np.array([sinc(v) * sinc(v / 3) if -3.0 <= v < 3.0 else 0.0 for v in x.tolist()])


_SHAPES: dict[Smooth, tuple[Callable[[NDArray[np.float64]], NDArray[np.float64]], float]] = {
    "box": (_box, 0.5),
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}


@lru_cache(maxsize=256)
def _nearest(source: int, target: int) -> NDArray[np.int64]:
    """Pillow walks the target adding the step each time; the sum, rounding errors included, is the position."""
    step = source / target
    position = np.cumsum(np.concatenate([[step * 0.5], np.full(target - 1, step)]))
    return position.astype(np.int64)


def _check(array: Pixels, size: tuple[int, int], box: Box | None, version: Version, filter: Filter) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise UserError(
            f"resize: the image is {kind}, not a NumPy array of uint8",
            fix="convert it first, for example by np.asarray(image) or array.astype(np.uint8)",
        )
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3)) or 0 in array.shape:
        raise UserError(
            f"resize: the image has the shape {array.shape}",
            fix="give (H, W), (H, W, 1) or (H, W, 3); resize an alpha channel by itself, as (H, W)",
        )
    if not _whole_numbers(size, 2) or min(size) < 1:
        raise UserError(f"resize: size = {size!r}", fix="give (width, height), two whole numbers above 0")
    height, width = array.shape[:2]
    if size[0] * size[1] > MAX_PIXELS or max(size[0] * height, width * size[1]) > 8 * MAX_PIXELS:
        raise UserError(
            f"resize: size = {size!r} is too large for an image of {width} x {height} pixels",
            fix=f"give a size of at most {MAX_PIXELS:,} pixels; very wide or tall images need a smaller one",
        )
    if version not in get_args(Version):
        raise UserError(f"resize: version = {version!r}", fix=f"use one of {', '.join(get_args(Version))}")
    if filter not in get_args(Filter):
        raise UserError(f"resize: filter = {filter!r}", fix=f"use one of {', '.join(get_args(Filter))}")
    inside = box is None or (
        _whole_numbers(box, 4) and 0 <= box[0] < box[2] <= width and 0 <= box[1] < box[3] <= height
    )
    if not inside:
        raise UserError(
            f"resize: box = {box!r} is not inside the image of {width} x {height} pixels",
            fix="give whole numbers (left, top, right, bottom) with left < right and top < bottom",
        )


def _whole_numbers(values: object, count: int) -> bool:
    """Whether this is a tuple or list of so many whole numbers."""
    return (
        isinstance(values, tuple | list)
        and len(values) == count
        and all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in values)
    )
