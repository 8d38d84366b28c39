"""Simple recipe distillation: a linear projector, BatchNorm on both sides, and a soft maximum of the distance.

Promises: the distance is the logarithm of one sum over the global batch, so it does not depend on the number of
processes. Rejects networks without a pooled vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from drumline.distillation.method import (
    LossInputs,
    Method,
    Needs,
    NetworkInfo,
    Scope,
    Taps,
    Weights,
    check_option,
)
from drumline.distillation.methods.logits import check_temperature, kd
from drumline.distillation.methods.taps import require_pooled


def srd(student: Tensor, teacher: Tensor, exponent: float) -> Tensor:
    """log of the sum of |s - t|^exponent over all samples and channels of normalised vectors (n, C); one number.

    The sum is at least the smallest normal number; below it, as for equal tensors, there is no gradient.
    """
    total = ((student - teacher).abs() ** exponent).sum()
    return total.clamp_min(torch.finfo(total.dtype).tiny).log()


@dataclass(frozen=True)
class Srd(Method):
    """Understanding the role of the projector (Miles & Mikolajczyk, 2024): 2 `srd` of the pooled vectors, plus the
    mean of `kd`. The student's vector is projected; both pass a BatchNorm without weights."""

    weights: ClassVar[Weights] = Weights(r=1.0, a=0.0, b=1.0, T=1.0)
    helper_reads_teacher: ClassVar[bool] = True
    scope: ClassVar[Scope] = "global_batch"

    exponent: float = 4.0
    T: float = 1.0
    """The temperature of the kd term."""

    def __post_init__(self) -> None:
        check_option("exponent", self.exponent, self.exponent > 0, "above 0", 4)
        check_temperature(self.T)

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """The pooled vectors."""
        return require_pooled("srd", student, teacher)

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        """The projector and the two BatchNorms."""
        return _Project(student.shapes["pooled"][0], teacher.shapes["pooled"][0])

    def loss(self, inputs: LossInputs) -> Tensor:
        """One number."""
        distance = srd(inputs.helper_outputs["student"], inputs.helper_outputs["teacher"], self.exponent)
        return 2 * distance + kd(inputs.logits, inputs.teacher_logits, self.T).mean()


class _Project(nn.Module):
    """The projector has no bias, because the BatchNorm removes any constant. The BatchNorms have no weights: with a
    learnt weight, the student could shrink the distance by scaling."""

    def __init__(self, student: int, teacher: int) -> None:
        super().__init__()
        self.project = nn.Linear(student, teacher, bias=False)
        self.student_norm = nn.BatchNorm1d(teacher, eps=1e-4, affine=False)
        self.teacher_norm = nn.BatchNorm1d(teacher, eps=1e-4, affine=False)

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        return {
            "student": self.student_norm(self.project(student["pooled"])),
            "teacher": self.teacher_norm(teacher["pooled"]),
        }
