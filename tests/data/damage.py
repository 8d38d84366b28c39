"""Kinds of damage that image files really meet, and a small data set that holds one of each.

Promises: everything is deterministic; `KINDS` says for each kind what must come of it: `good` decodes, `bad` is
rejected, `either` is decided by chance of the bytes but must be decided, the same way each time.
"""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

Outcome = Literal["good", "bad", "either"]


@dataclass(frozen=True)
class Damage:
    """A kind: call it with a good JPEG's bytes."""

    make: Callable[[bytes], bytes]
    outcome: Outcome
    finding: str = ""
    """What `drumline verify` calls it; empty: nothing, or (outcome `either`) whatever it finds."""
    suffix: str = ".jpg"
    """How a file of this kind is called."""

    def __call__(self, good: bytes) -> bytes:
        return self.make(good)


def picture(seed: int = 0, width: int = 64, height: int = 56) -> Image.Image:
    """A smooth, colourful picture that no other seed gives."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def good_jpeg(seed: int = 0, width: int = 64, height: int = 56) -> bytes:
    return encoded(picture(seed, width, height), quality=90)


def build_damaged_set(
    folder: Path, good_images: int = 90, kinds: Iterable[str] | None = None, classes: int = 3
) -> dict[Path, Damage]:
    """Writes train/CLASS and val/CLASS below `folder`: two thirds of the good images (48 to 80 pixels) for training,
    one third for evaluation, one file of each kind among the training images and of every third kind among the
    evaluation images. Gives the damaged files. No two files hold the same bytes, but for the empty ones."""
    for seed in range(good_images):
        split = "val" if seed % 3 == 2 else "train"
        place = folder / split / f"class{seed // 3 % classes}" / f"good{seed:04}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(good_jpeg(seed, 48 + seed * 7 % 33, 48 + seed * 5 % 33))
    damaged: dict[Path, Damage] = {}
    for number, name in enumerate(KINDS if kinds is None else kinds):
        damage = KINDS[name]
        for split in ("train", "val") if number % 3 == 0 else ("train",):
            seed = good_images + 2 * number + (split == "val")
            place = folder / split / f"class{number // 3 % classes}" / f"{name}{damage.suffix}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(damage(good_jpeg(seed, 48 + seed * 7 % 33, 48 + seed * 5 % 33)))
            damaged[place] = damage
    return damaged


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    """The bytes with one bit changed."""
    return data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :]


def _marker(data: bytes, code: int) -> int:
    """Where a segment begins; good JPEGs made here have no such bytes before it."""
    return data.index(bytes((0xFF, code)))


def _replaced(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def _scan_start(data: bytes) -> int:
    scan = _marker(data, 0xDA)
    return scan + 2 + int.from_bytes(data[scan + 2 : scan + 4], "big")


def _plain_place(data: bytes) -> int:
    """A place in the middle of the compressed data without any 0xFF near it."""
    at = (_scan_start(data) + len(data)) // 2
    while 0xFF in data[at - 4 : at + 8]:
        at += 1
    return at


def _reopened(good: bytes) -> Image.Image:
    return Image.open(io.BytesIO(good)).convert("RGB")


def _png(good: bytes) -> bytes:
    return encoded(_reopened(good), "PNG")


def _png_16_bit(good: bytes) -> bytes:
    grey = np.asarray(_reopened(good).convert("L")).astype(np.uint16)
    return encoded(Image.fromarray(grey * 257), "PNG")


def _png_bomb(good: bytes) -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return _replaced(_png(good), 12, chunk + struct.pack(">I", zlib.crc32(chunk)))


def _png_flipped(good: bytes) -> bytes:
    data = _png(good)
    return flipped(data, (data.index(b"IDAT") + len(data)) // 2)


def _png_wrong_checksum(good: bytes) -> bytes:
    data = _png(good)
    return flipped(data, data.rindex(b"IEND") - 5)


def _tiff_of_floats(good: bytes) -> bytes:
    return encoded(_reopened(good).convert("F"), "TIFF")


def _animation(good: bytes) -> bytes:
    first = _reopened(good)
    return encoded(first, "GIF", save_all=True, append_images=[first.rotate(90), first.rotate(180)])


def _archive(good: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("inside.jpg")
        member.size = len(good)
        archive.addfile(member, io.BytesIO(good))
    return file.getvalue()


def with_scans(good: bytes, scans: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    data = encoded(_reopened(good), progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (scans - data.count(b"\xff\xda")) + data[-2:]


def _png_of_chunks(good: bytes) -> bytes:
    data, chunk = _png(good), b"teSt"
    return data[:33] + (bytes(4) + chunk + struct.pack(">I", zlib.crc32(chunk))) * 100_000 + data[33:]


def _tiff_of_shared_tags(good: bytes) -> bytes:
    """Tags of a kind that no reader knows, each with the same 20,000 bytes of the file."""
    directory = b"".join(struct.pack("<HHII", 40_000 + tag, 7, 20_000, 8) for tag in range(1_000))
    start = 8 + 20_000
    return (
        struct.pack("<2sHI", b"II", 42, start)
        + bytes(20_000)
        + struct.pack("<H", 1_000)
        + directory
        + bytes(4)
    )


def _exif_in_two_segments(good: bytes) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    body = exif.tobytes()
    segments = [body[:20], b"Exif\0\0" + body[20:]]
    marked = (b"\xff\xe1" + (2 + len(part)).to_bytes(2, "big") + part for part in segments)
    return good[:2] + b"".join(marked) + good[2:]


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _noise(count: int) -> bytes:
    return np.random.default_rng(7).integers(0, 256, count, np.uint8).tobytes()


KINDS: dict[str, Damage] = {
    "empty": Damage(lambda good: b"", "bad", "empty"),
    "four-bytes": Damage(lambda good: good[:4], "bad", "damaged"),
    "cut-in-header": Damage(lambda good: good[: _marker(good, 0xC4) + 9], "bad", "truncated"),
    "cut-before-scan": Damage(lambda good: good[: _scan_start(good)], "bad", "truncated"),
    "cut-in-half": Damage(_half, "bad", "truncated"),
    "cut-last-two-bytes": Damage(lambda good: good[:-2], "either"),
    "cut-progressive": Damage(
        lambda good: _half(encoded(_reopened(good), progressive=True)), "bad", "truncated"
    ),
    "zero-filled": Damage(lambda good: bytes(len(good)), "bad", "not-an-image"),
    "zero-filled-second-half": Damage(
        lambda good: _half(good) + bytes(len(good) - len(good) // 2), "bad", "truncated"
    ),
    "one-block-of-zeros": Damage(lambda good: _replaced(good, _plain_place(good), bytes(64)), "either"),
    "bit-in-compressed-data": Damage(lambda good: flipped(good, _plain_place(good), 3), "either"),
    "marker-in-compressed-data": Damage(
        lambda good: _replaced(good, _plain_place(good), b"\xff\xc4"), "either"
    ),
    "bit-in-quantisation": Damage(lambda good: flipped(good, _marker(good, 0xDB) + 9, 6), "good"),
    "bit-in-huffman-counts": Damage(lambda good: flipped(good, _marker(good, 0xC4) + 7, 2), "either"),
    "bit-in-segment-length": Damage(lambda good: flipped(good, _marker(good, 0xDB) + 3, 1), "bad", "damaged"),
    "size-of-a-bomb": Damage(
        lambda good: _replaced(good, _marker(good, 0xC0) + 5, b"\xff\xdc\xff\xdc"), "bad", "bomb"
    ),
    "size-too-high": Damage(lambda good: _replaced(good, _marker(good, 0xC0) + 5, b"\x04\x00"), "either"),
    "size-zero": Damage(lambda good: _replaced(good, _marker(good, 0xC0) + 5, bytes(4)), "bad", "damaged"),
    "twelve-bits": Damage(lambda good: _replaced(good, _marker(good, 0xC0) + 4, b"\x0c"), "bad", "damaged"),
    "magic-then-noise": Damage(lambda good: good[:4] + _noise(2000), "bad", "truncated"),
    "text": Damage(lambda good: b"just some words, no picture\n" * 20, "bad", "not-an-image"),
    "web-page": Damage(
        lambda good: b"<!DOCTYPE html>\n<html><body><h1>404 Not LoadedSample</h1></body></html>\n",
        "bad",
        "not-an-image",
    ),
    "lfs-pointer": Damage(
        lambda good: b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 9\n" % len(good),
        "bad",
        "not-an-image",
    ),
    "archive": Damage(_archive, "bad", "not-an-image"),
    "float-tiff": Damage(_tiff_of_floats, "bad", "unsupported", suffix=".tif"),
    "png-cut": Damage(lambda good: _half(_png(good)), "bad", "truncated", suffix=".png"),
    "png-without-its-end": Damage(lambda good: _png(good)[:-12], "good", "suspect", suffix=".png"),
    "png-bit": Damage(_png_flipped, "bad", "damaged", suffix=".png"),
    "png-wrong-checksum": Damage(_png_wrong_checksum, "either", suffix=".png"),
    "png-bomb": Damage(_png_bomb, "bad", "bomb", suffix=".png"),
    "webp-cut": Damage(
        lambda good: _half(encoded(_reopened(good), "WEBP")), "bad", "damaged", suffix=".webp"
    ),
    "bmp-cut": Damage(lambda good: _half(encoded(_reopened(good), "BMP")), "bad", "truncated", suffix=".bmp"),
    "png-called-jpg": Damage(_png, "good", "mislabelled"),
    "jpg-called-png": Damage(lambda good: good, "good", "mislabelled", suffix=".png"),
    "animation-called-jpg": Damage(_animation, "good", "mislabelled"),
    "bytes-after-the-end": Damage(lambda good: good + b"\0\xff trailing \xff\xc4" * 9, "good"),
    "cmyk": Damage(lambda good: encoded(_reopened(good).convert("CMYK")), "good"),
    "grey": Damage(lambda good: encoded(_reopened(good).convert("L")), "good"),
    "16-bit": Damage(_png_16_bit, "good", suffix=".png"),
    "upper-case-name": Damage(lambda good: good, "good", suffix=".JPEG"),
    "many-scans": Damage(lambda good: with_scans(good, 101), "bad", "bomb"),
    "as-many-scans-as-allowed": Damage(lambda good: with_scans(good, 100), "good", "suspect"),
    "many-segments": Damage(lambda good: good[:2] + b"\xff\xfe\0\2" * 100_000 + good[2:], "bad", "bomb"),
    "many-chunks": Damage(_png_of_chunks, "bad", "bomb", suffix=".png"),
    "tags-that-share-their-bytes": Damage(_tiff_of_shared_tags, "bad", "bomb", suffix=".tif"),
    "exif-in-two-segments": Damage(_exif_in_two_segments, "good"),
}
