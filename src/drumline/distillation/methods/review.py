"""ReviewKD: fuses deeper features of the student into shallower ones and compares the result with the teacher.

Promises: each level of the teacher (every paired stage before its activation, and the pooled vector as a 1×1 map) is
compared with a map fused from the same level of the student and all deeper ones. A sample's loss depends on other
samples only through the helper's BatchNorms. Rejects networks without stages to pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.distillation.method import LossInputs, Method, Needs, NetworkInfo, Taps, Weights, check_option
from drumline.distillation.methods.taps import Pair, needs_of, require_pairs, sum_of
from drumline.models.base import pool_to

PYRAMID = (4, 2, 1)
"""The grids on which maps are compared, besides the whole map."""

MOST_MID = 512
"""The most channels in which levels are fused by default."""


def hierarchical(fused: Tensor, teacher: Tensor) -> Tensor:
    """(n,): Σ_l w_l · mean (P_l(fused) − P_l(teacher))² / Σ_l w_l, mean over channels and positions.

    P_l are the whole map and its means on grids of 4×4, 2×2 and 1×1. w is 1 for the whole map and halves with each
    grid that is smaller than the map; larger grids are omitted. Both maps have the same shape.
    """
    height, width = fused.shape[-2:]
    loss = (fused - teacher).square().mean((1, 2, 3))
    weight = total = 1.0
    for grid in PYRAMID:
        if grid >= min(height, width):
            continue
        weight /= 2
        total += weight
        # Averaging is linear: pooling the difference is the difference of the pooled maps.
        loss = loss + weight * pool_to(fused - teacher, (grid, grid)).square().mean((1, 2, 3))
    return loss / total


@dataclass(frozen=True)
class ReviewKd(Method):
    """Knowledge review, with attention-based fusion and the hierarchical loss."""

    weights: ClassVar[Weights] = Weights(r=1.0, a=0.0, b=5.0)

    mid: int = 0
    """Channels in which levels are fused. 0: as many as the student's deepest level has, up to 512."""
    warmup: float = 20.0

    def __post_init__(self) -> None:
        check_option("mid", self.mid, self.mid >= 0, "0 or more", 0)

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """The common stages, before their activation where that tap exists, and the pooled vectors."""
        return needs_of(_levels(student, teacher))

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        """Fuses levels from deep to shallow."""
        levels = _levels(student, teacher)
        deepest, _ = levels[-1]
        return _Review(levels, student, teacher, self.mid or min(MOST_MID, student.shapes[deepest][0]))

    def loss(self, inputs: LossInputs) -> Tensor:
        """Sum of `hierarchical` over the levels."""
        return sum_of(
            [hierarchical(x, _as_map(inputs.teacher_taps[name])) for name, x in inputs.helper_outputs.items()]
        )


class _Review(nn.Module):
    """Computes a map for each of the teacher's taps, with its name and shape, from the student's levels."""

    def __init__(self, levels: list[Pair], student: NetworkInfo, teacher: NetworkInfo, mid: int) -> None:
        super().__init__()
        self.levels = levels[::-1]
        shapes = [teacher.shapes[theirs] for _, theirs in self.levels]
        self.grids = [(shape[1], shape[2]) if len(shape) == 3 else (1, 1) for shape in shapes]
        self.fusions = nn.ModuleList(
            _Fusion(student.shapes[mine][0], mid, teacher.shapes[theirs][0], fuses=depth > 0)
            for depth, (mine, theirs) in enumerate(self.levels)
        )

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        deeper: Tensor | None = None
        for (mine, theirs), fusion, grid in zip(self.levels, self.fusions, self.grids, strict=True):
            found[theirs], deeper = fusion(_as_map(student[mine]), deeper, grid)
        return found


class _Fusion(nn.Module):
    """One level: its map in `mid` channels, fused with the deeper level by two attention maps, then brought to the
    teacher's shape.

    Let x be the map of this level, y the deeper one resized to x (nearest), and (a, b) = sigmoid(conv1×1([x, y])).
    The fused map is a·x + b·y, resized to the teacher's size (nearest). At the deepest level, x is the fused map.
    """

    def __init__(self, entry: int, mid: int, width: int, fuses: bool) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(entry, mid, 1, bias=False), nn.BatchNorm2d(mid))
        self.attend = nn.Conv2d(2 * mid, 2, 1) if fuses else None
        self.leave = nn.Sequential(nn.Conv2d(mid, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        for conv in (self.enter[0], self.leave[0]):
            assert isinstance(conv, nn.Conv2d)
            nn.init.kaiming_uniform_(conv.weight, a=1)

    def forward(self, x: Tensor, deeper: Tensor | None, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The map to compare with the teacher's, and the fused map for the next level."""
        x = self.enter(x)
        if self.attend is not None:
            assert deeper is not None
            deeper = _nearest(deeper, (x.shape[2], x.shape[3]))
            weights = self.attend(torch.cat((x, deeper), 1)).sigmoid()
            x = x * weights[:, :1] + deeper * weights[:, 1:]
        x = _nearest(x, grid)
        return self.leave(x), x


def _nearest(x: Tensor, grid: tuple[int, int]) -> Tensor:
    return x if (x.shape[2], x.shape[3]) == grid else F.interpolate(x, grid, mode="nearest")


def _as_map(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x[:, :, None, None]


def _levels(student: NetworkInfo, teacher: NetworkInfo) -> list[Pair]:
    """The taps to compare, from shallow to deep."""
    stages = require_pairs("reviewkd", student, teacher)
    levels = [
        (_before_activation(student, mine), _before_activation(teacher, theirs)) for mine, theirs in stages
    ]
    both_pool = "pooled" in student.shapes and "pooled" in teacher.shapes
    return [*levels, ("pooled", "pooled")] if both_pool else levels


def _before_activation(network: NetworkInfo, stage: str) -> str:
    return f"{stage}.pre" if f"{stage}.pre" in network.shapes else stage
