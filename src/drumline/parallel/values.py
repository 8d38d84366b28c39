"""Values as JSON and plain bytes, for messages between ranks: nothing that is received can run code.

Promises: numbers, text, containers, paths, tensors, and the dataclasses, named tuples and enums of this package are
decoded as they were encoded. Rejects any other type, in both directions: decoding looks up no name outside the
modules of this package that are already loaded, and calls only the constructors of such classes, with their own
fields.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

PACKAGE = __name__.partition(".")[0] + "."
TAG = "*"
_LENGTH = struct.Struct("!Q")


def encode(value: object) -> bytes:
    """The value as text, followed by the bytes of its tensors. Raises `TypeError` for an unsupported type."""
    blobs: list[bytes] = []
    text = json.dumps(_pack(value, blobs)).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *blobs))


def decode(content: bytes) -> Any:
    """The decoded value. Raises `ValueError` if `encode` did not create the content."""
    try:
        (length,) = _LENGTH.unpack_from(content)
        end = _LENGTH.size + length
        return _unpack(json.loads(content[_LENGTH.size : end]), memoryview(content)[end:])
    except (
        AssertionError,
        AttributeError,
        KeyError,
        RecursionError,
        RuntimeError,
        TypeError,
        struct.error,
    ) as wrong:
        raise ValueError(f"not an encoded value ({wrong})") from wrong


def _pack(value: object, blobs: list[bytes]) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_pack(item, blobs) for item in value]
    if type(value) is dict:
        if TAG not in value and all(type(key) is str for key in value):
            return {key: _pack(item, blobs) for key, item in value.items()}
        return _tagged("dict", [[_pack(key, blobs), _pack(item, blobs)] for key, item in value.items()])
    if type(value) in (tuple, set, frozenset):
        assert isinstance(value, tuple | set | frozenset)
        return _tagged(type(value).__name__, [_pack(item, blobs) for item in value])
    if isinstance(value, Path):
        return _tagged("path", str(value))
    if isinstance(value, torch.dtype):
        return _tagged("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        start = sum(map(len, blobs))
        blobs.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        dtype = str(plain.dtype).removeprefix("torch.")
        return _tagged("tensor", [dtype, list(plain.shape), start, len(blobs[-1])])
    return _pack_ours(value, blobs)


def _pack_ours(value: object, blobs: list[bytes]) -> object:
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    _ours(name)
    if isinstance(value, Enum):
        return _tagged("enum", [name, value.name])
    if isinstance(value, tuple):
        return _tagged("named", [name, [_pack(item, blobs) for item in value]])
    assert is_dataclass(value)
    content = {field.name: _pack(getattr(value, field.name), blobs) for field in fields(value)}
    return _tagged("data", [name, content])


def _tagged(tag: str, content: object) -> dict[str, object]:
    return {TAG: [tag, content]}


def _unpack(value: Any, blobs: memoryview) -> Any:
    if isinstance(value, list):
        return [_unpack(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _unpack(item, blobs) for key, item in value.items()}
    ((tag, content),) = value.values()
    return _READERS[tag](content, blobs)


def _tensor(content: Any, blobs: memoryview) -> torch.Tensor:
    name, shape, start, length = content
    if length == 0:
        return torch.empty(shape, dtype=_dtype(name))
    assert 0 <= start < start + length <= len(blobs), "a tensor outside the content"
    return torch.frombuffer(bytearray(blobs[start : start + length]), dtype=_dtype(name)).reshape(shape)


def _dtype(content: str) -> torch.dtype:
    found = getattr(torch, content)
    assert isinstance(found, torch.dtype), content
    return found


def _data(content: Any, blobs: memoryview) -> Any:
    kind, values = _ours(content[0]), {name: _unpack(item, blobs) for name, item in content[1].items()}
    assert is_dataclass(kind)
    made = kind(**{field.name: values.pop(field.name) for field in fields(kind) if field.init})
    assert set(values) <= {field.name for field in fields(kind)}, "unknown fields"
    return made


def _ours(name: str) -> type[Any]:
    """A dataclass, named tuple or enum of this package, by `module:class`."""
    module, _, path = name.partition(":")
    if not module.startswith(PACKAGE) or module not in sys.modules:
        raise TypeError(f"{name} cannot be sent to another process")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = vars(found)[part]
    if not isinstance(found, type) or found.__module__ != module:
        raise TypeError(f"{name} is not a class of that module")
    named = issubclass(found, tuple) and hasattr(found, "_fields")
    if not (is_dataclass(found) or named or issubclass(found, Enum)):
        raise TypeError(f"{name} holds more than values")
    return found


_READERS: dict[str, Callable[[Any, memoryview], Any]] = {
    "dict": lambda pairs, blobs: {_unpack(key, blobs): _unpack(item, blobs) for key, item in pairs},
    "tuple": lambda items, blobs: tuple(_unpack(items, blobs)),
    "set": lambda items, blobs: set(_unpack(items, blobs)),
    "frozenset": lambda items, blobs: frozenset(_unpack(items, blobs)),
    "path": lambda text, _: Path(text),
    "dtype": lambda name, _: _dtype(name),
    "tensor": _tensor,
    "enum": lambda content, _: _ours(content[0])[content[1]],
    "named": lambda content, blobs: _ours(content[0])(*_unpack(content[1], blobs)),
    "data": _data,
}
