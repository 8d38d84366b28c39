"""Encoded bytes to an RGB image, with Pillow's pixels.

Promises: for ordinary files exactly what `Image.open(...).convert("RGB")` gives, first frame of an animation,
without Pillow's warnings. One stated difference: 16-bit grey is divided by 256, where Pillow would clip
everything above 255 to white. Refuses, with the file's name: damaged or cut-off files, what is not an image,
float images, and whatever is over the limits of `limits.py`, before decoding it. A damaged compressed TIFF also
makes libtiff write a line of its own to stderr; C code does that, out of our reach.
"""

from __future__ import annotations

import io
import logging
import warnings
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin

from drumline.core.errors import UserError
from drumline.data.image.limits import MAX_PIXELS, check_file, check_image, too_large

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
"""Recognised by content, not by name. Others are left out: Pillow's EPS reader, for one, starts a program."""

# Imported so that the first TIFF or WebP does not make Pillow import all of its forty plugins.
assert TiffImagePlugin
assert WebPImagePlugin

# Once for the process: catch_warnings() around each image is not safe in threads. What matters is raised.
warnings.filterwarnings("ignore", module=r"PIL\.")
# Without any handler, logging prints Pillow's error lines to stderr; handlers a user sets up still get them.
logging.getLogger("PIL").addHandler(logging.NullHandler())


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


_RESTORE = "restore the file from where it came, or remove it from the data"


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
    """What a file is that Pillow does not recognise, whatever its name says, and the code of the error."""
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
    return f"is not an image in a supported format ({', '.join(FORMATS)}); it begins with {data[:8]!r}"
