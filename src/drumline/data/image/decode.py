"""Encoded bytes to an RGB image, with Pillow's pixels, and the limits of the resources that one sample may take.

Promises: for ordinary files, `decode` gives exactly what `Image.open(...).convert("RGB")` gives, the first frame of
an animation, without Pillow's warnings. One stated difference: 16-bit grey is divided by 256, where Pillow would clip
everything above 255 to white. It rejects, with the file's name: damaged or truncated files, data that is not an
image, float images, and everything over a limit. A damaged compressed TIFF also makes libtiff write a line to stderr,
which Python cannot prevent.

A sample over a limit (bytes, pixels, scans, parts) is rejected before it is decoded, by its structure alone and never
by a clock, so every machine and every path rejects the same files. Each check takes far less time than decoding. The
native part (`native/drumline.h`) has the same numbers and leaves to Python everything that exceeds one of them.

The limits are far from real photographs: libjpeg writes progressive JPEGs with 10 scans, and metadata comes in at
most some hundred parts. They guard against files such as these, measured with Pillow 12.3: each scan of a JPEG costs
about 1 ns per pixel, even when it is nearly empty, so 81 million pixels take about 8 s per 100 scans.
"""

from __future__ import annotations

import io
import logging
import re
import struct
import warnings
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin

from drumline.core.errors import UserError

SUPPORTED = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
FORMATS = (*SUPPORTED, "GIF")  # under another name: .gif files are left out of folders, as by torchvision
"""Recognised by content, not by name. Others are left out: Pillow's EPS reader, for one, starts a program."""

MAX_PIXELS = 89_478_485
"""Pillow's own limit, above which it suspects a decompression bomb; there only a warning."""
MAX_BYTES = 6 * MAX_PIXELS + (64 << 20)
"""Bytes of an encoded sample: as many pixels uncompressed with 16 bits a channel, and metadata."""
MAX_SCANS = 100
MAX_SCANNED = 20 * MAX_PIXELS
"""Pixels times scans of a JPEG: a decoder visits every block in every scan."""
MAX_PARTS = 100_000
"""Segments, chunks, blocks, strips, tags: Pillow takes microseconds, and keeps memory, for each."""
MAX_SLOW_PIXELS = 1 << 24
"""Of formats that Pillow decodes in Python, at up to a microsecond a pixel."""
_PYTHON_DECODERS = ("ppm", "ppm_plain", "bmp_rle")

# Imported so that the first TIFF or WebP does not make Pillow import all of its forty plugins.
assert TiffImagePlugin
assert WebPImagePlugin

# Once for the process: catch_warnings() around each image is not safe in threads. What matters is raised.
warnings.filterwarnings("ignore", module=r"PIL\.")
# Without any handler, logging prints Pillow's error lines to stderr; handlers a user sets up still get them.
logging.getLogger("PIL").addHandler(logging.NullHandler())


class TooLarge(UserError):
    """A sample that exceeds a limit."""


