"""Tensors in a safetensors file: written and hashed in one pass, read and hashed in one pass.

Promises: the hash of a written file is computed from memory, so a disk that changes bytes is detected. The bytes that
are loaded are the bytes that were hashed; they are held in memory once and not mapped, so nothing can change them
afterwards. Headers are untrusted: names, types, shapes and offsets are checked against the real size of the file
before a tensor is created. Rejects links, folders, pipes, and bytes that belong to no tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import psutil
import torch

from drumline.core.files import CorruptError, open_regular, read_into

MAX_HEADER = 64 << 20
MAX_SIDE = 1 << 48
"""Largest side of a tensor. The size of the file bounds the whole shape."""
_CHUNK = 8 << 20
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}

Tensors = dict[str, torch.Tensor]
Groups = Mapping[str, Mapping[str, torch.Tensor]]
"""Groups of tensors (`model`, `optimizer`, ...), each a file of a checkpoint."""


def snapshot_to_host(groups: Groups) -> tuple[Groups, torch.cuda.Event | None]:
    """Copies tensors to host memory. Copies from a GPU are queued, into pinned memory; the event says when they are
    done."""
    gpus = {tensor.device for group in groups.values() for tensor in group.values() if tensor.is_cuda}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor.detach().clone(memory_format=torch.contiguous_format)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True)

    snapshot = {
        group: {name: copied(tensor) for name, tensor in tensors.items()} for group, tensors in groups.items()
    }
    if not gpus:
        return snapshot, None
    event = torch.cuda.Event()
    for gpu in gpus:  # the stages of one process may use several, which copy independently
        torch.cuda.current_stream().wait_event(torch.cuda.current_stream(gpu).record_event())
    event.record()
    return snapshot, event


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Writes host tensors to a new file; returns its size and SHA-256. Wide types come first, as in the safetensors
    library, so that every tensor is aligned to its type."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        assert tensor.device.type == "cpu", name
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 8 + len(text) + end
    with path.open("xb", buffering=0) as file:
        for block in (
            memoryview(struct.pack("<Q", len(text)) + text),
            *(_bytes(tensors[name]) for name in order),
        ):
            digest.update(block)
            _write(file, block)
    return size, digest.hexdigest()


def read_tensors(path: Path, size: int | None = None, sha256: str | None = None) -> Tensors:
    """The tensors of a file, verified against a size and a hash if they are given. Raises `CorruptError`."""
    with open_regular(path) as file:
        found = _expected_size(path, file, size)
        free = psutil.virtual_memory().available
        if found > free:
            raise CorruptError(
                f"{path}: {found / 2**30:,.1f} GiB do not fit into {free / 2**30:,.1f} GiB of free memory"
            )
        buffer = torch.empty(found, dtype=torch.uint8)
        if _read(path, file, found, buffer.numpy().data) != sha256 and sha256 is not None:
            raise _changed(path)
    return _tensors(path, buffer)


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its type, its shape, and its range of bytes after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Index:
    """The tensors of a file, to be read one by one. No hash is checked: only for files that were just written."""

    path: Path
    offset: int
    entries: dict[str, Entry]

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        entry = self.entries[name]
        buffer = torch.empty(entry.end - entry.start, dtype=torch.uint8)
        with open_regular(self.path) as file:
            file.seek(self.offset + entry.start)
            _read(self.path, file, len(buffer), buffer.numpy().data)
        return buffer.view(entry.dtype).reshape(entry.shape)


def tensor_index(path: Path) -> Index:
    """The names and offsets of a file's tensors. Raises `CorruptError`."""
    with open_regular(path) as file:
        size = _expected_size(path, file, None)
        length = _header_length(path, _read_bytes(path, file, min(8, size)), size)
        header = _header(path, _read_bytes(path, file, length))
    return Index(path, 8 + length, _entries(path, header, size - 8 - length))


