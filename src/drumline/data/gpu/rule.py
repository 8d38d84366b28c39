"""Which JPEGs the GPU's JPEG engine decodes to Pillow's bits, by their header alone.

Promises: only kinds for which every file tried came out equal, planes by nvJPEG (HARDWARE backend), upsampling and
colour by our kernel. Refuses, with the reason, whatever differed or was not tried; those files are for the CPU.

Tried on an H200 with nvJPEG 13.0.1 by `benchmarks/jpeg_rule.py`, every pixel of each file: 1,942 of 1,942 accepted
files equal. 250 are photographs; the rest crops of them, noise and pure colours, with sides of 1 to 600 pixels, and a
few of 16,384 x 40 up to 6000 x 4000; in 4:4:4, 4:2:2, 4:2:0, 4:4:0 (each sampling written in every way listed below),
grey and RGB; qualities 1 to 100; fixed and optimised Huffman tables; restart markers; EXIF; with and without JFIF
and Adobe markers; 16-bit quantisation tables. What is left to the CPU, forced through the engine: progressive files
and 4:1:1 are refused there, grey with sampling factors other than 1 x 1 comes out wrong. SOF1 frames came out right
when they were baseline files under another marker, and wrong (58 of 60) with quantisation tables above 255. The
engine reports success for files that are cut off or damaged inside, so `data.image.jpeg.clean_end` is asked too.
"""

from __future__ import annotations

from drumline.data.gpu import Layout
from drumline.data.image.jpeg import JpegHeader, clean_end, read_header

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
    if _stores_rgb(header) and _LAYOUTS[header.sampling] != Layout.YCC_444:
        return "RGB with subsampling"
    if max(header.width, header.height) > MAX_SIDE or header.width * header.height > MAX_PIXELS:
        return f"{header.width} x {header.height} pixels: larger than what was tried"
    return ""


def layout_of(header: JpegHeader) -> Layout | None:
    """How the planes of a JPEG lie in the arena; None if it does not decode equal."""
    if decodes_equal(header):
        return None
    return Layout.RGB_PLANES if _stores_rgb(header) else _LAYOUTS[header.sampling]


def layout_of_file(data: bytes | memoryview) -> Layout | None:
    """The same from a file's bytes: what a feed goes by. A file with restart markers must have each of them in its
    place: decoders differ in how they find their way back."""
    header = read_header(data)
    if header is None or (header.restart_interval and not clean_end(data, header)):
        return None
    return layout_of(header)


_LAYOUTS = {
    ((1, 1),): Layout.GREY,
    ((1, 1), (1, 1), (1, 1)): Layout.YCC_444,
    ((2, 1), (2, 1), (2, 1)): Layout.YCC_444,
    ((1, 2), (1, 2), (1, 2)): Layout.YCC_444,
    ((2, 1), (1, 1), (1, 1)): Layout.YCC_422,
    ((2, 2), (1, 2), (1, 2)): Layout.YCC_422,
    ((2, 2), (1, 1), (1, 1)): Layout.YCC_420,
    ((1, 2), (1, 1), (1, 1)): Layout.YCC_440,
    ((2, 2), (2, 1), (2, 1)): Layout.YCC_440,
}
"""The sampling factors tried. The last row of each chroma kind is the same kind written with larger numbers."""


def _stores_rgb(header: JpegHeader) -> bool:
    """libjpeg's guess: a JFIF marker means YCbCr; else Adobe's marker decides; else the components' names."""
    if header.components != 3 or header.jfif:
        return False
    if header.adobe_transform is not None:
        return header.adobe_transform == 0
    return header.component_ids == (ord("R"), ord("G"), ord("B"))
