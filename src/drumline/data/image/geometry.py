"""The crop of each image: pure, vectorised over a batch.

Promises: a row of geometry depends on the image's stored size and on draws keyed by (seed, epoch, sample id) alone.
Only operations that every machine rounds alike are used, so the boxes are the same on every machine. A row means:
crop the box, resize it to (width, height), crop the model's size from that at (x, y), mirror it.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from drumline.data.feed.draws import Purpose, uniform

Geometry = NDArray[np.int32]
"""(n, COLUMNS), by `Column`."""


class Column(IntEnum):
    """The columns of a geometry row. The native part and the GPU kernel read the same order."""

    LEFT = 0
    TOP = 1
    RIGHT = 2
    BOTTOM = 3
    WIDTH = 4
    HEIGHT = 5
    X = 6
    Y = 7
    MIRROR = 8


COLUMNS = len(Column)
ATTEMPTS = 10
LARGEST_ASPECT = 4 / 3
_LOG_ASPECT = math.log(LARGEST_ASPECT)


def training_geometry(
    sizes: NDArray[np.integer], size: int, seed: int, epoch: int, samples: NDArray[np.integer]
) -> Geometry:
    """Random resized crops, half of them mirrored. `sizes` is (n, 2): the stored width and height."""
    rows = np.zeros((len(samples), COLUMNS), np.int32)
    draws = uniform(seed, epoch, samples, Purpose.CROP, 4 * ATTEMPTS)
    rows[:, :4] = random_resized_crops(sizes, draws)
    rows[:, Column.WIDTH] = rows[:, Column.HEIGHT] = size
    rows[:, Column.MIRROR] = mirrored(seed, epoch, samples)
    return rows


def evaluation_geometry(sizes: NDArray[np.integer], size: int, crop: float) -> Geometry:
    """The whole image, resized to a short side of size / crop, and the centre crop of that."""
    wide, high = np.asarray(sizes).astype(np.int64).T
    short = math.floor(size / crop)
    rows = np.zeros((len(wide), COLUMNS), np.int32)
    rows[:, Column.RIGHT], rows[:, Column.BOTTOM] = wide, high
    upright = wide <= high
    # In integers; the result is that of the usual int(short * high / wide).
    width = np.where(upright, short, short * wide // high)
    height = np.where(upright, short * high // wide, short)
    rows[:, Column.WIDTH], rows[:, Column.HEIGHT] = width, height
    rows[:, Column.X] = np.rint((width - size) / 2)
    rows[:, Column.Y] = np.rint((height - size) / 2)
    return rows


def random_resized_crops(sizes: NDArray[np.integer], draws: NDArray[np.float64]) -> NDArray[np.int32]:
    """Inception's crop as (n, 4) boxes: 8 to 100 % of the area, aspect 3/4 to 4/3, the first of ten tries that
    fits, otherwise the centre. `draws` has four uniform numbers per try."""
    wide, high = np.asarray(sizes).astype(np.int64).T
    tries = draws.reshape(len(wide), ATTEMPTS, 4)
    area = (wide * high)[:, None] * (0.08 + 0.92 * tries[:, :, 0])
    aspect = exp_small((2 * tries[:, :, 1] - 1) * _LOG_ASPECT)
    w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (w > 0) & (w <= wide[:, None]) & (h > 0) & (h <= high[:, None])
    chosen = np.arange(len(wide)), fits.argmax(axis=1)
    w, h = w[chosen], h[chosen]
    x = (tries[..., 2][chosen] * (wide - w + 1)).astype(np.int64)
    y = (tries[..., 3][chosen] * (high - h + 1)).astype(np.int64)
    none = ~fits.any(axis=1)
    if none.any():
        w[none], h[none] = _centre_of_last_resort(wide[none], high[none])
        x[none], y[none] = (wide - w)[none] // 2, (high - h)[none] // 2
    return np.stack([x, y, x + w, y + h], axis=1).astype(np.int32)


def mirrored(seed: int, epoch: int, samples: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which samples are mirrored."""
    return uniform(seed, epoch, samples, Purpose.FLIP, 1)[:, 0] < 0.5


def exp_small(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The exponential function for |x| <= 2, by its series: additions, multiplications and divisions round alike on
    every machine, which NumPy's own exp does not promise."""
    total = np.ones_like(x)
    for term in range(24, 0, -1):
        total = 1.0 + x / term * total
    return total


def _centre_of_last_resort(
    wide: NDArray[np.int64], high: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The largest centre crop of an allowed aspect, for images so elongated that no try fits."""
    too_high, too_wide = wide / high < 1 / LARGEST_ASPECT, wide / high > LARGEST_ASPECT
    w = np.where(too_wide, np.rint(high * LARGEST_ASPECT).astype(np.int64), wide)
    h = np.where(too_high, np.rint(wide * LARGEST_ASPECT).astype(np.int64), high)
    return np.maximum(w, 1), np.maximum(h, 1)
