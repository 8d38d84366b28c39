"""CIFAR-10 and CIFAR-100 as published: the Python version (pickles) and the binary version.

Promises: every file's size and labels are checked; sample order is that of the files (data_batch_1 to 5). Pickles are
read without importing or calling anything in them: the unpickler's `find_class` knows a few names of NumPy, and each
stands for a function of ours that only keeps its arguments. Every opcode is checked against a list first, so
persistent ids, the extension registry, out-of-band buffers and object construction never reach the unpickler. Time
and memory grow with the file, not with what the file claims. Everything else is rejected, by name.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.data.reading import open_error, read_whole
from drumline.data.sources.base import ArrayDataset, DatasetSpec, Images, Labels

PIXELS = 3 * 32 * 32
MAX_FILE = 256 << 20
"""The largest file of the published sets has 155 MB."""
_AGAIN = "download the file again from the data set's authors"


def open_cifar(spec: DatasetSpec) -> ArrayDataset:
    """The images of a split. The path is the folder with the files, or the one that holds
    `cifar-10-batches-py` and so on; the Python version wins where both are."""
    edition, folder = _found(spec.source, spec.path)
    names = edition.train_files if spec.split == "train" else edition.eval_files
    parts = [_read(_present(folder / name), edition) for name in names]
    planes = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([part_labels for _, part_labels in parts])
    images = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return ArrayDataset(spec.source, images, labels, _class_names(folder, edition))


def is_cifar10(path: Path) -> bool:
    """Whether a folder holds any version of CIFAR-10."""
    return any(_locate(edition, path) for edition in _EDITIONS["cifar10"])


def is_cifar100(path: Path) -> bool:
    """Whether a folder holds any version of CIFAR-100."""
    return any(_locate(edition, path) for edition in _EDITIONS["cifar100"])


@dataclass(frozen=True)
class _Edition:
    """One published form of the data set."""

    folder: str
    train_files: tuple[str, ...]
    eval_files: tuple[str, ...]
    names_file: str
    classes: int
    label_key: str = ""
    """Where a pickle keeps the labels; empty for the binary version."""
    names_key: str = ""
    label_bytes: int = 1
    """Binary version: bytes before the pixels; the last one is the label (CIFAR-100: coarse, fine)."""


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_EDITIONS: dict[str, tuple[_Edition, ...]] = {
    "cifar10": (
        _Edition(
            "cifar-10-batches-py", _BATCHES, ("test_batch",), "batches.meta", 10, "labels", "label_names"
        ),
        _Edition(
            "cifar-10-batches-bin",
            tuple(f"{name}.bin" for name in _BATCHES),
            ("test_batch.bin",),
            "batches.meta.txt",
            10,
        ),
    ),
    "cifar100": (
        _Edition("cifar-100-python", ("train",), ("test",), "meta", 100, "fine_labels", "fine_label_names"),
        _Edition(
            "cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt", 100, label_bytes=2
        ),
    ),
}


def _locate(edition: _Edition, path: Path) -> Path | None:
    """The folder with this edition's files: any of them counts, so that a missing one is named later."""
    for folder in (path, path / edition.folder):
        if any((folder / name).is_file() for name in (*edition.train_files, *edition.eval_files)):
            return folder
    return None


def _found(source: str, path: str) -> tuple[_Edition, Path]:
    for edition in _EDITIONS[source]:
        if folder := _locate(edition, Path(path).expanduser()):
            return edition, folder
    wanted = " or ".join(edition.folder for edition in _EDITIONS[source])
    raise UserError(
        f"{path} has no {source} files", fix=f"give the folder that holds {wanted}, or that folder itself"
    )


def _present(file: Path) -> Path:
    if not file.is_file():
        raise UserError(f"{file} is missing", fix="unpack the whole archive of the data set")
    return file


def _read(file: Path, edition: _Edition) -> tuple[Images, Labels]:
    """Pixels (n, 3072), colour planes after one another, and labels of one file."""
    data = _bytes(file)
    pixels, labels = (
        _from_pickle(data, file, edition) if edition.label_key else _from_binary(data, file, edition)
    )
    if len(labels) != len(pixels):
        raise UserError(f"{file} has {len(labels)} labels for {len(pixels)} images", fix=_AGAIN)
    if labels.min() < 0 or labels.max() >= edition.classes:
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"{file} contains the label {worst}, not 0 to {edition.classes - 1}", fix=_AGAIN)
    return pixels, labels


