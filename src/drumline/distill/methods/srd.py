"""Simple recipe distillation: a linear projector, BatchNorm on both sides, and a soft maximum of the distance.

Promises: the distance is the logarithm of one sum over the whole global batch, so it is the same on any number of
processes only because its scope is the global batch. Refuses networks without a pooled vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.distill.method import Anatomy, Method, Needs, Scope, Seen, Taps, Weights
from drumline.distill.methods.logits import kd
from drumline.distill.methods.pooled import require_pooled


def srd(student: Tensor, teacher: Tensor, exponent: float) -> Tensor:
    """log of the sum over all samples and channels of |s - t|^exponent, of normalised vectors (n, C); one number.

    Where the sum is below the smallest normal number, as for equal tensors, it is that number's logarithm and there
    is no gradient.
    """
    total = ((student - teacher).abs() ** exponent).sum()
    return total.clamp_min(torch.finfo(total.dtype).tiny).log()


@dataclass(frozen=True)
class Srd(Method):
    """Understanding the role of the projector (Miles & Mikolajczyk, 2024): 2 `srd` of the pooled vectors, the
    student's projected, both through a BatchNorm without weights, plus the mean of `kd` of the logits."""

    weights: ClassVar[Weights] = Weights(r=1.0, a=0.0, b=1.0, T=1.0)
    helper_asks_teacher: ClassVar[bool] = True
    scope: ClassVar[Scope] = "global_batch"

    exponent: float = 4.0
    T: float = 1.0
    """The temperature of the logits' term."""

    def __post_init__(self) -> None:
        for name, value, paper in (("exponent", self.exponent, 4), ("T", self.T, 1)):
            if value <= 0:
                raise UserError(
                    f"distill.options {name} = {value:g}: must be above 0", f"the paper's is {paper}"
                )

    def needs(self, student: Anatomy, teacher: Anatomy) -> Needs:
        """The pooled vectors."""
        return require_pooled("srd", student, teacher)

    def helper(self, student: Anatomy, teacher: Anatomy) -> nn.Module:
        """The projector and both BatchNorms."""
        return _Project(student.shapes["pooled"][0], teacher.shapes["pooled"][0])

    def loss(self, seen: Seen) -> Tensor:
        """One number."""
        distance = srd(seen.helped["student"], seen.helped["teacher"], self.exponent)
        return 2 * distance + kd(seen.logits, seen.teacher_logits, self.T).mean()


class _Project(nn.Module):
    """No bias: the BatchNorm takes any constant off again. The BatchNorms have no weights, as a learnt one would
    let the student shrink the distance by scaling."""

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
