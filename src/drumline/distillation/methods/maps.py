"""Methods that compare feature maps position by position: hint (FitNet), attention transfer, VID and ReviewKD.

Promises: the batch loss of the papers is the mean over samples. A sample's loss depends on that sample alone; with
hint and reviewkd also on other samples, through the helper's BatchNorms. Stages are paired from the last one
backwards. The larger of two maps is averaged down to the smaller, unless a helper brings the student's map to the
teacher's size. Rejects networks without stages to pair, and stage numbers without a partner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.distillation.method import (
    LossInputs,
    Method,
    Needs,
    NetworkInfo,
    Pair,
    Taps,
    Weights,
    at_common_size,
    common_grid,
    convolution_to,
    needs_of,
    paired_stages,
    require_pairs,
    stages_among,
    sum_of,
)
from drumline.models.base import pool_to


def hint(regressed: Tensor, teacher: Tensor) -> Tensor:
    """(n,): mean over channels and positions of (regressed − teacher)², at the smaller of the two sizes."""
    regressed, teacher = at_common_size(regressed, teacher)
    return (regressed - teacher).square().mean((1, 2, 3))


def attention(student: Tensor, teacher: Tensor) -> Tensor:
    """(n,): mean over positions of (A_s/‖A_s‖ − A_t/‖A_t‖)², where A is the mean over channels of f², as one vector.

    Maps are averaged down to the common size before they are squared. For a map of zeros, A/‖A‖ = 0.
    """
    student, teacher = at_common_size(student, teacher)
    return (_attention_map(student) - _attention_map(teacher)).square().mean(1)


def vid(mean: Tensor, variance: Tensor, teacher: Tensor) -> Tensor:
    """(n,): mean over channels and positions of ½((μ − t)²/σ² + log σ²), with one σ² per teacher channel.

    The negative log-likelihood of the teacher's map without its constant.
    """
    mean, teacher = at_common_size(mean, teacher)
    spread = variance.view(1, -1, 1, 1)
    return 0.5 * ((mean - teacher).square() / spread + spread.log()).mean((1, 2, 3))


@dataclass(frozen=True)
class Hint(Method):
    """FitNet (Romero et al., 2015): one map of the student, after a convolution, matches the teacher's.

    The regressor is that of RepDistiller and mdistiller, because the weight of 100 was chosen for it: convolution,
    BatchNorm, ReLU.
    """

    name: ClassVar[str] = "hint"
    reads: ClassVar[str] = "one stage"
    weights: ClassVar[Weights] = Weights(b=100.0)

    layer: Annotated[int, Range(1)] = 2
    """The student's stage, counted from 1. The teacher's stage is the one at the same distance from the end."""

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """One stage of each network. Rejects a `layer` that either network lacks."""
        mine, theirs = self._pair(student, teacher)
        return Needs((mine,), (theirs,))

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        return _Regressor(self._pair(student, teacher), student, teacher)

    def loss(self, inputs: LossInputs) -> Tensor:
        ((name, regressed),) = inputs.helper_outputs.items()
        return hint(regressed, inputs.teacher_taps[name])

    def _pair(self, student: NetworkInfo, teacher: NetworkInfo) -> Pair:
        return _chosen(self.name, "layer", [self.layer], student, teacher)[0]


@dataclass(frozen=True)
class Attention(Method):
    """Attention transfer (Zagoruyko and Komodakis, 2017): where activations are strong."""

    name: ClassVar[str] = "attention"
    reads: ClassVar[str] = "stages"
    weights: ClassVar[Weights] = Weights(b=1000.0)

    layers: str = ""
    """The student's stages, counted from 1, such as `3+4`. Empty: all stages that both networks have."""

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """The stages of `layers` and their partners. Rejects numbers that either network lacks."""
        if self.layers.strip():
            return needs_of(_chosen(self.name, "layers", self._numbers(), student, teacher))
        return super().needs(student, teacher)

    def loss(self, inputs: LossInputs) -> Tensor:
        pairs = paired_stages(inputs.taps, inputs.teacher_taps)
        return sum_of([attention(inputs.taps[mine], inputs.teacher_taps[theirs]) for mine, theirs in pairs])

    def _numbers(self) -> list[int]:
        try:
            return sorted({int(part) for part in self.layers.split("+")})
        except ValueError:
            raise UserError(
                f"distill.options layers = {self.layers!r}: must be stage numbers joined by +",
                "write layers:3+4, or omit the option to use all stages",
            ) from None


@dataclass(frozen=True)
class Vid(Method):
    """Variational information distillation (Ahn et al., 2019): maps predict the teacher's as a Gaussian."""

    name: ClassVar[str] = "vid"
    reads: ClassVar[str] = "stages"
    weights: ClassVar[Weights] = Weights(b=1.0)

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        return _Predictors(require_pairs(self.name, student, teacher), student, teacher)

    def loss(self, inputs: LossInputs) -> Tensor:
        return sum_of(
            [
                vid(
                    inputs.helper_outputs[name],
                    inputs.helper_outputs[name + _VARIANCE],
                    inputs.teacher_taps[name],
                )
                for name in stages_among(inputs.teacher_taps)
            ]
        )


