"""The packed set: many samples in few large files, with an index and a checksum for each. Version 1.

Promises: the same samples give the same bytes, however often packing was interrupted; a set is either whole or
not there; a damaged or hostile set is a `UserError`, found before any of its data is used. Sets of a
higher version are rejected. All numbers are little-endian; nothing is pickled.

    manifest.json    what the set is: source, classes, options; for each split the number of samples, the size of
                     every shard, and the SHA-256 of index and names; last the SHA-256 of the manifest itself
    train.index      a record of 40 bytes (`RECORD`) for each sample, in the order of sample ids
    train.names      the samples' original names, one after another; a record says where its name ends
    train-00000.bin  shards: the samples' bytes, one after another without gaps
    eval.*           the same for the evaluation split, where there is one

A sample of kind JPEG or OTHER is the bytes of an image file; RGB and GREY are height x width x channels pixels.
`width` and `height` are 0 where the image could not be read when it was packed. `orientation` is EXIF's: what has
to be done to the stored pixels where EXIF is applied; 0 means that the file must be decoded to know. The sets of
sources that hold arrays (`holds` is "arrays": CIFAR, MNIST) have one shard for each split, all raw, of one size.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.files import MAX_BYTES, CorruptError, NewerFormat, parse_sealed, write_sealed
from drumline.data.image.decode import MAX_PIXELS
from drumline.data.reading import open_error, read_whole

FORMAT = "drumline packed set"
VERSION = 1
MANIFEST = "manifest.json"
SPLITS: tuple[Literal["train", "eval"], ...] = ("train", "eval")
MAX_SHARDS = 1 << 16

_PACKED_RECORD = struct.Struct("<QQIIIIIHBB")
RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("name_end", "<u8"),
        ("length", "<u4"),
        ("crc", "<u4"),
        ("label", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("shard", "<u2"),
        ("kind", "u1"),
        ("orientation", "u1"),
    ]
)
assert RECORD.itemsize == _PACKED_RECORD.size == 40


class SampleKind(IntEnum):
    """What a sample's bytes are."""

    OTHER = 0
    """An image file that Pillow reads; or one that it could not read."""
    JPEG = 1
    """A JPEG whose header `drumline.data.image.jpeg.read_header` understands."""
    RGB = 2
    GREY = 3


@dataclass(frozen=True)
class StoredSample:
    """One sample as it goes into a shard."""

    data: bytes
    kind: SampleKind
    width: int
    height: int
    orientation: int
    crc: int


@dataclass(frozen=True)
class PackOptions:
    """What a set was packed with; all that decides its bytes besides the source."""

    resize_short: int = 0
    """Images whose shorter side is longer were resized to it; 0 for none."""
    raw: bool = False
    shard_mb: int = 1024
    holdout: float = 0.0


@dataclass(frozen=True)
class Split:
    """One split's part of the manifest."""

    samples: int
    shards: tuple[int, ...]
    """The size of each shard in bytes."""
    names_bytes: int
    index_sha256: str = ""
    names_sha256: str = ""


@dataclass(frozen=True)
class PackedManifest:
    """What a set is, apart from its samples."""

    source: str
    """The name of the source it was packed from, such as `folder` or `cifar10`."""
    holds: Literal["files", "arrays"]
    classes: tuple[str, ...]
    options: PackOptions
    job: str
    """A digest of everything that was to be packed: names, labels, classes, options."""
    train: Split
    eval: Split | None

    def split(self, name: Literal["train", "eval"]) -> Split | None:
        return self.train if name == "train" else self.eval


def looks_packed(folder: Path) -> bool:
    """Whether a path is a packed set, whole or not."""
    return index_file(folder, "train").is_file()


def index_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.index"


def names_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.names"


def shard_file(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05d}.bin"


def write_manifest(folder: Path, manifest: PackedManifest) -> None:
    """The last file of a set: it makes the set complete."""
    write_sealed(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **asdict(manifest)}, key="sha256")


