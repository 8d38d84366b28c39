"""What an object holds, as a value to compare with what it holds later: whether the user's code keeps a state.

Containers, tensors, arrays, generators and objects are compared by what is in them; functions, classes and what
cannot be copied, by identity. A state in a closure or a global variable is not seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def contents(value: object, known: Iterable[object] = ()) -> object:
    """What the value holds at present. What is in `known` is not looked into."""
    return _contents(value, {id(each): (number, each) for number, each in enumerate(known)})


def _contents(value: object, seen: dict[int, tuple[int, object]]) -> object:
    """`seen` keeps what it has met alive, so that no other object gets the same id."""
    if value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, int | float | complex):
        return repr(value)  # NaN differs from itself
    if isinstance(value, tuple):
        return tuple(_contents(each, seen) for each in value)
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value
    if isinstance(value, Tensor):
        return value.dtype, value.shape, _digest(value)
    try:
        # As `copy` and `pickle` do: a constructor, its arguments, a state, and the items of lists and tables.
        parts = "" if isinstance(value, type) else value.__reduce_ex__(4)
    except Exception:  # what cannot be copied may raise anything
        parts = ""
    if isinstance(parts, str):
        return id(value)
    return tuple(_contents(tuple(part) if isinstance(part, Iterator) else part, seen) for part in parts)


def _digest(tensor: Tensor) -> bytes:
    if tensor.is_meta or tensor.layout != torch.strided:
        return b""
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).digest()