def _from_pickle(data: bytes, file: Path, edition: _Edition) -> tuple[Images, Labels]:
    batch = read_plain_pickle(data, str(file))
    stored, labels = batch.get("data"), batch.get(edition.label_key)
    if not isinstance(stored, PlainArray) or labels is None:
        keys = ", ".join(sorted(batch)) or "nothing"
        raise UserError(f"{file} lacks 'data' or {edition.label_key!r}; it holds {keys}", fix=_AGAIN)
    pixels = stored.integers(f"{file}: 'data'")
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != PIXELS or len(pixels) == 0:
        raise UserError(
            f"{file}: 'data' is {pixels.dtype} of shape {pixels.shape}, not uint8 of shape (n, {PIXELS})",
            fix=_AGAIN,
        )
    if isinstance(labels, PlainArray):
        numbers = labels.integers(f"{file}: {edition.label_key!r}").reshape(-1)
    elif isinstance(labels, list) and all(type(label) is int and abs(label) < 1 << 31 for label in labels):
        numbers = np.array(labels, dtype=np.int64)
    else:
        raise UserError(f"{file}: {edition.label_key!r} is not a list of whole numbers", fix=_AGAIN)
    return pixels.astype(np.uint8, copy=False), numbers.astype(np.int64)


def _from_binary(data: bytes, file: Path, edition: _Edition) -> tuple[Images, Labels]:
    record = edition.label_bytes + PIXELS
    if len(data) == 0 or len(data) % record:
        raise UserError(f"{file} has {len(data)} bytes, not a multiple of {record}", fix=_AGAIN)
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    return records[:, edition.label_bytes :], records[:, edition.label_bytes - 1].astype(np.int64)


def _class_names(folder: Path, edition: _Edition) -> tuple[str, ...]:
    """Names from the file beside the data, or numbers where that file is absent."""
    file = folder / edition.names_file
    if not file.is_file():
        return tuple(str(number) for number in range(edition.classes))
    if edition.names_key:
        stored = read_plain_pickle(_bytes(file), str(file)).get(edition.names_key)
        names = [text(name) for name in stored] if isinstance(stored, list) else []
    else:
        names = [line.strip() for line in text(_bytes(file)).splitlines() if line.strip()]
    if len(set(names)) != edition.classes or len(names) != edition.classes:
        raise UserError(
            f"{file} does not name {edition.classes} different classes", fix=f"{_AGAIN}, or remove it"
        )
    return tuple(names)


def _bytes(file: Path) -> bytes:
    try:
        return read_whole(file, MAX_FILE)
    except OSError as error:
        raise open_error(file, error) from error


MAX_DIMENSIONS, MAX_SIDE = 8, 1 << 40
_DAMAGED = (
    pickle.UnpicklingError,
    ValueError,
    EOFError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
)
"""Exceptions of the unpickler for a damaged pickle."""
_DAMAGED_FIX = "download the file again"


