"""Fingerprints: 64-bit hashes of tensors, to compare ranks and runs.

Promises: a fingerprint is computed on the tensor's own device by two kernels, without waiting. It changes with any
bit, any sign and any swap of two values, and depends only on the values in logical order, not on the device or the
memory layout. `state_sha256` covers the names, types, shapes and bytes of the model, the optimizer and the rest of
the state. Everything here is pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

CHUNK = 2**22
"""Size of the table of weights (32 MiB on a device with tensors that large). Longer tensors use it repeatedly, each
time multiplied by a different odd number."""
_CACHE_WORDS = 2**17
"""On a CPU, slices of this size stay in the cache: 3 times as fast as whole tensors."""
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """One int64: the sum, modulo 2^64, of each value's bits plus 1, times an odd weight of its position."""
    return fingerprints_of([tensor])[0]


@dataclass(frozen=True)
class Rows:
    """The slice of a tensor that a process holds: the number of values before it, and of the whole tensor. The
    fingerprints of all slices add up to the fingerprint of the whole."""

    before: int
    whole: int


@torch.no_grad()
def fingerprints_of(
    tensors: Sequence[torch.Tensor], slices: Sequence[Rows | None] | None = None
) -> torch.Tensor:
    """One int64 per tensor, in order, on the device of the first. Two kernels for each, and two for all together.
    `slices` says which tensors are slices, and of what."""
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    device = tensors[0].device
    rows = slices or [None] * len(tensors)
    sums = [
        (_weighed(tensor.detach()) if part is None else _weighed_slice(tensor.detach(), part.before)).to(
            device
        )
        for tensor, part in zip(tensors, rows, strict=True)
    ]
    lengths = tuple(
        # The first slice counts the length of the whole tensor.
        (tensor.numel() if part is None else 0 if part.before else part.whole)
        * (2 if tensor.element_size() == 8 else 1)
        for tensor, part in zip(tensors, rows, strict=True)
    )
    return torch.stack(sums).add_(_of_zeros(lengths, device))


def first_difference(names: Sequence[str], ranks: torch.Tensor) -> tuple[str, list[int]] | None:
    """Given the fingerprints of all ranks (ranks x tensors, in the order of `names`): the first tensor that differs,
    and the ranks that differ from the majority, or all ranks if there is no majority, as with two. None if all are
    equal."""
    majority = ranks.mode(dim=0).values
    wrong = ranks != majority
    if not wrong.any():
        return None
    column = int(wrong.any(dim=0).int().argmax())
    minority = wrong[:, column].nonzero().flatten().tolist()
    return names[column], minority if 2 * len(minority) < len(ranks) else list(range(len(ranks)))


def state_sha256(groups: Mapping[str, Mapping[str, torch.Tensor]]) -> str:
    """The hash of a state, equal for two runs with the same bits: model, helpers, optimizer and the objective's
    memory, each sorted by name."""
    digest = hashlib.sha256()
    for group in ("model", "helpers", "optimizer", "memory"):
        for name in sorted(groups.get(group, {})):
            tensor = groups[group][name].detach().to("cpu").contiguous()
            digest.update(f"{group}/{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _weighed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of words times weights, a scalar on the device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    assert tensor.element_size() in _VIEWS, tensor.dtype
    words = tensor.contiguous().reshape(-1) if tensor.element_size() == 8 else tensor
    words = words.view(_VIEWS[tensor.element_size()])
    if words.numel() > CHUNK:
        parts = words.reshape(-1).split(CHUNK)
        sums = [_weighed_chunk(part) * _multiplier(number) for number, part in enumerate(parts)]
        return torch.stack(sums).sum()
    return _weighed_chunk(words)


def _weighed_slice(tensor: torch.Tensor, before: int) -> torch.Tensor:
    """The part of the whole tensor's sum that a slice contributes."""
    if not before:
        return _weighed(tensor)
    if tensor.is_complex():
        tensor, before = torch.view_as_real(tensor), 2 * before
    words = tensor.contiguous().reshape(-1).view(_VIEWS[tensor.element_size()])
    at = before * (2 if tensor.element_size() == 8 else 1)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    while len(words):
        number, first = divmod(at, CHUNK)
        here, words = words.split([min(len(words), CHUNK - first), max(0, len(words) - CHUNK + first)])
        weights = _weights(here.device, first + len(here))[first:]
        total += (here * weights).sum() * _multiplier(number)
        at += len(here)
    return total


def _weighed_chunk(words: torch.Tensor) -> torch.Tensor:
    weights = _weights(words.device, words.numel())
    if words.device.type == "cpu" and words.numel() > _CACHE_WORDS and words.is_contiguous():
        pairs = zip(words.reshape(-1).split(_CACHE_WORDS), weights.split(_CACHE_WORDS), strict=True)
        return torch.stack([(part * weight).sum() for part, weight in pairs]).sum()
    # The weights take the shape of the words, so that channels_last costs no copy.
    return (words * weights.view(words.shape)).sum()


def _weights(device: torch.device, count: int) -> torch.Tensor:
    """The weights of the first `count` positions, on the device."""
    return _table(device, max(1024, 1 << (count - 1).bit_length()) if count else 1024)[:count]


@lru_cache(maxsize=64)
def _table(device: torch.device, count: int) -> torch.Tensor:
    return torch.from_numpy(position_weights(count)).to(device)


def position_weights(count: int) -> NDArray[np.int64]:
    """Odd numbers with different low 33 bits, so that a swap of two 32-bit words, which differ by less than 2^32,
    changes the sum; scattered, so that no simple pattern of changes cancels out. Must never change: runs store
    fingerprints."""
    positions = np.arange(count, dtype=np.uint64)
    low = positions
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):  # one-to-one on 32 bits
        low = (low ^ (low >> np.uint64(shift))) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    high = positions + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        high = (high ^ (high >> np.uint64(shift))) * np.uint64(factor)
    return ((high >> np.uint64(31) << np.uint64(33)) | (low << np.uint64(1)) | np.uint64(1)).view(np.int64)


@lru_cache(maxsize=32)
def _of_zeros(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The fingerprints of tensors of zeros with these lengths, all different."""
    return torch.tensor([_of_zero_words(length) for length in lengths], dtype=torch.int64).to(device)


@lru_cache(maxsize=4096)
def _of_zero_words(length: int) -> int:
    whole, rest = divmod(length, CHUNK)
    sums = [(number, CHUNK) for number in range(whole)] + [(whole, rest)]
    total = sum(int(_weights(_HOST, count).sum()) * _multiplier(number) for number, count in sums if count)
    return _signed(total % 2**64)


def _multiplier(number: int) -> int:
    """An odd number for each chunk; 1 for the first."""
    return _signed((number * 0x9E3779B97F4A7C15 * 2 + 1) % 2**64)


_HOST = torch.device("cpu")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
