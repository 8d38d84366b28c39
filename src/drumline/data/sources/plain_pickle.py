"""Reads pickles of plain data (containers, text, numbers, integer arrays) without running anything in them.

Promises: nothing is imported or called. The unpickler's `find_class` knows a few names of NumPy; each stands for a
function of ours that only keeps its arguments. Every opcode is checked against a list first, so persistent ids, the
extension registry, out-of-band buffers and object construction never reach the unpickler. Time and memory grow with
the file, not with what the file claims. Refuses everything else, by name.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError

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
"""What a damaged pickle makes the unpickler raise."""
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
    """Text that Python 2 wrote as bytes. Anything but text and numbers is "?": printing it could take for ever."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(value) if isinstance(value, str | int | float) else "?"


class PlainArray:
    """What a pickle says about an array: shape, type and bytes. `integers` makes it an array."""

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
    """Refuses opcodes that are not on the list, and those that cost time or memory out of proportion: a memo index or
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
