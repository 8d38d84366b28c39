"""The GPU half of the data path: how decoded images lie in a device arena before they are resampled.

Promises: places never overlap, and rows begin at multiples of PITCH_MULTIPLE. Needs neither a GPU nor Triton; those
are for `nvjpeg` (decoding) and `resample` (crop, resize, mirror), which a caller imports if it has them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PITCH_MULTIPLE = 16


class Layout(IntEnum):
    """How an image lies in the arena."""

    RGB = 0
    """Interleaved."""
    GREY = 1
    RGB_PLANES = 2
    YCC_444 = 3
    YCC_422 = 4
    YCC_420 = 5
    YCC_440 = 6


class Places(NamedTuple):
    """Where the images of a batch lie in the arena; one row per sample in each array."""

    layout: NDArray[np.int64]
    width: NDArray[np.int64]
    height: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """(n, 3): where each plane begins; of RGB and GREY only the first counts."""
    pitches: NDArray[np.int64]
    """(n, 3): bytes from a row to the next, per plane."""
    end: int
    """One past the last byte."""

    def rows(self, which: NDArray[Any]) -> Places:
        """The places of some of the samples, in the same arena."""
        return Places(
            self.layout[which],
            self.width[which],
            self.height[which],
            self.offsets[which],
            self.pitches[which],
            self.end,
        )


def place(
    layout: NDArray[np.integer[Any]], width: NDArray[np.integer[Any]], height: NDArray[np.integer[Any]]
) -> Places:
    """Gives each image its place, one after the other."""
    layout, width, height = (np.asarray(column, np.int64) for column in (layout, width, height))
    chroma_width, chroma_height = chroma_size(layout, width, height)
    pitches = np.stack([np.where(layout == Layout.RGB, 3 * width, width), chroma_width, chroma_width], axis=1)
    pitches += -pitches % PITCH_MULTIPLE
    sizes = pitches * np.stack([height, chroma_height, chroma_height], axis=1)
    sizes[layout <= Layout.GREY, 1:] = 0
    ends = np.cumsum(sizes)
    offsets = (ends - sizes.ravel()).reshape(-1, 3)
    return Places(layout, width, height, offsets, pitches, int(ends[-1]) if len(ends) else 0)


def halved(layout: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whose chroma planes have half the width, and whose half the height."""
    both = layout == Layout.YCC_420
    return both | (layout == Layout.YCC_422), both | (layout == Layout.YCC_440)


def chroma_size(
    layout: NDArray[np.int64], width: NDArray[np.int64], height: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Width and height of the second and third plane."""
    half_width, half_height = halved(layout)
    return np.where(half_width, (width + 1) // 2, width), np.where(half_height, (height + 1) // 2, height)