def decode(data: bytes, where: str, exif: Literal["ignore", "apply"] = "ignore") -> Image.Image:
    """The image in `data` in mode RGB; `where` names it in errors.

    `exif="apply"` turns it by its EXIF orientation, `ignore` leaves it as stored (what torchvision and timm
    train on). A TIFF's orientation is applied by Pillow itself in both cases.
    """
    if not data:
        raise UserError(f"{where} is empty (0 bytes)", _RESTORE, code="empty")
    check_file(data, where)
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_image(image, where)
        image.load()
        if exif == "apply":
            ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image, where)
    except (UserError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        what, code = _looks_like(data)
        raise UserError(f"{where} {what}", _RESTORE, code) from error
    except Image.DecompressionBombError as error:  # Pillow's own limit, twice ours
        size = str(error).partition(" exceeds")[0].partition("(")[2].rstrip(")")
        raise too_large(where, f"is too large: {size} (the limit is {MAX_PIXELS:,} pixels)") from error
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        if isinstance(error, OSError) and "out of memory" in str(error):
            raise MemoryError(where) from error  # says nothing about the file
        code = "truncated" if "truncated" in str(error).lower() else "damaged"
        raise UserError(f"{where} is {code}: {error or type(error).__name__}", _RESTORE, code) from error


def to_rgb(image: Image.Image, where: str) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode == "F":
        raise UserError(
            f"{where} holds floating-point pixels, whose range is unknown",
            fix="save it with 8 bits a channel",
            code="unsupported",
        )
    if image.mode == "I" or image.mode.startswith("I;"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise UserError(
                f"{where} holds 32-bit grey values from {values.min()} to {values.max()}, not 0 to 65535",
                fix="save it with 8 or 16 bits a pixel",
                code="unsupported",
            )
        image = Image.fromarray((values >> 8).astype(np.uint8))
    return image.convert("RGB")


def too_large(where: str, reason: str) -> TooLarge:
    """The error for a sample that exceeds a limit."""
    return TooLarge(f"{where} {reason}", fix="scale it down or save it again, or remove it from the data")


def check_bytes(size: int, where: str) -> None:
    """Rejects a sample with too many bytes."""
    if size > MAX_BYTES:
        raise too_large(where, f"is too large: {size:,} bytes (the limit is {MAX_BYTES:,})")


def check_file(data: bytes, where: str) -> None:
    """Rejects an image file whose structure exceeds a limit. Damaged files pass: decoding finds the damage."""
    check_bytes(len(data), where)
    check = next((check for start, check in _CHECKS if data.startswith(start)), None)
    if check is not None and (reason := check(data)):
        raise too_large(where, reason)


def check_image(image: Image.Image, where: str) -> None:
    """Rejects an image that Pillow has opened, before its pixels are decoded."""
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        raise too_large(
            where,
            f"is too large: {image.width} x {image.height} pixels (the limit is {MAX_PIXELS:,} pixels)",
        )
    tiles = getattr(image, "tile", None) or ()
    if tiles and tiles[0][0] in _PYTHON_DECODERS and pixels > MAX_SLOW_PIXELS:
        raise too_large(
            where,
            f"is too large: {image.width} x {image.height} pixels in a form of {image.format} that decodes slowly "
            f"(the limit is {MAX_SLOW_PIXELS:,} pixels)",
        )
    covered = sum((box[2] - box[0]) * (box[3] - box[1]) for _, box, *_ in tiles if box)
    if covered > 8 * max(pixels, 1):
        raise too_large(where, f"stores its {pixels:,} pixels {covered // pixels:,} times over")
    exif = image.info.get("exif", b"")
    # What fits into one segment of a JPEG can do no harm; the native part does not look into it.
    large = isinstance(exif, bytes) and len(exif) > _SEGMENT
    if large and (reason := _tags_excess(exif.removeprefix(b"Exif\0\0"))):
        raise too_large(where, reason)
    if len(image.info.get("Raw profile type exif", "")) > 4 * _SEGMENT:
        raise too_large(where, "has more EXIF data than any camera writes")


def scans_allowed(pixels: int) -> int:
    """The number of scans that a JPEG of so many pixels may have."""
    return min(MAX_SCANS, MAX_SCANNED // max(pixels, 1))


_RESTORE = "restore the file from where it came, or remove it from the data"
_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"RIFF", "WebP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
)
_OTHER_SIGNATURES = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the file itself (git lfs pull fetches it)"),
    (b"%PDF", "is a PDF document, not an image"),
    (b"%!PS", "is a PostScript document, not an image"),
    (b"PK\x03\x04", "is a zip archive, not an image"),
    (b"\x1f\x8b", "is gzipped, not an image"),
)


def _looks_like(data: bytes) -> tuple[str, str]:
    """What a file contains that Pillow does not recognise, by its first bytes, and the code of the error."""
    for signature, kind in _SIGNATURES:
        if data.startswith(signature):
            return f"begins like a {kind}, but its header is damaged or truncated", "damaged"
    return _other(data), "not-an-image"


def _other(data: bytes) -> str:
    for signature, what in _OTHER_SIGNATURES:
        if data.startswith(signature):
            return what
    start = data.lstrip()[:64].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "is a web page, not an image: perhaps an error page saved under this name"
    if data[4:8] == b"ftyp":
        return (
            f"is a {data[8:12].decode('latin-1')} file (HEIC, AVIF or video), which is not a supported format"
        )
    if not any(data[:4096]):
        return f"contains only zeros ({len(data)} bytes): perhaps an interrupted copy"
    return f"is not an image in a supported format ({', '.join(SUPPORTED)}); it begins with {data[:8]!r}"


def _jpeg_excess(data: bytes) -> str:
    """Segments are walked as Pillow does, up to the first scan; scans are counted as libjpeg meets them."""
    at, parts, pixels, exif = 2, 0, 0, list[bytes]()
    while True:
        start, at = at, data.find(b"\xff", at)
        if at < 0 or at + 4 > len(data):
            return ""
        parts += 1 + at - start
        if parts > MAX_PARTS:
            return f"has more than {MAX_PARTS:,} segments before its first scan"
        code = data[at + 1]
        if code == 0xFF:
            at += 1
        elif code in _ALONE:
            at += 2
        else:
            length = max(2, data[at + 2] << 8 | data[at + 3])
            if code == 0xDA:
                break
            if code in _FRAMES and not pixels and length >= 8 and at + 9 <= len(data):
                height, width = struct.unpack_from(">HH", data, at + 5)
                pixels = height * width
            if code == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
                exif.append(data[at + 10 : at + 2 + length])
            at += 2 + length
    if len(exif) > 1 and (reason := _tags_excess(b"".join(exif))):
        return reason
    most = scans_allowed(pixels)
    # Inside compressed data FF DA is always a marker, so this counts no scan too few, and seldom one too many.
    if data.count(b"\xff\xda", at) <= most or (scans := _scans(data, at)) <= most:
        return ""
    more = "more than " if scans > MAX_SCANS else ""
    return f"is a JPEG of {more}{min(scans, MAX_SCANS)} scans (the limit is {most} for {pixels:,} pixels)"


def _scans(data: bytes, at: int) -> int:
    """Scans from `at` to the end-of-image marker, at most MAX_SCANS + 1."""
    scans = 0
    for _ in range(MAX_PARTS):
        found = _MARKER.search(data, at)
        if found is None or found[1] in b"\xd8\xd9" or scans > MAX_SCANS:
            return scans
        at = found.end()
        if found[1] >= b"\xc0":
            at += data[at] << 8 | data[at + 1] if at + 2 <= len(data) else 0
        scans += found[1] == b"\xda"
    return MAX_SCANS + 1


def _png_excess(data: bytes) -> str:
    at = 8
    for _ in range(MAX_PARTS):
        if at + 8 > len(data) or data[at + 4 : at + 8] == b"IEND":
            return ""
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return f"has more than {MAX_PARTS:,} chunks"


def _gif_excess(data: bytes) -> str:
    """Blocks up to the first image; Pillow skips stray bytes one by one."""
    at = 13 + (3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 0x80 else 0)
    inside = False
    for _ in range(MAX_PARTS):
        if at >= len(data) or (not inside and data[at] in b",;"):
            return ""
        if inside:
            inside = data[at] != 0
            at += 1 + data[at]
        else:
            inside = data[at] == 0x21
            at += 2 if inside else 1
    return f"has more than {MAX_PARTS:,} blocks before its first image"


def _ppm_excess(data: bytes) -> str:
    if len(data) <= MAX_PARTS or _PPM_HEADER.match(data, 0, MAX_PARTS):
        return ""
    return f"has a header of more than {MAX_PARTS:,} bytes"


def _tags_excess(data: bytes) -> str:
    """Of a TIFF file, or of EXIF data, which is one: tags that point to the same bytes over and over."""
    if len(data) < 16 or data[:2] not in (b"II", b"MM"):
        return ""
    order = "<" if data[:2] == b"II" else ">"
    big = 43 in data[2:4]
    first = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)[0]
    entry = struct.Struct(order + ("HHQ8s" if big else "HHI4s"))
    total, seen, pending = 0, 0, [first]
    visited: set[int] = set()
    while pending:
        at = pending.pop()
        if at in visited or at + (8 if big else 2) > len(data):
            continue
        visited.add(at)
        (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, at)
        at += 8 if big else 2
        seen += count
        if seen > MAX_PARTS:
            return f"has more than {MAX_PARTS:,} tags"
        for place in range(at, min(at + count * entry.size, len(data) - entry.size + 1), entry.size):
            tag, kind, values, inline = entry.unpack_from(data, place)
            size = values * _UNITS.get(kind, 0)
            total += size if size > len(inline) else 0
            if tag in (273, 279, 324, 325) and values > MAX_PARTS:
                return f"has {values:,} strips or tiles (the limit is {MAX_PARTS:,})"
            if tag in (322, 323) and values == 1 and _number(inline, kind, order) > MAX_TILE_SIDE:
                return f"has tiles of {_number(inline, kind, order):,} pixels a side (the limit is {MAX_TILE_SIDE:,})"
            if tag in _SUB_DIRECTORIES and values == 1:
                pending.append(_number(inline, kind, order))
    if total > 2 * len(data) + _SEGMENT:
        return f"has tags that unfold to {total:,} bytes, from a file of {len(data):,}"
    return ""


def _number(inline: bytes, kind: int, order: str) -> int:
    """The one value that a tag holds inline: a short or a long."""
    form = {3: "H", 4: "I", 13: "I", 16: "Q"}.get(kind)
    if form is None or struct.calcsize(form) > len(inline):
        return 0
    return int(struct.unpack_from(order + form, inline)[0])


MAX_TILE_SIDE = 8192
"""libtiff makes room for a whole tile, however small the image is."""
_SEGMENT = 1 << 16
_SUB_DIRECTORIES = (0x8769, 0x8825, 0xA005)
"""EXIF, GPS and interoperability: Pillow reads them when it turns an image."""
_UNITS = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset((0x00, 0x01, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)))
"""Second bytes after which no length follows."""
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])", re.DOTALL)
_PPM_HEADER = re.compile(rb"P.[a-zA-Z0-9]*(?:(?:\s|#[^\r\n]*[\r\n])+\d+){2}", re.DOTALL)
_CHECKS = (
    (b"\xff\xd8\xff", _jpeg_excess),
    (b"\x89PNG", _png_excess),
    (b"II", _tags_excess),
    (b"MM", _tags_excess),
    (b"GIF8", _gif_excess),
    (b"P", _ppm_excess),
)
