"""Whether two ranks hold the same data set: a short number for each part of it (pure but for reading its attributes).

Promises: reads some values of each attribute, never a sample through `__getitem__`; a data set whose parts cannot be
read is never taken for another one's twin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from drumline.guards.finding import Finding

_VALUES = 512
_PLAIN = (str, int, float, bool, bytes, type(None))


def root_of(dataset: Any) -> tuple[Any, Callable[[int], int]]:
    """The data set under any Subset, and what an index of the outer one is in it."""
    chain: list[Sequence[int]] = []
    while isinstance(dataset, Subset):
        chain.append(dataset.indices)
        dataset = dataset.dataset

    def real(index: int) -> int:
        for indices in chain:
            index = int(indices[index])
        return index

    return dataset, real


def length_of(sized: Any) -> int | None:
    """The length of a loader or a data set; None if it has none, for example over an IterableDataset."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def contents_of(dataset: Any, depth: int = 3) -> dict[str, str]:
    """A hash of each attribute of a data set, and of its type and length. Includes the data sets that it wraps."""
    length = length_of(dataset)
    parts = {"type": _hash(f"{type(dataset).__name__} {length}")}
    for name, value in getattr(dataset, "__dict__", {}).items():
        told = _told(value, depth)
        if told is not None:
            parts[name] = _hash(told)
    if isinstance(dataset, list | tuple):
        parts["items"] = _hash(_told(dataset, depth) or "")
    if len(parts) == 1:
        parts["own"] = str(id(dataset))  # nothing to compare: never the same on two ranks
    return parts


def unlike_parts(ranks: Sequence[int], said: Sequence[Mapping[str, Any] | None], step: int) -> Finding | None:
    """Data sets of the same kind and length, with the same inputs on two ranks and different labels."""
    known = [(rank, one["data"]) for rank, one in zip(ranks, said, strict=True) if one is not None]
    for place, (first, mine) in enumerate(known):
        for second, theirs in known[place + 1 :]:
            if mine["type"] != theirs["type"] or mine.keys() != theirs.keys():
                continue
            differ = [name for name in mine if name.endswith("[labels]") and mine[name] != theirs[name]]
            same = [name for name in mine if name.endswith("[]") and mine[name] == theirs[name]]
            if differ and same:
                return Finding(
                    "labels",
                    f"the data sets of ranks {first} and {second} have the same "
                    f"'{same[0].removesuffix('[]')}' and a different '{differ[0].removesuffix('[labels]')}'",
                    f"ranks {first} and {second}",
                    f"step {step}",
                    "load inputs and labels on every rank in the same order: sort file names, shuffle by the sampler",
                )
    return None


def parts_of(dataset: Any) -> dict[str, str]:
    """`contents_of`, with every tensor and list that is as long as the data set: named `name[labels]` if it holds one
    whole number for each sample, else `name[]`."""
    length = length_of(dataset)
    found = contents_of(dataset)
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        values = value if isinstance(value, list | tuple) and _nested(value) else [value]
        for at, one in enumerate(values):
            if hasattr(one, "__len__") and not isinstance(one, str) and _length(one) == length and length:
                label, told = name if len(values) == 1 else f"{name}[{at}]", _told(one, 1)
                if told is not None:
                    found[f"{label}[labels]" if _is_labels(one) else f"{label}[]"] = _hash(told)
    return found


def _length(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    return len(value)


def _is_labels(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 1 and "int" in str(value.dtype)
    return isinstance(value, list | tuple) and all(isinstance(one, int) for one in value[:_VALUES])


def _nested(value: Sequence[Any]) -> bool:
    return 0 < len(value) <= 16 and all(isinstance(one, torch.Tensor | np.ndarray) for one in value)


def _told(value: Any, depth: int) -> str | None:
    """Some values, evenly spread; None for what cannot be told."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_cuda or value.is_meta:
            return None
        flat = value.detach().reshape(-1)
        return f"{tuple(value.shape)} {flat[:: max(1, len(flat) // _VALUES)].tolist()}"
    if isinstance(value, np.ndarray):
        values = value.reshape(-1)
        return f"{value.shape} {values[:: max(1, len(values) // _VALUES)].tolist()}"
    if isinstance(value, Dataset) and depth:
        inner = contents_of(value, depth - 1)
        return None if "own" in inner else str(inner)
    if isinstance(value, list | tuple) and depth:
        some = value[:: max(1, len(value) // _VALUES)]
        return f"{len(value)} {[_told(one, depth - 1) for one in some]}"
    if isinstance(value, dict) and depth:
        return f"{len(value)} {[(str(key), _told(one, depth - 1)) for key, one in list(value.items())[:_VALUES]]}"
    return None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
