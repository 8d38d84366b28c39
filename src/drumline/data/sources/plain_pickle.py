"""Reads pickles of plain data (containers, text, numbers, integer arrays) without running anything in them.

Promises: no class or function that a pickle names is ever looked up; NumPy's few are replaced by stand-ins
that only keep their arguments, and arrays are rebuilt here from bytes, type and shape. Refuses any other
name, saying which.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.errors import UserError


def read_plain_pickle(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle, with text keys. Arrays in it are `PlainArray`s."""
    try:
        value = _Reader(io.BytesIO(data), encoding="bytes").load()
    except UserError as error:
        raise UserError(f"{where}: {error.what}", error.fix) from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(f"{where} is not a readable pickle: {error}", fix="get the file anew") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a {type(value).__name__}, not a dictionary", fix="get the file anew")
    return {text(key): item for key, item in value.items()}


def text(value: object) -> str:
    """Python 2 wrote text as bytes."""
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


class PlainArray:
    """What a pickle says of an array: shape, type and bytes. `integers` makes it an array."""

    def __init__(self) -> None:
        self.shape: Any = ()
        self.dtype: Any = None
        self.fortran: Any = False
        self.raw: Any = b""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, self.fortran, self.raw = state

    def integers(self, where: str) -> NDArray[np.integer]:
        """The array, if it is one of integers whose bytes fit its shape."""
        kind = text(self.dtype.kind) if isinstance(self.dtype, _PlainType) else "?"
        plain = (
            kind[:1] in "iu"
            and kind[1:] in ("1", "2", "4", "8")
            and isinstance(self.raw, bytes | bytearray)
            and isinstance(self.shape, tuple)
            and all(isinstance(side, int) and side >= 0 for side in self.shape)
        )
        if not plain or math.prod(self.shape) * int(kind[1:]) != len(self.raw):
            raise UserError(
                f"{where} is not a plain array of integers (type {kind}, shape {self.shape})",
                fix="get the file anew",
            )
        order = text(self.dtype.order) if text(self.dtype.order) in "<>" else "<"
        return np.frombuffer(self.raw, dtype=order + kind).reshape(
            self.shape, order="F" if self.fortran else "C"
        )


class _PlainType:
    """Stand-in for numpy.dtype: its kind, such as u1, and byte order."""

    def __init__(self, kind: Any = "", *_: Any) -> None:
        self.kind, self.order = kind, "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _Subtype:
    """Stand-in for numpy.ndarray, which is only ever passed on to `_reconstruct`."""


def _reconstruct(*_: Any) -> PlainArray:
    return PlainArray()


def _frombuffer(raw: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> PlainArray:
    array = PlainArray()
    array.__setstate__((1, shape, dtype, text(order) == "F", raw))
    return array


def _encode(value: Any, _: Any) -> bytes:
    """Stand-in for _codecs.encode, by which Python 3 writes bytes into old pickle protocols."""
    return str(value).encode("latin-1")


_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Subtype,
    ("numpy", "dtype"): _PlainType,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise UserError(
                f"the pickle asks for {module}.{name}, which plain data does not need; nothing of it was run",
                fix="do not trust this file; get the data set anew from its authors",
            )
        return _ADMITTED[module, name]
