"""Which JPEGs the GPU decodes to Pillow's bits, and how their planes lie in a device arena. Pure.

Promises: images in the arena never overlap, and rows begin at multiples of PITCH_MULTIPLE. By its header alone, a
JPEG is accepted only if every file of its kind that was tried came out equal, planes by nvJPEG (HARDWARE backend),
upsampling and colour by our kernel. Whatever differed or was not tried is for the CPU.

Tried on an H200 with nvJPEG 13.0.1 by `benchmarks/jpeg_rule.py`, every pixel of each file: 1,942 of 1,942 accepted
files equal. 250 are photographs; the rest crops of them, noise and pure colours, with sides of 1 to 600 pixels, and a
few of 16,384 x 40 up to 6000 x 4000; in 4:4:4, 4:2:2, 4:2:0, 4:4:0 (each sampling written in every way listed below),
grey and RGB; qualities 1 to 100; fixed and optimised Huffman tables; restart markers; EXIF; with and without JFIF and
Adobe markers; 16-bit quantisation tables. What is left to the CPU, forced through the engine: progressive files and
4:1:1 are rejected there, grey with sampling factors other than 1 x 1 is decoded incorrectly. SOF1 frames were right
when they were baseline files under another marker, and wrong (58 of 60) with quantisation tables above 255. The
engine reports success for files that are cut off or damaged inside, so `data.image.jpeg.clean_end` is checked too.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drumline.data.image.jpeg import JpegHeader, clean_end, read_header

PITCH_MULTIPLE = 16


class PlaneLayout(IntEnum):
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
    pitches = np.stack(
        [np.where(layout == PlaneLayout.RGB, 3 * width, width), chroma_width, chroma_width], axis=1
    )
    pitches += -pitches % PITCH_MULTIPLE
    sizes = pitches * np.stack([height, chroma_height, chroma_height], axis=1)
    sizes[layout <= PlaneLayout.GREY, 1:] = 0
    ends = np.cumsum(sizes)
    offsets = (ends - sizes.ravel()).reshape(-1, 3)
    return Places(layout, width, height, offsets, pitches, int(ends[-1]) if len(ends) else 0)


def halved(layout: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whose chroma planes have half the width, and whose half the height."""
    both = layout == PlaneLayout.YCC_420
    return both | (layout == PlaneLayout.YCC_422), both | (layout == PlaneLayout.YCC_440)


def chroma_size(
    layout: NDArray[np.int64], width: NDArray[np.int64], height: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Width and height of the second and third plane."""
    half_width, half_height = halved(layout)
    return np.where(half_width, (width + 1) // 2, width), np.where(half_height, (height + 1) // 2, height)


MAX_SIDE = 16_384
MAX_PIXELS = 24_000_000
"""The largest tried: 16,384 x 40, 40 x 16,384 and 6000 x 4000."""


def decodes_equal(header: JpegHeader) -> str:
    """Nothing if the GPU decodes this kind to Pillow's bits, or why it may not. About pixels as stored: rotation
    by `header.orientation` is not considered."""
    if header.progressive:
        return "progressive: the JPEG engine does not decode it"
    if not header.baseline:
        return "not a baseline frame of 8 bits"
    if header.components not in (1, 3):
        return f"{header.components} components"
    if header.scan_components != header.components:
        return "several scans"
    if header.sampling not in _LAYOUTS:
        return "unusual sampling factors"
    if header.components == 3 and header.adobe_transform not in (None, 0, 1, 2):
        return f"unknown Adobe transform {header.adobe_transform}"
    if _stores_rgb(header) and _LAYOUTS[header.sampling] != PlaneLayout.YCC_444:
        return "RGB with subsampling"
    if max(header.width, header.height) > MAX_SIDE or header.width * header.height > MAX_PIXELS:
        return f"{header.width} x {header.height} pixels: larger than what was tried"
    return ""


def layout_of(header: JpegHeader) -> PlaneLayout | None:
    """How the planes of a JPEG lie in the arena; None if it does not decode equal."""
    if decodes_equal(header):
        return None
    return PlaneLayout.RGB_PLANES if _stores_rgb(header) else _LAYOUTS[header.sampling]


def layout_of_file(data: bytes | memoryview) -> PlaneLayout | None:
    """The same from a file's bytes, as a feed uses it. A file with restart markers must have each of them in its
    place: decoders differ in how they find their way back."""
    header = read_header(data)
    if header is None or (header.restart_interval and not clean_end(data, header)):
        return None
    return layout_of(header)


_LAYOUTS = {
    ((1, 1),): PlaneLayout.GREY,
    ((1, 1), (1, 1), (1, 1)): PlaneLayout.YCC_444,
    ((2, 1), (2, 1), (2, 1)): PlaneLayout.YCC_444,
    ((1, 2), (1, 2), (1, 2)): PlaneLayout.YCC_444,
    ((2, 1), (1, 1), (1, 1)): PlaneLayout.YCC_422,
    ((2, 2), (1, 2), (1, 2)): PlaneLayout.YCC_422,
    ((2, 2), (1, 1), (1, 1)): PlaneLayout.YCC_420,
    ((1, 2), (1, 1), (1, 1)): PlaneLayout.YCC_440,
    ((2, 2), (2, 1), (2, 1)): PlaneLayout.YCC_440,
}
"""The sampling factors tried. The last row of each chroma kind is the same kind written with larger numbers."""


def _stores_rgb(header: JpegHeader) -> bool:
    """libjpeg's guess: a JFIF marker means YCbCr; else Adobe's marker decides; else the components' names."""
    if header.components != 3 or header.jfif:
        return False
    if header.adobe_transform is not None:
        return header.adobe_transform == 0
    return header.component_ids == (ord("R"), ord("G"), ord("B"))