def file_metadata(path: Path) -> dict[str, str]:
    """The text metadata in a file's header. Raises `CorruptError`."""
    with open_regular(path) as file:
        size = _expected_size(path, file, None)
        length = _header_length(path, _read_bytes(path, file, min(8, size)), size)
        found = _json(path, _read_bytes(path, file, length)).get("__metadata__", {})
    return {str(k): v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def verify_file(
    path: Path, size: int, sha256: str, watch: Callable[[int], None] = lambda count: None
) -> None:
    """Verifies size and hash, one block at a time. `watch` gets the number of bytes read. Raises `CorruptError`."""
    with open_regular(path) as file:
        digest, buffer = hashlib.sha256(), bytearray(min(_CHUNK, size + 1))
        left = _expected_size(path, file, size)
        while left:
            count = read_into(path, file, memoryview(buffer)[:left])
            digest.update(memoryview(buffer)[:count])
            left -= count
            watch(count)
        if digest.hexdigest() != sha256:
            raise _changed(path)


def file_sha256(path: Path) -> tuple[int, str]:
    """The size and SHA-256 of a file as it is now."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _tensors(path: Path, buffer: torch.Tensor) -> Tensors:
    """The tensors as views of the file's bytes."""
    length = _header_length(path, buffer[:8].numpy().tobytes(), len(buffer))
    header = _header(path, buffer[8 : 8 + length].numpy().tobytes())
    data = buffer[8 + length :]
    result: Tensors = {}
    for name, entry in _entries(path, header, len(data)).items():
        section = data[entry.start : entry.end]
        # A view if it is aligned. In our own files it is, because wide types come first.
        size = entry.dtype.itemsize
        aligned = section.storage_offset() % size == 0 and section.data_ptr() % size == 0
        result[name] = (section if aligned else section.clone()).view(entry.dtype).reshape(entry.shape)
    return result


def _entries(path: Path, header: dict[str, Any], size: int) -> dict[str, Entry]:
    """The entries by name. Raises `CorruptError` unless they fill `size` bytes without gap or overlap."""
    result: dict[str, Entry] = {}
    covered = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        dtype, shape = _type_and_shape(path, name, entry)
        start, end = _offsets(path, name, entry)
        if start != covered or end > size or end - start != math.prod(shape) * dtype.itemsize:
            raise CorruptError(f"{path}: the offsets of tensor {name!r} do not match its type and shape")
        covered = end
        result[name] = Entry(dtype, tuple(shape), start, end)
    if covered != size:
        raise CorruptError(f"{path}: {size - covered:,} bytes at the end belong to no tensor")
    return result


def _header_length(path: Path, first: bytes, size: int) -> int:
    (length,) = struct.unpack("<Q", first) if size >= 8 else (size,)
    if length > min(size - 8, MAX_HEADER):
        raise CorruptError(f"{path}: not a safetensors file, or its header is truncated")
    return int(length)


def _header(path: Path, text: bytes) -> dict[str, Any]:
    """The entries of a header."""
    header = _json(path, text)
    header.pop("__metadata__", None)
    return header


def _json(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name appears twice")
        return found

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: its header cannot be parsed ({str(error)[:80]})") from None
    if not isinstance(header, dict):
        raise CorruptError(f"{path}: its header is not a table")
    return header


def _type_and_shape(path: Path, name: str, entry: Any) -> tuple[torch.dtype, list[int]]:
    dtype = _TYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    shape = entry.get("shape")
    if dtype is None:
        raise CorruptError(f"{path}: tensor {name!r} has an unknown type, {str(entry.get('dtype'))[:20]!r}")
    sides = isinstance(shape, list) and len(shape) <= 64 and all(_is_count(side, MAX_SIDE) for side in shape)
    if not sides:
        raise CorruptError(f"{path}: tensor {name!r} has no valid shape")
    return dtype, shape


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_is_count(at, 1 << 62) for at in offsets)
    ):
        raise CorruptError(f"{path}: tensor {name!r} has no valid offsets")
    return offsets[0], offsets[1]


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _expected_size(path: Path, file: FileIO, expected: int | None) -> int:
    found = os.fstat(file.fileno()).st_size
    if expected is not None and found != expected:
        raise CorruptError(f"{path}: has {found:,} bytes, but {expected:,} were written")
    return found


def _read(path: Path, file: FileIO, size: int, into: memoryview) -> str:
    """Fills the memory from the file, and returns the hash of what was read."""
    digest, done = hashlib.sha256(), 0
    while done < size:
        count = read_into(path, file, into[done : done + _CHUNK])
        digest.update(into[done : done + count])
        done += count
    return digest.hexdigest()


def _read_bytes(path: Path, file: FileIO, size: int) -> bytes:
    content = bytearray(size)
    _read(path, file, size, memoryview(content))
    return bytes(content)


def _write(file: FileIO, content: memoryview) -> None:
    """Writes everything: an unbuffered write may stop early."""
    while content:
        content = content[file.write(content[: 1 << 30]) :]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _changed(path: Path) -> CorruptError:
    return CorruptError(f"{path}: its checksum does not match: the content has changed since it was written")