def read_manifest(folder: Path) -> PackedManifest:
    """The manifest, checked against its checksum. Unknown fields are ignored."""
    file = folder / MANIFEST
    try:
        content = parse_sealed(read_whole(file, MAX_BYTES), file, VERSION, version="version", key="sha256")
        if content.get("format") != FORMAT:
            raise UserError(f"{file} is not the manifest of a packed set", fix=_AGAIN)
        return _manifest(content)
    except FileNotFoundError:
        raise UserError(
            f"{folder} is an unfinished packed set: it has no {MANIFEST}",
            fix="run the same `drumline pack` again; it continues where it stopped",
        ) from None
    except OSError as error:
        raise open_error(file, error) from error
    except NewerFormat as error:
        raise UserError(
            f"{folder} is a packed set of version {error.found}; this version of drumline reads version {VERSION}",
            fix="use the version of drumline that wrote it, or pack again",
        ) from error
    except CorruptError as error:
        raise UserError(str(error), fix=_AGAIN) from error
    except (KeyError, TypeError, AttributeError, _NotAManifest) as error:
        raise UserError(f"{file} is not a manifest of this version: {error}", fix=_AGAIN) from error


def read_index(folder: Path, manifest: PackedManifest, split: Literal["train", "eval"]) -> NDArray[np.void]:
    """The records of a split, each checked against shards, names and classes. Shards' sizes are checked too."""
    part = manifest.split(split)
    assert part is not None
    records = np.frombuffer(
        _content(index_file(folder, split), part.samples * RECORD.itemsize, part.index_sha256), dtype=RECORD
    )
    for number, size in enumerate(part.shards):
        _check_size(shard_file(folder, split, number), size)
    _check_records(records, manifest, part, f"{index_file(folder, split)}")
    return records


def read_names(folder: Path, manifest: PackedManifest, split: Literal["train", "eval"]) -> bytes:
    """The block of names; record i's name ends at its `name_end`."""
    part = manifest.split(split)
    assert part is not None
    return _content(names_file(folder, split), part.names_bytes, part.names_sha256)


class SplitWriter:
    """Appends samples to a split that is being packed. Samples of the last `commit` survive any interruption. A
    writer that continues from its state truncates the files to it first, so the files are the same as without the
    interruption."""

    def __init__(self, folder: Path, split: str, shard_bytes: int | None, state: Split) -> None:
        """`shard_bytes` None: one shard, however large."""
        self._folder, self._split, self._shard_bytes = folder, split, shard_bytes
        self._samples, self._names_bytes = state.samples, state.names_bytes
        self._shards = list(state.shards)
        self._records, self._names = bytearray(), bytearray()
        for extra in folder.glob(f"{split}-*.bin"):
            if int(extra.stem.rpartition("-")[2]) >= len(self._shards):
                extra.unlink()
        for number, size in enumerate(self._shards[:-1]):
            _cut(shard_file(folder, split, number), size).close()
        self._index_out = _cut(index_file(folder, split), state.samples * RECORD.itemsize)
        self._names_out = _cut(names_file(folder, split), state.names_bytes)
        self._shard_out = (
            _cut(shard_file(folder, split, len(self._shards) - 1), self._shards[-1])
            if self._shards
            else self._next_shard()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._index_out, self._names_out, self._shard_out):
            file.close()

    def add(self, sample: StoredSample, label: int, name: bytes) -> None:
        length = len(sample.data)
        if length >= 1 << 32:
            raise UserError(
                f"sample {self._samples} of {self._split} has {length} bytes",
                fix="remove it: the limit is 4 GiB",
            )
        if (
            self._shard_bytes is not None
            and self._shards[-1]
            and self._shards[-1] + length > self._shard_bytes
        ):
            os.fsync(self._shard_out.fileno())
            self._shard_out.close()
            self._shard_out = self._next_shard()
        _append(self._shard_out, sample.data)
        self._records += _PACKED_RECORD.pack(
            self._shards[-1],
            self._names_bytes + len(name),
            length,
            sample.crc,
            label,
            sample.width,
            sample.height,
            len(self._shards) - 1,
            sample.kind,
            sample.orientation,
        )
        self._names += name
        self._names_bytes += len(name)
        self._shards[-1] += length
        self._samples += 1

    def commit(self) -> Split:
        """Makes all samples so far durable. Returns the state to continue from."""
        for file, waiting in ((self._index_out, self._records), (self._names_out, self._names)):
            _append(file, waiting)
            waiting.clear()
            os.fsync(file.fileno())
        os.fsync(self._shard_out.fileno())
        return Split(self._samples, tuple(self._shards), self._names_bytes)

    def _next_shard(self) -> FileIO:
        if len(self._shards) == MAX_SHARDS:
            raise UserError(f"more than {MAX_SHARDS} shards", fix="use larger shards, --shard-mb 4096")
        self._shards.append(0)
        return _cut(shard_file(self._folder, self._split, len(self._shards) - 1), 0)


