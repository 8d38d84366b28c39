"""Examines one sample for `drumline verify`: what a run would reject, and damage that decoding ignores."""

from __future__ import annotations

import hashlib
import io
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from drumline import native
from drumline.core.errors import UserError
from drumline.data.image.decode import FORMATS, TooLarge, decode
from drumline.data.image.jpeg import read_header, stream_fault
from drumline.data.sources import ArrayDataset, Dataset, EncodedDataset
from drumline.data.sources.packed import PackedFiles


@dataclass(frozen=True)
class Examination:
    """The result of checking one sample."""

    digest: bytes
    """A 16-byte hash of its bytes; zeros for a bad sample."""
    findings: tuple[tuple[str, str], ...] = ()
    """Kinds and reasons. A bad sample has one."""
    notes: tuple[str, ...] = ()


def examine_range(source: Dataset, start: int, stop: int) -> list[Examination]:
    """The samples from `start` to before `stop`."""
    if isinstance(source, ArrayDataset):  # opening it has checked all there is
        images = source.take(np.arange(start, stop))
        return [Examination(hashlib.blake2b(image, digest_size=16).digest()) for image in images]
    return [examine_sample(source, sample) for sample in range(start, stop)]


def examine_sample(source: EncodedDataset, sample: int) -> Examination:
    """Examines a sample of a dataset. Distinguishes a sample that cannot be read from one that is bad."""
    where = source.where(sample)
    try:
        data = source.read(sample)
    except TooLarge as error:
        return _bad("bomb", error.what, where)
    except UserError as error:
        changed = isinstance(source, PackedFiles) and not source.sound(np.array([sample])).all()
        return _bad("changed" if changed else "unreadable", error.what, where)
    except MemoryError:
        return _bad("bomb", "needs more memory than there is", where)
    # Packing may have changed the format, so the name of a packed sample says nothing.
    return examine(data, where, named=not isinstance(source, PackedFiles))


def examine(data: bytes, where: str, named: bool = True) -> Examination:
    """Decodes a sample as a run does, then looks for damage that decoding ignores. `named`: `where` ends in the
    file's own name, so its extension can be compared with the content."""
    try:
        decode(data, where)
    except UserError as error:
        return _bad("bomb" if isinstance(error, TooLarge) else error.code, error.what, where)
    except MemoryError:
        return _bad("bomb", "needs more memory than there is", where)
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    kind = "JPEG" if data.startswith(b"\xff\xd8\xff") else image.format or ""
    fault = _FAULTS[kind](data) if kind in _FAULTS else ""
    findings = [("suspect", f"decodes, but {fault}")] if fault else []
    expected = _FORMAT_OF.get(Path(where).suffix.lower(), kind) if named else kind
    if kind != expected:
        findings.append(("mislabelled", f"is a {kind} file, not the {expected} that its name says"))
    deep = image.mode.startswith("I") or (kind == "PNG" and data[24] == 16)
    seen = {"animated": _animated(image), "cmyk": image.mode == "CMYK", "16-bit": deep}
    notes = tuple(note for note, is_so in seen.items() if is_so)
    return Examination(hashlib.blake2b(data, digest_size=16).digest(), tuple(findings), notes)


def _animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # later frames may be damaged, in any way; only the first one matters
        return True


_FORMAT_OF = {
    **dict.fromkeys((".jpg", ".jpeg"), "JPEG"),
    **dict.fromkeys((".ppm", ".pgm"), "PPM"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    ".png": "PNG",
    ".bmp": "BMP",
    ".webp": "WEBP",
    ".gif": "GIF",
}


def _bad(kind: str, what: str, where: str) -> Examination:
    return Examination(bytes(16), ((kind, what.removeprefix(where).strip()),))


def _jpeg_fault(data: bytes) -> str:
    header = read_header(data)
    if header is None:
        return "its header has parts that do not belong there"
    if fault := stream_fault(data, header):
        return fault
    warnings = native.jpeg_warnings(data)
    return "libjpeg finds its compressed data corrupt" if warnings is not None and warnings > 0 else ""


def _png_fault(data: bytes) -> str:
    """Pillow compares no checksums of the pixel data, and accepts a file without its last chunk."""
    at, view = 8, memoryview(data)
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(view[at : at + 4], "big")
        if end > len(data):
            break
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            return f"the checksum of its {bytes(view[at + 4 : at + 8]).decode('latin-1')} chunk is wrong"
        if view[at + 4 : at + 8] == b"IEND":
            return ""
        at = end
    return "it is cut off after its pixels"


_FAULTS = {"JPEG": _jpeg_fault, "PNG": _png_fault}
