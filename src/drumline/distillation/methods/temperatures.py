"""Methods that extend kd by temperatures: mlkd with several, ctkd with a learnt one.

Promises: the loss of the authors' code, except where a docstring names a difference. Rejects networks with different
numbers of classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.config.limits import Range
from drumline.distillation.method import LossInputs, Method, NetworkInfo, Scope, Taps, Weights
from drumline.distillation.methods.logits import kd

TEMPERATURES = (2.0, 3.0, 5.0, 6.0)
"""Those of mlkd besides its T."""


def mlkd(student: Tensor, teacher: Tensor, temperatures: Sequence[float | Tensor]) -> Tensor:
    """Σ over T of (1 + m) · mean kd + m · Σ (PₜPₜᵀ − PₛPₛᵀ)² / B + c · Σ (PₜᵀPₜ − PₛᵀPₛ)² / C; one number.

    P (B x C) are the softened probabilities. m is the fraction of samples of which the teacher is at most as sure as
    of the median sample, c that of classes with at most the median of the teacher's probability over the batch, both
    at temperature 1. The authors multiply whole losses by their masks, so only these fractions count.
    """
    sure = F.softmax(teacher, 1)
    samples, classes = _unsure(sure.amax(1)), _unsure(sure.sum(0))
    total = student.new_zeros(())
    for T in temperatures:
        p_s, p_t = F.softmax(student / T, 1), F.softmax(teacher / T, 1)
        batch_level = (p_t @ p_t.T - p_s @ p_s.T).square().sum() / len(student)
        class_level = (p_t.T @ p_t - p_s.T @ p_s).square().sum() / student.shape[1]
        total = total + (1 + samples) * kd(student, teacher, T).mean()
        total = total + samples * batch_level + classes * class_level
    return total


@dataclass(frozen=True)
class Mlkd(Method):
    """Multi-level logit distillation (Jin et al., 2023), a variant with one view: kd, relations of samples and
    relations of classes, at five temperatures.

    The authors train on two views of each image, one with weak and one with strong augmentation. This is their loss
    with the same view as both. Logit standardisation applies to all levels; its authors apply it to kd alone.
    """

    name: ClassVar[str] = "mlkd"
    weights: ClassVar[Weights] = Weights(r=0.2, b=0.9, T=4.0)
    scope: ClassVar[Scope] = "global_batch"
    on_logits: ClassVar[bool] = True

    T: Annotated[float, Range(above=0)] = 4.0
    """One of the five temperatures. The others are 2, 3, 5 and 6."""

    def loss(self, inputs: LossInputs) -> Tensor:
        return mlkd(inputs.logits, inputs.teacher_logits, (self.T, *TEMPERATURES))


@dataclass(frozen=True)
class Ctkd(Method):
    """Curriculum temperature (Li et al., 2023): kd at a temperature that is learnt against the student.

    T = t_start + t_end · sigmoid(p) with one trained number p, which starts at 1. Its gradient is reversed, so it
    makes the loss larger, and multiplied by λ = (1 − cos(π · min(epoch, loops) / loops)) / 2, epochs counted from 1.
    """

    name: ClassVar[str] = "ctkd"
    weights: ClassVar[Weights] = Weights(r=0.1, b=0.9)
    on_logits: ClassVar[bool] = True

    t_start: Annotated[float, Range(above=0)] = 1.0
    """The lower end of the temperature."""
    t_end: Annotated[float, Range(0)] = 20.0
    """The range of the temperature above `t_start`."""
    loops: Annotated[float, Range(above=0)] = 10.0
    """Epochs over which the reversed gradient grows to its full size."""

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        return _Temperature(self.t_start, self.t_end)

    def loss(self, inputs: LossInputs) -> Tensor:
        T, epoch = inputs.helper_outputs["T"], inputs.epoch
        assert epoch is not None
        strength = (1 - torch.cos(math.pi / self.loops * (epoch + 1).clamp(max=self.loops))) / 2
        return kd(inputs.logits, inputs.teacher_logits, T.detach() - strength * (T - T.detach()))


class _Temperature(nn.Module):
    """The global temperature, a tensor of one number."""

    def __init__(self, start: float, span: float) -> None:
        super().__init__()
        self.start, self.span = start, span
        self.parameter = nn.Parameter(torch.ones(1))

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        return {"T": self.start + self.span * torch.sigmoid(self.parameter)}


def _unsure(values: Tensor) -> Tensor:
    """The fraction of values that are at most the median. Sorts, because the median of torch has no deterministic
    kernel on a GPU."""
    lower = values.sort().values[(len(values) - 1) // 2]
    return (values <= lower).to(values.dtype).mean()
