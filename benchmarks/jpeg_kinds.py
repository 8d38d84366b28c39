"""One picture written as every kind of JPEG, for jpeg_rule.py.

Pillow writes the usual kinds. The unusual samplings rearrange the blocks of an RGB file: all of its components share
their tables, so the compressed bytes stay valid under any frame header with the same number of blocks. The picture
becomes a jumble, but every decoder decodes it to the same one.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
from PIL import Image, ImageFile

SAMPLINGS = {
    "4:4:4 written 2x1": (0x21, 0x21, 0x21),
    "4:4:4 written 1x2": (0x12, 0x12, 0x12),
    "4:2:2": (0x21, 0x11, 0x11),
    "4:2:2 written 2x2, 1x2": (0x22, 0x12, 0x12),
    "4:2:0": (0x22, 0x11, 0x11),
    "4:4:0": (0x12, 0x11, 0x11),
    "4:4:0 written 2x2, 2x1": (0x22, 0x21, 0x21),
    "4:1:1": (0x41, 0x11, 0x11),
}
"""Sampling factors of the three components, written by rearranging blocks."""


def usual_kinds(image: Image.Image, quality: int, draw: np.random.Generator) -> dict[str, bytes]:
    """The picture as Pillow writes it, and with different markers around the same compressed bytes."""
    exif = Image.Exif()
    exif[0x0112] = int(draw.integers(1, 9))
    restart = int(draw.integers(1, 20))
    grey = image.convert("L")
    colour = {name: jpeg(image, quality, subsampling=name) for name in ("4:4:4", "4:2:2", "4:2:0")}
    plain = colour["4:2:0"]
    return colour | {
        "grey": jpeg(grey, quality),
        "RGB": jpeg(image, quality, keep_rgb=True),
        "optimised tables 4:4:4": jpeg(image, quality, subsampling="4:4:4", optimize=True),
        "optimised tables 4:2:0": jpeg(image, quality, optimize=True),
        "optimised tables grey": jpeg(grey, quality, optimize=True),
        "restart markers 4:4:4": jpeg(image, quality, subsampling="4:4:4", restart_marker_blocks=restart),
        "restart markers 4:2:0": jpeg(image, quality, restart_marker_blocks=restart),
        "restart markers by row": jpeg(image, quality, restart_marker_rows=1),
        "EXIF": jpeg(image, quality, exif=exif),
        "profile and comment": jpeg(image, quality, icc_profile=bytes(300), comment=b"words"),
        "without JFIF": without(plain, 0xE0),
        "without JFIF grey": without(jpeg(grey, quality), 0xE0),
        "Adobe marker, YCbCr": with_adobe(without(plain, 0xE0), 1),
        "JFIF and Adobe marker": with_adobe(plain, 1),
        "one table for all": jpeg(image, quality, qtables=[[int(draw.integers(1, 30))] * 64]),
        "16-bit tables": with_wide_tables(plain),
        "bytes after the end": plain + b"\0\xff\xd8\xff\xda\xff" * 9,
        "fill bytes before a marker": plain[:2] + b"\xff\xff" + plain[2:],
        "progressive": jpeg(image, quality, progressive=True),
        "progressive grey": jpeg(grey, quality, progressive=True),
        "extended frame (SOF1)": extended(plain),
        "extended frame, tables above 255": extended(with_wide_tables(plain, times=260)),
        "grey with factors 2x2": jpeg(grey, quality, subsampling="4:2:0"),
    }


def unusual_samplings(draw: np.random.Generator) -> dict[str, bytes]:
    """A file for each of `SAMPLINGS`, YCbCr by its markers, of any width and height."""
    soft = draw.integers(
        110, 146, (6, 8, 3), dtype=np.uint8
    )  # low contrast: differences must not add up too far
    image = Image.fromarray(soft).resize((128, 96), Image.Resampling.BICUBIC)
    noise = draw.integers(-6, 7, (96, 128, 3))
    image = Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    source = jpeg(image, int(draw.integers(60, 96)), keep_rgb=True)
    return {name: laid_out(source, factors, 576, draw) for name, factors in SAMPLINGS.items()}


def laid_out(source: bytes, factors: tuple[int, ...], blocks: int, draw: np.random.Generator) -> bytes:
    """The same `blocks` compressed blocks under a different frame header."""
    across, down = (max(factor >> 4 for factor in factors), max(factor & 15 for factor in factors))
    in_a_unit = sum((factor >> 4) * (factor & 15) for factor in factors)
    units = blocks // in_a_unit
    wide = int(
        draw.choice([n for n in range(1, units + 1) if units % n == 0 and n <= 4 * units // n <= 16 * n])
    )
    width = 8 * across * wide - int(draw.integers(0, 8 * across))
    height = 8 * down * (units // wide) - int(draw.integers(0, 8 * down))
    source = with_jfif(without(source, 0xEE))
    at = source.index(b"\xff\xc0")
    frame = bytearray(source[at : at + 19])
    frame[5:9] = struct.pack(">HH", height, width)
    frame[11], frame[14], frame[17] = factors
    made = source[:at] + bytes(frame) + source[at + 19 :]
    scan = made.index(b"\xff\xda")
    names = bytes(made[at + 10 + 3 * number] for number in range(3))
    assert bytes(made[scan + 5 + 2 * number] for number in range(3)) == names
    return made


def jpeg(image: Image.Image, quality: int, **options: Any) -> bytes:
    """The picture as Pillow writes it."""
    file = io.BytesIO()
    ImageFile.MAXBLOCK = (
        1 << 16 | 4 * image.width * image.height
    )  # small noise at quality 100 overruns its guess
    image.save(file, "JPEG", quality=quality, **options)
    return file.getvalue()


def without(data: bytes, marker: int) -> bytes:
    """Without the segment of this marker."""
    at = data.index(bytes([0xFF, marker]))
    return data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]


def with_adobe(data: bytes, transform: int) -> bytes:
    """With Adobe's marker, which says how colours are stored."""
    return data[:2] + b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform]) + data[2:]


def with_jfif(data: bytes) -> bytes:
    """With a JFIF marker: YCbCr, whatever the component names."""
    return data[:2] + b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0" + data[2:]


def extended(data: bytes) -> bytes:
    """A baseline file with the marker of an extended one."""
    return data.replace(b"\xff\xc0", b"\xff\xc1", 1)


def with_wide_tables(data: bytes, times: int = 1) -> bytes:
    """With its quantisation tables written as 16-bit numbers, multiplied."""
    parts, at = [data[:2]], 2
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == 0xDB:
            tables = [data[first : first + 65] for first in range(at + 4, end, 65)]
            wide = b"".join(
                bytes([0x10 | table[0]])
                + struct.pack(">64H", *(min(value * times, 0xFFFF) for value in table[1:]))
                for table in tables
            )
            parts.append(b"\xff\xdb" + struct.pack(">H", 2 + len(wide)) + wide)
        else:
            parts.append(data[at:end])
        at = end
    return b"".join([*parts, data[at:]])