class _Regressor(nn.Module):
    """Maps the student's tap to the teacher's channels and size. The output has the teacher's tap name.

    `convolution_to` the teacher's shape, BatchNorm, ReLU. If no convolution fits, the student's map is first averaged
    down to the common size.
    """

    def __init__(self, pair: Pair, student: NetworkInfo, teacher: NetworkInfo) -> None:
        super().__init__()
        self.mine, self.theirs = pair
        entry, goal = student.shapes[self.mine], teacher.shapes[self.theirs]
        convolution = convolution_to(entry, goal)
        self.grid = (entry[1], entry[2]) if convolution else common_grid(entry, goal)
        self.conv = convolution or nn.Conv2d(entry[0], goal[0], 1, bias=False)
        self.norm = nn.BatchNorm2d(goal[0])

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        return {self.theirs: F.relu(self.norm(self.conv(pool_to(student[self.mine], self.grid))))}


_VARIANCE = ".variance"
_FIRST_VARIANCE = 5.0
_LEAST_VARIANCE = 1e-5


class _Predictors(nn.Module):
    """For each stage T of the teacher, the mean as "T" (n, C, h, w) and the variance as "T.variance" (C,)."""

    def __init__(self, pairs: list[Pair], student: NetworkInfo, teacher: NetworkInfo) -> None:
        super().__init__()
        self.pairs = pairs
        self.grids = [common_grid(student.shapes[mine], teacher.shapes[theirs]) for mine, theirs in pairs]
        self.means = nn.ModuleDict()
        self.log_scales = nn.ParameterDict()
        # The inverse of softplus, so that the variance starts at `_FIRST_VARIANCE`.
        start = math.log(math.expm1(_FIRST_VARIANCE - _LEAST_VARIANCE))
        for mine, theirs in pairs:
            entry, width = student.shapes[mine][0], teacher.shapes[theirs][0]
            self.means[theirs] = nn.Sequential(
                nn.Conv2d(entry, width, 1, bias=False),
                nn.ReLU(),
                nn.Conv2d(width, width, 1, bias=False),
                nn.ReLU(),
                nn.Conv2d(width, width, 1, bias=False),
            )
            self.log_scales[theirs] = nn.Parameter(torch.full((width,), start))

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for (mine, theirs), grid in zip(self.pairs, self.grids, strict=True):
            found[theirs] = self.means[theirs](pool_to(student[mine], grid))
            found[theirs + _VARIANCE] = F.softplus(self.log_scales[theirs]) + _LEAST_VARIANCE
        return found


def _attention_map(x: Tensor) -> Tensor:
    return F.normalize(x.square().mean(1).flatten(1), dim=1)


def _chosen(
    method: str, option: str, numbers: list[int], student: NetworkInfo, teacher: NetworkInfo
) -> list[Pair]:
    """The pairs for these stage numbers of the student."""
    pairs = dict(require_pairs(method, student, teacher))
    for number in numbers:
        if f"stage{number}" not in pairs:
            had = ", ".join(name.removeprefix("stage") for name in pairs)
            raise UserError(
                f"distill.options {option} of {method}: stage {number} of the student {student.name} has no partner "
                f"in the teacher {teacher.name}; stages are paired from the last one backwards",
                f"use one of the student's stages {had}",
            )
    return [(f"stage{number}", pairs[f"stage{number}"]) for number in numbers]


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
    """Knowledge review (Chen et al., 2021): maps, with deep features fused into shallow ones.

    The authors read the teacher before its activations, and the student after them on CIFAR and before them on
    ImageNet.
    """

    name: ClassVar[str] = "reviewkd"
    reads: ClassVar[str] = "stages (the teacher's before activation), pooled"
    weights: ClassVar[Weights] = Weights(b=5.0)
    least_samples: ClassVar[int] = 2
    warmup: ClassVar[float] = 20.0

    mid: Annotated[int, Range(0, 65536)] = 0
    """Channels in which levels are fused. 0: as many as the student's deepest level has, up to 512."""
    preact: bool = False
    """Whether the student's stages, too, are read before their activation."""

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """The common stages and the pooled vectors. Stages to be read before the activation are read after it if the
        network has no such tap."""
        return needs_of(self._levels(student, teacher))

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        levels = self._levels(student, teacher)
        deepest, _ = levels[-1]
        return _Review(levels, student, teacher, self.mid or min(MOST_MID, student.shapes[deepest][0]))

    def loss(self, inputs: LossInputs) -> Tensor:
        return sum_of(
            [hierarchical(x, _as_map(inputs.teacher_taps[name])) for name, x in inputs.helper_outputs.items()]
        )

    def _levels(self, student: NetworkInfo, teacher: NetworkInfo) -> list[Pair]:
        """The taps to compare, from shallow to deep."""
        levels = [
            (_before_activation(student, mine) if self.preact else mine, _before_activation(teacher, theirs))
            for mine, theirs in require_pairs(self.name, student, teacher)
        ]
        both_pool = "pooled" in student.shapes and "pooled" in teacher.shapes
        return [*levels, ("pooled", "pooled")] if both_pool else levels


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


def _before_activation(network: NetworkInfo, stage: str) -> str:
    return f"{stage}.pre" if f"{stage}.pre" in network.shapes else stage
