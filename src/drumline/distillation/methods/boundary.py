"""Methods that teach where neurons switch on: ofd (margin and partial distance) and abound (activation boundaries).

Promises: both compare pre-activation values, stage by stage, paired from the last stage backwards. A 1x1 convolution
and a BatchNorm bring the student to the teacher's channels; the larger of two maps is pooled to the size of the
smaller (in RepDistiller's variant of abound, a convolution brings the student to the teacher's size). A sample's loss
depends on no other sample. Rejects networks without pre-activation taps and, for ofd, a teacher whose BatchNorm
before the activation is not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.distillation.method import (
    LossInputs,
    Method,
    Needs,
    NetworkInfo,
    Pair,
    Taps,
    Variant,
    Weights,
    at_common_size,
    convolution_to,
    needs_of,
)

_RARE = 1e-3
"""Below this fraction of negative values, ofd's margin is three standard deviations."""


def margins(weight: Tensor, bias: Tensor) -> Tensor:
    """The expected negative value of each channel, from its BatchNorm's weight and bias (C,), in their dtype.

    With x ~ N(mu, s^2), mu = bias and s = |weight|: E[x | x < 0] = mu - s phi(mu / s) / Phi(-mu / s). Where Phi(-mu /
    s) < 0.001, negative values are too rare for a useful mean, and the margin is -3 s. A channel of weight 0 is
    constant: min(mu, 0).
    """
    mean, deviation = bias.detach().double(), weight.detach().double().abs()
    ratio = mean / deviation.clamp_min(1e-12)
    below = 0.5 * torch.erfc(ratio / math.sqrt(2))
    density = (-0.5 * ratio**2).exp() / math.sqrt(2 * math.pi)
    rare = below < _RARE
    expected = mean - deviation * density / torch.where(rare, 1.0, below)
    return torch.where(rare, -3 * deviation, expected).to(weight.dtype)


def ofd(student: Tensor, target: Tensor) -> Tensor:
    """Partial squared distance per sample, (n,), of pre-activation maps n x C x H x W:

        sum over c, h, w of  0           where s <= t <= 0
                             (s - t)^2   elsewhere

    with t = max(teacher, margin of the channel). A neuron that is off in both networks costs nothing.
    """
    return torch.where((student <= target) & (target <= 0), 0.0, (student - target) ** 2).flatten(1).sum(1)


def abound(student: Tensor, teacher: Tensor, margin: float) -> Tensor:
    """Boundary loss per sample, (n,), of pre-activation maps n x C x H x W:

        sum over c, h, w of  (s + m)^2   where t <= 0 and s > -m
                             (s - m)^2   where t > 0 and s <= m
                             0           elsewhere

    Only the side of the boundary counts, not the teacher's value. The student must pass it by m.
    """
    off = torch.where((teacher <= 0) & (student > -margin), (student + margin) ** 2, 0.0)
    on = torch.where((teacher > 0) & (student <= margin), (student - margin) ** 2, 0.0)
    return (off + on).flatten(1).sum(1)


def by_depth(losses: list[Tensor]) -> Tensor:
    """The sum over stages i = 0 .. L-1 of loss_i / 2^(L-1-i): each stage counts half as much as the next."""
    last = len(losses) - 1
    return torch.stack([loss / 2 ** (last - i) for i, loss in enumerate(losses)]).sum(0)


@dataclass(frozen=True)
class Ofd(Method):
    """Overhaul of feature distillation (Heo et al., ICCV 2019): maps before activation, above the teacher's margins.

    The loss is `by_depth` of `ofd` over the stages.
    """

    name: ClassVar[str] = "ofd"
    reads: ClassVar[str] = "stages before activation"
    weights: ClassVar[Weights] = Weights(b=1e-3)
    helper_reads_teacher: ClassVar[bool] = True

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        pairs = _pairs(self.name, student, teacher)
        for _, tap in pairs:
            _norm(teacher, tap)
        return needs_of(pairs)

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        pairs = _pairs(self.name, student, teacher)
        norms = [_norm(teacher, tap) for _, tap in pairs]
        found = [margins(norm.weight, norm.bias) for norm in norms]
        return Connectors(student, teacher, pairs, found)

    def loss(self, inputs: LossInputs) -> Tensor:
        return by_depth([ofd(student, target) for student, target in _connected(inputs.helper_outputs)])


