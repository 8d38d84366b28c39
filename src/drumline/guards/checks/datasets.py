"""Whether two ranks hold the same data set, and the same labels in it.

Promises: reads some values of each attribute, and never a sample through `__getitem__`. Data sets whose attributes
cannot be read are never taken for equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from drumline.guards.finding import Finding

_VALUES = 512
_PLAIN = (str, int, float, bool, bytes, type(None))


def root_of(dataset: Any) -> tuple[Any, Callable[[int], int]]:
    """The data set under any Subset, and a function from an index of the outer one to an index of it."""
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
    contents = {"type": _hash(f"{type(dataset).__name__} {length_of(dataset)}")}
    for name, value in getattr(dataset, "__dict__", {}).items():
        text = _text(value, depth)
        if text is not None:
            contents[name] = _hash(text)
    if isinstance(dataset, list | tuple):
        contents["items"] = _hash(_text(dataset, depth) or "")
    if len(contents) == 1:
        contents["own"] = str(id(dataset))  # nothing to compare: never the same on two ranks
    return contents


def columns_of(dataset: Any) -> dict[str, str]:
    """`contents_of`, and every tensor and list that is as long as the data set: as `name[labels]` if it holds one
    integer for each sample, else as `name[]`."""
    length = length_of(dataset)
    found = contents_of(dataset)
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        values = value if isinstance(value, list | tuple) and _is_nested(value) else [value]
        for index, one in enumerate(values):
            if hasattr(one, "__len__") and not isinstance(one, str) and _length(one) == length and length:
                label, text = name if len(values) == 1 else f"{name}[{index}]", _text(one, 1)
                if text is not None:
                    found[f"{label}[labels]" if _is_labels(one) else f"{label}[]"] = _hash(text)
    return found


def different_label_columns(
    ranks: Sequence[int], summaries: Sequence[Mapping[str, Any] | None], step: int
) -> Finding | None:
    """Data sets of the same type and length, with the same inputs on two ranks and different labels."""
    known = [(rank, one["data"]) for rank, one in zip(ranks, summaries, strict=True) if one is not None]
    for (first, mine), (second, theirs) in combinations(known, 2):
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
                "load inputs and labels in the same order on every rank: sort file names, shuffle with the sampler",
            )
    return None


def _length(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    return len(value)


def _is_labels(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 1 and "int" in str(value.dtype)
    return isinstance(value, list | tuple) and all(isinstance(one, int) for one in value[:_VALUES])


def _is_nested(value: Sequence[Any]) -> bool:
    return 0 < len(value) <= 16 and all(isinstance(one, torch.Tensor | np.ndarray) for one in value)


def _text(value: Any, depth: int) -> str | None:
    """Some evenly spaced values, as text; None for a value that cannot be read."""
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
        return f"{len(value)} {[_text(one, depth - 1) for one in some]}"
    if isinstance(value, dict) and depth:
        return f"{len(value)} {[(str(key), _text(one, depth - 1)) for key, one in list(value.items())[:_VALUES]]}"
    return None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