def read_plain_pickle(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle, with text keys. Arrays in it are `PlainArray`s."""
    try:
        _check_opcodes(data)
        value = _PlainUnpickler(data).load()
    except UserError as error:
        raise UserError(f"{where}: {error.what}", error.fix) from error
    except _DAMAGED as error:
        raise UserError(f"{where} is not a readable pickle: {error}", _DAMAGED_FIX) from error
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a {type(value).__name__}, not a dictionary", _DAMAGED_FIX)
    return {text(key): item for key, item in value.items()}


def text(value: object) -> str:
    """Text that Python 2 wrote as bytes. Anything but text and numbers is "?": printing it could take forever."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(value) if isinstance(value, str | int | float) else "?"


class PlainArray:
    """An array as a pickle describes it: shape, type and bytes. `integers` makes it an array."""

    def __init__(self, shape: Any = (), dtype: Any = None, fortran: Any = False, raw: Any = b"") -> None:
        self.shape, self.dtype, self.fortran, self.raw = shape, dtype, fortran, raw

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, self.fortran, self.raw = state

    def integers(self, where: str) -> NDArray[np.integer]:
        """The array, if it is one of integers whose bytes fit its shape."""
        kind = text(self.dtype.kind) if isinstance(self.dtype, _PlainType) else "?"
        sides = self.shape if isinstance(self.shape, tuple) and len(self.shape) <= MAX_DIMENSIONS else (None,)
        shaped = all(type(side) is int and 0 <= side < MAX_SIDE for side in sides)
        plain = shaped and kind[:1] in "iu" and kind[1:] in ("1", "2", "4", "8")
        if (
            not plain
            or not isinstance(self.raw, bytes | bytearray)
            or math.prod(sides) * int(kind[1:]) != len(self.raw)
        ):
            raise UserError(
                f"{where} is not a plain array of integers (type {kind[:20]}, shape {sides if shaped else '?'})",
                _DAMAGED_FIX,
            )
        order = text(self.dtype.order) if text(self.dtype.order) in ("<", ">") else "<"
        return np.frombuffer(self.raw, dtype=order + kind).reshape(sides, order="F" if self.fortran else "C")


class _PlainType:
    """Stands for a numpy.dtype: its kind, such as u1, and byte order."""

    def __init__(self, kind: Any = "", *_: Any) -> None:
        self.kind, self.order = kind, "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _StandIn:
    """Stands for a function or class that a pickle names. A pickle can call it, but cannot set its attributes."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def __setstate__(self, _: Any) -> None:
        raise ValueError("it sets the state of a function")


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles plain data whose opcodes have been checked."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")  # text of Python 2 stays bytes
        self._unused = len(data)

    def find_class(self, module: str, name: str) -> _StandIn:
        if (module, name) == ("_codecs", "encode"):
            return _StandIn(self._encode)
        if (module, name) not in _STAND_INS:
            raise UserError(
                f"the pickle asks for {module[:80]}.{name[:80]}, which plain data does not need; nothing "
                "in it was run",
                "do not trust this file; download the data set from its authors",
            )
        return _STAND_INS[module, name]

    def _encode(self, value: Any, _: Any) -> bytes:
        """How Python 3 writes bytes into old protocols. The same text may be encoded again and again."""
        if not isinstance(value, str):
            raise ValueError("bytes made from something other than text")
        made = value.encode("latin-1")
        self._unused -= len(made)
        if self._unused < 0:
            raise ValueError("it makes more bytes than it holds")
        return made


def _not_called(*_: Any) -> None:
    """numpy.ndarray is only ever an argument of `_reconstruct`."""
    raise ValueError("an array without its bytes")


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> PlainArray:
    return PlainArray(shape, dtype, text(order) == "F", raw)


_STAND_INS = {
    ("numpy", "ndarray"): _StandIn(_not_called),
    ("numpy", "dtype"): _StandIn(_PlainType),
    ("numpy.core.multiarray", "_reconstruct"): _StandIn(lambda *_: PlainArray()),
    ("numpy._core.multiarray", "_reconstruct"): _StandIn(lambda *_: PlainArray()),
    ("numpy.core.numeric", "_frombuffer"): _StandIn(_from_buffer),
    ("numpy._core.numeric", "_frombuffer"): _StandIn(_from_buffer),
    ("__builtin__", "bytes"): _StandIn(lambda: b""),  # how Python 3 writes empty bytes into old protocols
}
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_OPCODES = _PUTS | _GETS | _TUPLES | {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG",
    "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_TUPLE", "EMPTY_LIST", "LIST",
    "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
}  # fmt: skip
"""The opcodes that plain data needs."""


def _check_opcodes(data: bytes) -> None:
    """Rejects opcodes that are not on the list, and those that cost time or memory out of proportion: a memo index or
    a frame beyond the file, for which the unpickler makes room, and a tuple that is used twice, since the hash of
    tuples nested so takes exponential time. (`genops` checks that counted bytes are there.)"""
    memo: dict[Any, bool] = {}
    """Whether the value of each index is a tuple."""
    last = ""
    """The opcode that made the value on top of the stack: none on the list uncovers the one below."""
    for number, (opcode, argument, at) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if name not in _OPCODES:
            raise ValueError(f"the opcode {name} at byte {at} is not one that plain data needs")
        if name in ("APPENDS", "SETITEMS") and last == "MARK":
            raise ValueError(f"{name} at byte {at} adds nothing")
        if name == "FRAME" and int(argument or 0) > len(data):
            raise ValueError("it is cut off")
        if name in _PUTS:
            index: Any = len(memo) if name == "MEMOIZE" else argument
            if not 0 <= index <= number:
                raise ValueError(f"the memo index {index} at byte {at} is too large")
            memo[index] = last in _TUPLES
        elif name in _GETS and memo[argument]:
            raise ValueError(f"the tuple at byte {at} is used twice")
        elif name not in ("PROTO", "FRAME"):
            last = name