def sealed(folder: Path, name: str, split: Split) -> Split:
    """A finished split with the digests of its index and names."""
    digests = [
        hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (index_file(folder, name), names_file(folder, name))
    ]
    return replace(split, index_sha256=digests[0], names_sha256=digests[1])


_AGAIN = "restore it from a copy, or pack the source again"


class _NotAManifest(Exception):
    """A field whose value cannot be."""


def _manifest(content: dict[str, Any]) -> PackedManifest:
    def split(given: dict[str, Any]) -> Split:
        made = _known(Split, {**given, "shards": tuple(given["shards"])})
        numbers = (made.samples, made.names_bytes, *made.shards)
        if not all(type(number) is int and number >= 0 for number in numbers) or made.samples == 0:
            raise _NotAManifest("a count is not a whole number")
        if not 0 < len(made.shards) <= MAX_SHARDS:
            raise _NotAManifest(f"{len(made.shards)} shards")
        return made

    classes = tuple(content["classes"])
    if not classes or not all(isinstance(name, str) for name in classes):
        raise _NotAManifest("classes are not names")
    if content["holds"] not in ("files", "arrays") or not isinstance(content["source"], str):
        raise _NotAManifest("source")
    return PackedManifest(
        source=content["source"],
        holds=content["holds"],
        classes=classes,
        options=_known(PackOptions, content["options"]),
        job=str(content["job"]),
        train=split(content["train"]),
        eval=None if content["eval"] is None else split(content["eval"]),
    )


Record = TypeVar("Record", Split, PackOptions)


def _known(kind: type[Record], given: dict[str, Any]) -> Record:
    """A record of the fields that this version knows."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in given.items() if name in names})


def _check_records(records: NDArray[np.void], manifest: PackedManifest, part: Split, where: str) -> None:
    """Everything that later code relies on. The digest has shown chance damage; this is against malice."""
    sizes = np.array(part.shards, dtype=np.uint64)
    shard, kind = records["shard"], records["kind"]
    offset, length = records["offset"], records["length"].astype(np.uint64)
    pixels = records["width"].astype(np.uint64) * records["height"]
    channels = np.where(kind == SampleKind.RGB, np.uint64(3), np.uint64(1))
    raw = kind >= SampleKind.RGB
    size = sizes[np.minimum(shard, len(sizes) - 1)]
    ends = records["name_end"]
    wrong = {
        "a shard that is not there": shard >= len(sizes),
        "bytes outside their shard": (offset > size) | (length > size - np.minimum(offset, size)),
        f"a label beyond the {len(manifest.classes)} classes": records["label"] >= len(manifest.classes),
        "an unknown kind": kind > max(SampleKind),
        "an unknown orientation": records["orientation"] > 8,
        f"more than {MAX_PIXELS} pixels": pixels > MAX_PIXELS,
        "width without height": (records["width"] == 0) != (records["height"] == 0),
        "raw pixels of the wrong size": raw & ((pixels * channels != length) | (pixels == 0)),
        "names outside their file": ends > part.names_bytes,
        "names out of order": np.concatenate([[False], ends[1:] < ends[:-1]]),
    }
    for what, samples in wrong.items():
        if samples.any():
            raise UserError(f"{where}: sample {int(np.argmax(samples))} has {what}", fix=_AGAIN)


def _content(file: Path, size: int, digest: str) -> bytes:
    _check_size(file, size)
    try:
        content = read_whole(file, size)
    except OSError as error:
        raise open_error(file, error) from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(f"{file} has changed since it was written: its checksum does not match", fix=_AGAIN)
    return content


def _check_size(file: Path, size: int) -> None:
    try:
        found = file.stat().st_size
    except FileNotFoundError as error:
        raise UserError(f"{file} of a packed set cannot be found: {error.strerror}", fix=_AGAIN) from error
    except OSError as error:
        raise open_error(file, error) from error
    if found != size:
        how = "is truncated" if found < size else "has grown"
        raise UserError(f"{file} {how}: {found} bytes, the set's manifest says {size}", fix=_AGAIN)


def _cut(file: Path, size: int) -> FileIO:
    """The file opened for appending, without what lies beyond `size`."""
    stream = file.open("ab", buffering=0)
    found = stream.seek(0, os.SEEK_END)
    if found < size:
        stream.close()
        raise UserError(
            f"{file} has {found} bytes, but {size} were written before the interruption",
            fix="start again with --force",
        )
    stream.truncate(size)
    return stream


def _append(stream: FileIO, data: bytes | bytearray) -> None:
    """All of it: an unbuffered write may stop half-way."""
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += stream.write(view[done:])
