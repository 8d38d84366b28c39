"""Methods that compare feature maps position by position: hint (FitNet), attention transfer and VID.

Promises: a sample's loss depends on that sample alone; the batch loss of the papers is the mean over samples. Stages
are paired from the last one backwards, and the larger of two maps is averaged down to the smaller. Rejects networks
without stages to pair, and stage numbers without a partner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, Method, Needs, NetworkInfo, Taps, Weights
from drumline.distillation.methods.taps import (
    Pair,
    at_common_size,
    common_grid,
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
    """FitNet: one map of the student, after a 1×1 convolution, matches the teacher's."""

    weights: ClassVar[Weights] = Weights(b=100.0)

    layer: int = 2
    """The student's stage, counted from 1. The teacher's stage is the one at the same distance from the end."""

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """One stage of each network. Rejects a `layer` that either network lacks."""
        mine, theirs = self._pair(student, teacher)
        return Needs((mine,), (theirs,))

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        """The regressor."""
        return _Regressor(self._pair(student, teacher), student, teacher)

    def loss(self, inputs: LossInputs) -> Tensor:
        """`hint` of the regressed map."""
        ((name, regressed),) = inputs.helper_outputs.items()
        return hint(regressed, inputs.teacher_taps[name])

    def _pair(self, student: NetworkInfo, teacher: NetworkInfo) -> Pair:
        return _chosen("hint", "layer", [self.layer], student, teacher)[0]


@dataclass(frozen=True)
class Attention(Method):
    """Attention transfer: the student's activations are strong at the same positions as the teacher's."""

    weights: ClassVar[Weights] = Weights(b=1000.0)

    layers: str = ""
    """The student's stages, counted from 1, such as `3+4`. Empty: all stages that both networks have."""

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """The stages of `layers` and their partners. Rejects numbers that either network lacks."""
        if self.layers.strip():
            return needs_of(_chosen("attention", "layers", self._numbers(), student, teacher))
        return needs_of(require_pairs("attention", student, teacher))

    def loss(self, inputs: LossInputs) -> Tensor:
        """Sum of `attention` over the stages."""
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
    """Variational information distillation: the student's maps predict the teacher's as a Gaussian."""

    weights: ClassVar[Weights] = Weights(b=1.0)

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """All common stages."""
        return needs_of(require_pairs("vid", student, teacher))

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        """One predictor of mean and variance per stage."""
        return _Predictors(require_pairs("vid", student, teacher), student, teacher)

    def loss(self, inputs: LossInputs) -> Tensor:
        """Sum of `vid` over the stages."""
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
    """Maps the student's tap to the teacher's channels at the common size. The output has the teacher's tap name."""

    def __init__(self, pair: Pair, student: NetworkInfo, teacher: NetworkInfo) -> None:
        super().__init__()
        self.mine, self.theirs = pair
        self.conv = nn.Conv2d(student.shapes[self.mine][0], teacher.shapes[self.theirs][0], 1)
        self.grid = common_grid(student.shapes[self.mine], teacher.shapes[self.theirs])

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        # Averaging and a 1×1 convolution commute, so the convolution gets the smaller map.
        return {self.theirs: self.conv(pool_to(student[self.mine], self.grid))}


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
