"""Short numbers that stand for tensors, to compare ranks and runs.

Promises: `fingerprint` is computed on the tensor's own device and changes with any bit, any swap of two values
and any sign; `state_sha256` covers names, types, shapes and every byte of parameters, buffers, optimizer and memory.
Both are pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

_ODD = 0x9E3779B97F4A7C15
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """One int64: the sum, modulo 2^64, of each value's bits times an odd weight of its position."""
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(_VIEWS[flat.element_size()]).to(torch.int64)
    # Times an odd weight, a 64-bit value's highest bit is the same at every place; folded down, it is not.
    words = words ^ (words >> 32 & 0xFFFFFFFF)
    places = torch.arange(len(words), device=words.device, dtype=torch.int64)
    weights = (places * _signed(_ODD)) | 1
    return ((words + 1) * (weights ^ (weights >> 29) | 1)).sum()


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One int64 per tensor, in the order of names."""
    return torch.stack([fingerprint(tensors[name]) for name in sorted(tensors)])


def first_difference(names: Sequence[str], ranks: torch.Tensor) -> tuple[str, list[int]] | None:
    """Given every rank's fingerprints (ranks x tensors): the first tensor on which they differ, and the ranks
    that differ from the majority; all of them when there is none, as with two. None when all agree."""
    majority = ranks.mode(dim=0).values
    wrong = ranks != majority
    if not wrong.any():
        return None
    column = int(wrong.any(dim=0).int().argmax())
    accused = wrong[:, column].nonzero().flatten().tolist()
    return sorted(names)[column], accused if 2 * len(accused) < len(ranks) else list(range(len(ranks)))


def state_sha256(groups: Mapping[str, Mapping[str, torch.Tensor]]) -> str:
    """The hash that two runs with the same bits share: model, helpers, optimizer and the objective's memory, sorted
    by name within each."""
    digest = hashlib.sha256()
    for group in ("model", "helpers", "optimizer", "memory"):
        for name in sorted(groups.get(group, {})):
            tensor = groups[group][name].detach().to("cpu").contiguous()
            digest.update(f"{group}/{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
