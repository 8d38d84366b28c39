"""Reads pickles of plain data (containers, text, numbers, integer arrays) without running anything in them.

Promises: Python's own unpickler has no part in it: the few instructions that plain data needs are carried out here,
on values that cannot call anything. No class or function that a pickle names is ever looked up; NumPy's few stand
for functions of ours that only keep their arguments, and arrays are rebuilt from bytes, type and shape. Memory grows
with the file and not with what the file claims. Refuses any other name and any other instruction, saying which.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError

MAX_SIDES, MAX_SIDE = 8, 1 << 40


def read_plain_pickle(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle, with text keys. Arrays in it are `PlainArray`s."""
    try:
        value = _Machine(data).run()
    except UserError as error:
        raise UserError(f"{where}: {error.what}", error.fix) from error
    except _DAMAGED as error:
        raise UserError(f"{where} is not a readable pickle: {error}", fix="get the file anew") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a {type(value).__name__}, not a dictionary", fix="get the file anew")
    return {text(key): item for key, item in value.items()}


def text(value: object) -> str:
    """Python 2 wrote text as bytes. What is neither text nor a number has none: it may be nested to blow up."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(value) if isinstance(value, str | int | float) else "?"


class PlainArray:
    """What a pickle says of an array: shape, type and bytes. `integers` makes it an array."""

    def __init__(self) -> None:
        self.shape: Any = ()
        self.dtype: Any = None
        self.fortran: Any = False
        self.raw: Any = b""

    def integers(self, where: str) -> NDArray[np.integer]:
        """The array, if it is one of integers whose bytes fit its shape."""
        kind = text(self.dtype.kind) if isinstance(self.dtype, _PlainType) else "?"
        sides = self.shape if isinstance(self.shape, tuple) and len(self.shape) <= MAX_SIDES else (None,)
        shaped = all(type(side) is int and 0 <= side < MAX_SIDE for side in sides)
        plain = shaped and kind[:1] in "iu" and kind[1:] in ("1", "2", "4", "8")
        if (
            not plain
            or not isinstance(self.raw, bytes | bytearray)
            or math.prod(sides) * int(kind[1:]) != len(self.raw)
        ):
            raise UserError(
                f"{where} is not a plain array of integers (type {kind[:20]}, shape {sides if shaped else '?'})",
                fix="get the file anew",
            )
        order = text(self.dtype.order) if text(self.dtype.order) in ("<", ">") else "<"
        return np.frombuffer(self.raw, dtype=order + kind).reshape(sides, order="F" if self.fortran else "C")


class _PlainType:
    """Stand-in for numpy.dtype: its kind, such as u1, and byte order."""

    def __init__(self, kind: Any = "", *_: Any) -> None:
        self.kind, self.order = kind, "|"


class _Named:
    """A name of NumPy's that a pickle may call, and the function of ours that is called instead."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


def _subtype(*_: Any) -> None:
    """numpy.ndarray is only ever passed on to `_reconstruct`."""
    raise ValueError("an array made without its bytes")


def _reconstruct(*_: Any) -> PlainArray:
    return PlainArray()


