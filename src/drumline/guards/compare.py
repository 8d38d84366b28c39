"""What ranks compare: short numbers of tensors, and who differs (pure).

Promises: tensors are read on their own device; the numbers come to the host in one copy per device. Sparse and
uninitialised tensors are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from drumline.state.fingerprint import fingerprint, fingerprints_of, first_difference

_GLANCE = 1 << 16
_MOST_LEVELS = 4
_SCALES = 10.0
"""Inputs whose standard deviations differ by this factor, or whose means lie this many deviations apart, were
prepared differently. Ranks with different data (classes, sites, noise) stay far below it."""


def numbers(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A fingerprint per tensor."""
    usable = {name: tensor for name, tensor in tensors.items() if _is_plain(tensor)}
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in usable.items():
        by_device.setdefault(tensor.device, []).append(name)
    found: dict[str, int] = {}
    for names in by_device.values():
        values = fingerprints_of([usable[name] for name in names]).tolist()
        found.update(zip(names, values, strict=True))
    return {name: found[name] for name in usable}


def glance(tensors: Iterable[torch.Tensor]) -> int:
    """One number for a batch, of evenly spread values of each tensor: enough to tell two batches apart."""
    total = 0
    for tensor in tensors:
        if _is_plain(tensor) and tensor.numel():
            flat = tensor.detach().reshape(-1)
            total = hash((total, int(fingerprint(flat[:: max(1, len(flat) // _GLANCE)]))))
    return total


def digest(values: Mapping[str, int]) -> str:
    """A short text that two ranks share when all their numbers agree."""
    text = "\n".join(f"{name} {value}" for name, value in values.items())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def difference(values: Sequence[Mapping[str, int]]) -> tuple[str, list[int]] | None:
    """The first tensor, in the first rank's order, on which ranks differ, and which of them differ from the majority
    (all where there is none). A tensor that some rank does not have differs too."""
    order = list(dict.fromkeys(name for rank in values for name in rank))
    if not order:
        return None
    table = torch.tensor([[rank.get(name, 0) for name in order] for rank in values], dtype=torch.int64)
    return first_difference(order, table)


def twins(batches: Sequence[int | None]) -> list[int]:
    """The places of the ranks whose batch another rank has too."""
    return [
        place
        for place, batch in enumerate(batches)
        if batch is not None and any(other == batch for i, other in enumerate(batches) if i != place)
    ]


def sharing(ids: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """The first two places that share more than half of a batch's sample ids, and how many. Fewer in common are
    normal where samples are drawn with replacement or repeated to fill the last batch."""
    for first, mine in enumerate(ids):
        for second in range(first + 1, len(ids)):
            common = len(set(mine) & set(ids[second]))
            if mine and 2 * common > max(len(set(mine)), len(set(ids[second]))):
                return first, second, common
    return None


def apart(samples: Sequence[Sequence[float]]) -> float:
    """How far ranks' values of one tensor lie apart, relative to the largest; infinite where shapes differ."""
    if len({len(sample) for sample in samples}) != 1:
        return float("inf")
    table = torch.tensor(samples, dtype=torch.float64)
    largest = table.abs().max().item() if table.numel() else 0.0
    spread = (table.max(dim=0).values - table.min(dim=0).values).max().item() if table.numel() else 0.0
    return spread / largest if largest else 0.0


def sample_of(tensor: torch.Tensor | None, count: int = 1024) -> list[float]:
    """Evenly spread values of a tensor."""
    if tensor is None or not _is_plain(tensor) or tensor.numel() == 0:
        return []
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // count)][:count].double().cpu().tolist()


def levels(tensors: Iterable[torch.Tensor]) -> list[tuple[float, float]]:
    """Mean and standard deviation of the first floating-point inputs of a batch with more than one dimension."""
    found = []
    for tensor in tensors:
        if tensor.dim() > 1 and tensor.is_floating_point() and _is_plain(tensor) and tensor.numel() > 1:
            deviation, mean = torch.std_mean(tensor.detach().float())
            found.append((float(mean), float(deviation)))
    return found[:_MOST_LEVELS]


def far_apart(said: Sequence[Sequence[Sequence[float]]]) -> tuple[int, int] | None:
    """The indices of the first two ranks whose inputs are on different scales."""
    for place, other in enumerate(said):
        if len(other) != len(said[0]):
            return None
        for (mean, deviation), (mean_too, deviation_too) in zip(said[0], other, strict=True):
            small, large = sorted((deviation, deviation_too))
            if small > 0 and (large > _SCALES * small or abs(mean - mean_too) > _SCALES * large):
                return 0, place
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not is_lazy(tensor) and not tensor.is_meta