@dataclass(frozen=True)
class Abound(Method):
    """Activation boundaries (Heo et al., AAAI 2019): which neurons are active.

    The initial phase minimises 0.003 `by_depth` of `abound` over the stages. The factor 0.003 comes from the authors'
    code and belongs to their weight of 1: the sum over a map is large.
    """

    name: ClassVar[str] = "abound"
    reads: ClassVar[str] = "stages before activation"
    weights: ClassVar[Weights] = Weights(b=1.0)
    helper_reads_teacher: ClassVar[bool] = True
    initial_epochs: ClassVar[float] = 30.0
    only_initial: ClassVar[bool] = True
    scale: ClassVar[float] = 0.003

    margin: Annotated[float, Range(above=0)] = 1.0
    """How far beyond the boundary the student must be."""
    variant: Variant = "paper"
    """`paper`: a 1x1 convolution and a BatchNorm for each stage. `repdistiller`: none where the maps of both networks
    have equal shapes, and elsewhere a convolution that also brings the student's map to the teacher's size."""

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        return needs_of(_pairs(self.name, student, teacher))

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        pairs = _pairs(self.name, student, teacher)
        return Connectors(student, teacher, pairs, fits_size=self.variant == "repdistiller")

    def loss(self, inputs: LossInputs) -> Tensor:
        losses = [
            abound(student, target, self.margin) for student, target in _connected(inputs.helper_outputs)
        ]
        return self.scale * by_depth(losses)


class Connectors(nn.Module):
    """Brings the stages of both networks to one shape: `student.0` to `student.L-1` and `target.0` to `target.L-1`.

    Student: pooled if it is larger, 1x1 convolution, BatchNorm. Target: the teacher's map, pooled if it is larger,
    then clamped from below to the channel's margin if there are margins. With `fits_size`, the student's map is not
    pooled but convolved to the teacher's shape, and passes unchanged if it has that shape. Margins are parameters
    without gradient, not buffers: buffers are averaged over the processes after each step, and a mean of equal
    numbers may round.
    """

    def __init__(
        self,
        student: NetworkInfo,
        teacher: NetworkInfo,
        pairs: list[Pair],
        margins: list[Tensor] | None = None,
        fits_size: bool = False,
    ) -> None:
        super().__init__()
        self.pairs = pairs
        shapes = [(student.shapes[s], teacher.shapes[t]) for s, t in pairs]
        fitting = [convolution_to(mine, theirs) if fits_size else None for mine, theirs in shapes]
        self.stages = nn.ModuleList(
            nn.Identity()
            if fits_size and mine == theirs
            else nn.Sequential(
                convolution or nn.Conv2d(mine[0], theirs[0], 1, bias=False), nn.BatchNorm2d(theirs[0])
            )
            for (mine, theirs), convolution in zip(shapes, fitting, strict=True)
        )
        self.pooled = [convolution is None for convolution in fitting]
        """Whether the larger of the two maps is pooled, by stage."""
        self.margins = nn.ParameterList(
            nn.Parameter(margin.clone(), requires_grad=False) for margin in margins or []
        )

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        """Both networks, stage by stage."""
        found: dict[str, Tensor] = {}
        for i, (connector, (s, t)) in enumerate(zip(self.stages, self.pairs, strict=True)):
            mine, target = student[s], teacher[t]
            if self.pooled[i]:
                mine, target = at_common_size(mine, target)
            found[f"student.{i}"] = connector(mine)
            if len(self.margins):
                target = torch.maximum(target, self.margins[i][:, None, None])
            found[f"target.{i}"] = target
        return found


def _connected(helped: Taps) -> list[tuple[Tensor, Tensor]]:
    return [(helped[f"student.{i}"], helped[f"target.{i}"]) for i in range(len(helped) // 2)]


def _pairs(method: str, student: NetworkInfo, teacher: NetworkInfo) -> list[Pair]:
    """The pre-activation taps of the common stages, first to last, paired from the last one backwards."""
    both = [[f"{stage}.pre" for stage in network.stages] for network in (student, teacher)]
    for network, taps in zip((student, teacher), both, strict=True):
        missing = [tap for tap in taps if tap not in network.shapes]
        if missing or not taps:
            raise UserError(
                f"distill.method = {method}: compares pre-activation values, and {network.name} has no "
                f"{missing[0] if missing else 'stages'}",
                "name it in distill.student_taps or distill.teacher_taps (stage1.pre=bn1,...), or use a different "
                "method",
            )
    count = min(map(len, both))
    return list(zip(both[0][-count:], both[1][-count:], strict=True))


def _norm(teacher: NetworkInfo, tap: str) -> nn.BatchNorm2d:
    norm = teacher.norms.get(tap)
    if isinstance(norm, nn.BatchNorm2d) and norm.affine and norm.num_features == teacher.shapes[tap][0]:
        return norm
    raise UserError(
        f"distill.method = ofd: reads margins from the BatchNorm directly before each activation; none is known for "
        f"{tap} of the teacher {teacher.name}",
        "use a resnet, wrn or vgg_bn teacher, or a different method (reviewkd, attention)",
    )
