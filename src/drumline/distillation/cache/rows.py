"""Encodes a teacher output as a row of bytes of fixed length, and decodes it.

Promises: pure functions on any device, without a host sync, whose shapes depend on the rule alone, so `decode` can
run inside a CUDA graph. A row holds all logits bit for bit, or the k largest (`top`).

The top-k rule: a row stores the k largest logits exactly; among equal ones, the lower class comes first. It stores
the probability of the others at T = 1 as one number, l = log sum_{j not kept} exp(z_j), and spreads it evenly over
them: each gets the logit l - log(C - k). A softmax at T = 1 therefore gives the kept classes their original
probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Rule:
    """What a row stores: values, class numbers, the log-sum-exp of the other classes, pooled features."""

    classes: int
    dtype: str
    """The teacher's dtype: `float32`, `bfloat16` or `float16`."""
    top: int = 0
    """Number of logits; 0: all. A value of at least `classes` becomes 0."""
    pooled: int = 0
    """Width of the pooled features; 0: none."""

    def __post_init__(self) -> None:
        assert self.classes > 0, self.classes
        assert self.dtype in DTYPES, self.dtype
        assert self.top >= 0, self.top
        assert self.pooled >= 0, self.pooled
        if self.top >= self.classes:
            object.__setattr__(self, "top", 0)

    @property
    def numbers(self) -> torch.dtype:
        """The dtype of values and features."""
        return DTYPES[self.dtype]

    @property
    def indices(self) -> torch.dtype:
        """The dtype of class numbers. int16 holds 0..65535 as its bits."""
        return torch.int16 if self.classes <= 2**16 else torch.int32

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Bytes of values, class numbers, log-sum-exp of the other classes, and features."""
        size = self.numbers.itemsize
        if not self.top:
            return self.classes * size, 0, 0, self.pooled * size
        return self.top * size, self.top * self.indices.itemsize, 4, self.pooled * size

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return sum(self.widths)


def encode(logits: Tensor, pooled: Tensor | None, rule: Rule) -> Tensor:
    """(n, row_bytes) uint8 from (n, classes) logits and (n, pooled) features, as a copy."""
    assert logits.shape[1:] == (rule.classes,), (logits.shape, rule.classes)
    assert logits.dtype == rule.numbers, (logits.dtype, rule.dtype)
    parts = _largest(logits, rule) if rule.top else [logits]
    if rule.pooled:
        assert pooled is not None
        assert pooled.shape[1:] == (rule.pooled,), (pooled.shape, rule.pooled)
        assert pooled.dtype == rule.numbers, (pooled.dtype, rule.dtype)
        parts.append(pooled)
    return torch.cat([_cast(part.detach(), torch.uint8) for part in parts], dim=1)


def decode(rows: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """The logits (all: unchanged, in their dtype; top-k: fp32, by the rule above) and the features."""
    parts = _split(rows, rule)
    if not rule.top:
        return parts.values, parts.pooled
    others = (parts.rest - math.log(rule.classes - rule.top)).expand(-1, rule.classes)
    return others.scatter(1, parts.classes, parts.values.float()), parts.pooled


def differences(rows: Tensor, logits: Tensor, pooled: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """For each row, the largest difference from live logits and from live features (0 without features), in float64.
    Top-k compares the classes that the row has stored: rounding decides between logits that are almost equal."""
    parts, live = _split(rows, rule), logits.double()
    if not rule.top:
        apart = _apart(parts.values, live)
    else:
        rest = live.scatter(1, parts.classes, -math.inf).logsumexp(1, keepdim=True)
        kept = _apart(parts.values, live.gather(1, parts.classes))
        apart = torch.cat([kept, _apart(parts.rest, rest)], dim=1)
    if parts.pooled is None or pooled is None:
        return apart.amax(1), torch.zeros_like(apart[:, 0])
    return apart.amax(1), _apart(parts.pooled, pooled.double()).amax(1)


class _Parts(NamedTuple):
    values: Tensor
    classes: Tensor
    rest: Tensor
    pooled: Tensor | None


def _split(rows: Tensor, rule: Rule) -> _Parts:
    assert rows.shape[1:] == (rule.row_bytes,), (rows.shape, rule.row_bytes)
    values, classes, rest, pooled = rows.split(rule.widths, dim=1)
    places = _cast(classes, rule.indices).long()
    return _Parts(
        _cast(values, rule.numbers),
        places & 0xFFFF if rule.indices is torch.int16 else places,
        _cast(rest, torch.float32),
        _cast(pooled, rule.numbers) if rule.pooled else None,
    )


def _largest(logits: Tensor, rule: Rule) -> list[Tensor]:
    # topk does not specify which of equal values it returns; a stable sort does.
    values, classes = logits.sort(dim=1, descending=True, stable=True)
    # In float64, so that rounding to fp32 hides the order in which a device adds.
    rest = values[:, rule.top :].double().logsumexp(1, keepdim=True).float()
    places = classes[:, : rule.top]
    if rule.indices is torch.int16:
        places = torch.where(places < 2**15, places, places - 2**16)
    return [values[:, : rule.top], places.to(rule.indices), rest]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as a different dtype. Copies first, because a slice of a row may not be aligned for the dtype."""
    if tensor.shape[1] == 0:  # its strides fit no wider dtype
        return tensor.new_empty(tensor.shape, dtype=dtype)
    return tensor.clone(memory_format=torch.contiguous_format).view(dtype)


def _apart(stored: Tensor, live: Tensor) -> Tensor:
    """Absolute differences; 0 for equal infinities."""
    stored = stored.double()
    return torch.where(stored == live, 0.0, (stored - live).abs())