def _frombuffer(raw: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> PlainArray:
    array = PlainArray()
    array.shape, array.dtype, array.fortran, array.raw = shape, dtype, text(order) == "F", raw
    return array


def _encode(value: Any, _: Any) -> bytes:
    """Stand-in for _codecs.encode, by which Python 3 writes bytes into old pickle protocols."""
    if not isinstance(value, str):
        raise ValueError("bytes made of something else than text")
    return value.encode("latin-1")


def _no_bytes() -> bytes:
    """Stand-in for bytes, by which the same writers make empty ones."""
    return b""


_ADMITTED: dict[tuple[str, str], _Named] = {
    ("numpy", "ndarray"): _Named(_subtype),
    ("numpy", "dtype"): _Named(_PlainType),
    ("numpy.core.multiarray", "_reconstruct"): _Named(_reconstruct),
    ("numpy._core.multiarray", "_reconstruct"): _Named(_reconstruct),
    ("numpy.core.numeric", "_frombuffer"): _Named(_frombuffer),
    ("numpy._core.numeric", "_frombuffer"): _Named(_frombuffer),
    ("_codecs", "encode"): _Named(_encode),
    ("__builtin__", "bytes"): _Named(_no_bytes),
}
_DAMAGED = (ValueError, IndexError, KeyError, TypeError, struct.error, OverflowError)
"""What a damaged pickle makes the machine raise."""


class _Machine:
    """The stack of values, the marks in it, the values that the pickle remembers by number, and where it stands."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.encoded = 0

    def run(self) -> Any:
        while True:
            code = self.take(1)
            if code == b".":
                return self.stack.pop()
            step = _INSTRUCTIONS.get(code)
            if step is None:
                raise ValueError(
                    f"the instruction {code!r} at byte {self.at - 1} is none that plain data needs"
                )
            step(self)

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) != count:
            raise ValueError("it is cut off")
        self.at += count
        return part

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def top(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise ValueError("it takes more than it has")
        values = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return values

    def remember(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("it adds to something that is no list")
        self.stack[-1].extend(values)

    def fill(self, values: list[Any]) -> None:
        """Keys are text or numbers: to hash a nested one can take for ever."""
        if type(self.stack[-1]) is not dict or len(values) % 2:
            raise ValueError("it fills something that is no dictionary")
        keys = values[::2]
        if not all(isinstance(key, str | bytes | int | float) for key in keys):
            raise ValueError("a key is neither text nor a number")
        self.stack[-1].update(zip(keys, values[1::2], strict=True))

    def table(self) -> None:
        values = self.since_mark()
        self.push({})
        self.fill(values)

    def name(self, module: Any, name: Any) -> None:
        named = _ADMITTED.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if named is None:
            raise UserError(
                f"the pickle asks for {text(module)[:80]}.{text(name)[:80]}, which plain data does not need; nothing "
                "of it was run",
                fix="do not trust this file; get the data set anew from its authors",
            )
        self.push(named)

    def call(self) -> None:
        named, arguments = self.top(2)
        if not isinstance(named, _Named) or not isinstance(arguments, tuple):
            raise ValueError("it calls something that is no function")
        made = named.call(*arguments)
        if isinstance(made, bytes):
            self.encoded += len(made)
            if self.encoded > len(self.data):  # one text, remembered, and made into bytes again and again
                raise ValueError("it makes more bytes than it holds")
        self.push(made)

    def build(self) -> None:
        made, state = self.top(2)
        if isinstance(made, PlainArray) and isinstance(state, tuple):
            _, made.shape, made.dtype, made.fortran, made.raw = state
        elif isinstance(made, _PlainType) and isinstance(state, tuple):
            made.order = state[1]
        else:
            raise ValueError("it sets the state of something that has none")
        self.push(made)


def _int_line(machine: _Machine) -> int | bool:
    """Protocol 0 writes truth as 00 and 01."""
    line = machine.line()
    return line == b"01" if line in (b"00", b"01") else int(line)


def _string_line(machine: _Machine) -> bytes:
    line = machine.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("a text without its quotes")
    return line[1:-1].decode("unicode_escape").encode("latin-1")


def _pushes(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make(machine))


def _counted(form: str, decode: Callable[[bytes], Any]) -> Callable[[_Machine], None]:
    """Pushes bytes whose number stands before them."""
    return lambda machine: machine.stack.append(decode(machine.take(machine.number(form))))


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    # frame and protocol: nothing to do
    b"\x80": lambda m: m.take(1),
    b"\x95": lambda m: m.take(8),
    # numbers and the like
    b"N": _pushes(lambda m: None),
    b"\x88": _pushes(lambda m: True),
    b"\x89": _pushes(lambda m: False),
    b"K": _pushes(lambda m: m.take(1)[0]),
    b"M": _pushes(lambda m: m.number("<H")),
    b"J": _pushes(lambda m: m.number("<i")),
    b"G": _pushes(lambda m: m.number(">d")),
    b"I": _pushes(_int_line),
    b"L": _pushes(lambda m: int(m.line().rstrip(b"L"))),
    b"F": _pushes(lambda m: float(m.line())),
    b"\x8a": _counted("<B", _long),
    # text and bytes; a text of Python 2 is bytes
    b"U": _counted("<B", bytes),
    b"T": _counted("<I", bytes),
    b"S": _pushes(_string_line),
    b"C": _counted("<B", bytes),
    b"B": _counted("<I", bytes),
    b"\x8e": _counted("<Q", bytes),
    b"\x96": _counted("<Q", bytearray),
    b"\x8c": _counted("<B", _utf8),
    b"X": _counted("<I", _utf8),
    b"\x8d": _counted("<Q", _utf8),
    b"V": _pushes(lambda m: m.line().decode("raw-unicode-escape")),
    # containers
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"0": lambda m: m.stack.pop(),
    b"1": lambda m: m.since_mark(),
    b"]": _pushes(lambda m: []),
    b"l": lambda m: m.push(m.since_mark()),
    b"a": lambda m: m.extend(list(m.top(1))),
    b"e": lambda m: m.extend(m.since_mark()),
    b")": _pushes(lambda m: ()),
    b"t": lambda m: m.push(tuple(m.since_mark())),
    b"\x85": lambda m: m.push(m.top(1)),
    b"\x86": lambda m: m.push(m.top(2)),
    b"\x87": lambda m: m.push(m.top(3)),
    b"}": _pushes(lambda m: {}),
    b"d": lambda m: m.table(),
    b"s": lambda m: m.fill(list(m.top(2))),
    b"u": lambda m: m.fill(m.since_mark()),
    # what it remembers
    b"p": lambda m: m.remember(int(m.line())),
    b"q": lambda m: m.remember(m.take(1)[0]),
    b"r": lambda m: m.remember(m.number("<I")),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"g": _pushes(lambda m: m.memo[int(m.line())]),
    b"h": _pushes(lambda m: m.memo[m.take(1)[0]]),
    b"j": _pushes(lambda m: m.memo[m.number("<I")]),
    # the few names
    b"c": lambda m: m.name(m.line().decode("utf-8", "replace"), m.line().decode("utf-8", "replace")),
    b"\x93": lambda m: m.name(*m.top(2)),
    b"R": lambda m: m.call(),
    b"b": lambda m: m.build(),
}
