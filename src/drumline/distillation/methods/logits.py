"""Methods that compare logits: kd, deit, dkd and dist, and the standardisation of logits that may precede them.

Promises: every log-probability is computed from the logits, so nothing overflows or becomes NaN in fp32, however
confident a network is. Where a formula divides by a deviation of zero (all logits of a row are equal, or a class's
probability is constant over the batch), the value is defined and the gradient is zero. Rejects networks with
different numbers of classes, and temperatures that are not above zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.distillation.method import (
    LossInputs,
    Method,
    Needs,
    NetworkInfo,
    Scope,
    Weights,
    require_same_classes,
)
from drumline.models.tapped import SECOND_HEAD

PEARSON_EPS = 1e-8
"""Added to the product of the two norms in `dist`, as its authors do, so that classes whose probability is tiny in
the whole batch count little."""

STANDARD_EPS = 1e-7
"""Added to the deviation in `standardised`, as its authors do."""


def kd(student: Tensor, teacher: Tensor, temperature: float | Tensor) -> Tensor:
    """T² KL(softmax(t/T) ‖ softmax(s/T)) of each row.

    The factor T² keeps the size of the gradient, because softened gradients shrink as 1/T².
    """
    log_s = F.log_softmax(student / temperature, 1)
    log_t = F.log_softmax(teacher / temperature, 1)
    return temperature**2 * _kl(log_t, log_s)


def dkd(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float, alpha: float, beta: float
) -> Tensor:
    """T² (α TCKD + β NCKD) of each row.

    With p = softmax(z/T), TCKD is the KL divergence of (p_label, 1 − p_label), and NCKD that of the other classes
    among themselves, p_i / (1 − p_label). kd is TCKD + (1 − p_label of the teacher) NCKD.

    TCKD is computed from the log-odds of the label, d = z_label − log Σ exp z_others: p_label = sigmoid(d) and
    1 − p_label = sigmoid(−d), which is not a difference from one and keeps its digits at 1e-30.
    """
    hot = torch.arange(student.shape[1], device=labels.device) == labels.unsqueeze(1)
    odds_s, log_s = _parted(student / temperature, hot)
    odds_t, log_t = _parted(teacher / temperature, hot)
    tckd = torch.sigmoid(odds_t) * (F.logsigmoid(odds_t) - F.logsigmoid(odds_s)) + torch.sigmoid(-odds_t) * (
        F.logsigmoid(-odds_t) - F.logsigmoid(-odds_s)
    )
    # Both logarithms are 0 at the label, so it contributes nothing.
    nckd = _kl(log_t, log_s)
    return temperature**2 * (alpha * tckd + beta * nckd)


def dist(student: Tensor, teacher: Tensor, temperature: float, beta: float, gamma: float) -> Tensor:
    """τ² [β (1 − ρ_row) + γ (1 − ρ_col)] over the batch, with p = softmax(z/τ).

    ρ_row is the Pearson correlation of a sample's probabilities, averaged over samples; ρ_col is that of a class's
    probabilities over the batch, averaged over classes. ρ = Σab / (|a||b| + 1e-8) for centred a and b. For a constant
    row or column, ρ = 0 without gradient.
    """
    p_s, p_t = F.softmax(student / temperature, 1), F.softmax(teacher / temperature, 1)
    inter = 1 - _pearson(p_s, p_t, 1).mean()
    intra = 1 - _pearson(p_s, p_t, 0).mean()
    return temperature**2 * (beta * inter + gamma * intra)


def standardised(logits: Tensor) -> Tensor:
    """(z − mean) / (deviation + 1e-7) of each row, with the unbiased standard deviation.

    The student then has to match the order and spacing of the teacher's logits, not their scale. A row of equal
    logits becomes zeros and gets no gradient: the slope of the formula there is 1e7, and a head that starts at zero
    would start with it.
    """
    varies = _varies(logits, 1)
    centred = torch.where(varies, logits - logits.mean(1, keepdim=True), 0)
    variance = centred.square().sum(1, keepdim=True) / max(logits.shape[1] - 1, 1)
    return centred / (torch.where(varies & (variance > 0), variance, 1).sqrt() + STANDARD_EPS)


@dataclass(frozen=True)
class Kd(Method):
    """Knowledge distillation (Hinton et al., 2015): match the teacher's softened probabilities."""

    name: ClassVar[str] = "kd"
    weights: ClassVar[Weights] = Weights(r=0.1, a=0.9, b=0.0, T=4.0)
    standardised: ClassVar[Weights | None] = Weights(r=0.1, a=9.0, b=0.0, T=2.0)
    on_logits: ClassVar[bool] = True

    T: Annotated[float, Range(0.001, 1e6)] = 4.0
    """Temperature of both softmaxes."""

    def loss(self, inputs: LossInputs) -> Tensor:
        return kd(inputs.logits, inputs.teacher_logits, self.T)


@dataclass(frozen=True)
class Deit(Method):
    """DeiT's hard distillation (Touvron et al., 2021): the class that the teacher predicts is a second label. A
    student with a distillation token learns it with that token's head, any other student with its only head."""

    name: ClassVar[str] = "deit"
    reads: ClassVar[str] = "logits, distilled"
    weights: ClassVar[Weights] = Weights(r=0.5, b=0.5)

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        require_same_classes(self.name, student, teacher)
        return Needs((SECOND_HEAD,) if SECOND_HEAD in student.shapes else ())

    def loss(self, inputs: LossInputs) -> Tensor:
        scores = inputs.taps.get(SECOND_HEAD, inputs.logits)
        return F.cross_entropy(scores, inputs.teacher_logits.argmax(1), reduction="none")


@dataclass(frozen=True)
class Dkd(Method):
    """Decoupled kd (Zhao et al., 2022): separate weights for the label and for the other classes.

    It splits the classes by the label, so it is not defined for mixed images, which have two.
    """

    name: ClassVar[str] = "dkd"
    weights: ClassVar[Weights] = Weights(b=1.0, T=4.0)
    standardised: ClassVar[Weights | None] = Weights(b=9.0, T=2.0)
    on_logits: ClassVar[bool] = True
    mixes: ClassVar[bool] = False
    warmup: ClassVar[float] = 20.0

    T: Annotated[float, Range(0.001, 1e6)] = 4.0
    """Temperature of both softmaxes."""
    alpha: Annotated[float, Range(0)] = 1.0
    """Weight of the label against all other classes."""
    beta: Annotated[float, Range(0)] = 8.0
    """Weight of the other classes among themselves."""

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        if student.classes < 2:
            raise UserError(
                f"distill.method = dkd: compares the classes other than the label, and {student.name} has one class",
                "use a method that compares features, such as hint",
            )
        return super().needs(student, teacher)

    def loss(self, inputs: LossInputs) -> Tensor:
        return dkd(inputs.logits, inputs.teacher_logits, inputs.labels, self.T, self.alpha, self.beta)


@dataclass(frozen=True)
class Dist(Method):
    """Correlation instead of equality (Huang et al., 2022): of the classes within a sample, and of the samples within
    a class."""

    name: ClassVar[str] = "dist"
    weights: ClassVar[Weights] = Weights(b=2.0, T=1.0)
    scope: ClassVar[Scope] = "global_batch"
    least_samples: ClassVar[int] = 2
    on_logits: ClassVar[bool] = True

    T: Annotated[float, Range(0.001, 1e6)] = 1.0
    """Temperature of both softmaxes."""
    beta: Annotated[float, Range(0)] = 1.0
    """Weight of the correlation within a sample."""
    gamma: Annotated[float, Range(0)] = 1.0
    """Weight of the correlation within a class, over the batch."""

    def loss(self, inputs: LossInputs) -> Tensor:
        return dist(inputs.logits, inputs.teacher_logits, self.T, self.beta, self.gamma)


def _kl(log_t: Tensor, log_s: Tensor) -> Tensor:
    """Σ t (log t − log s) of each row."""
    return (log_t.exp() * (log_t - log_s)).sum(1)


def _parted(logits: Tensor, hot: Tensor) -> tuple[Tensor, Tensor]:
    """The log-odds of each row's label, and the log-probabilities of the other classes among themselves (0 at the
    label). Uses masks and sums, because the backward of gather adds in any order on a GPU."""
    label = torch.where(hot, logits, 0).sum(1)
    rest = torch.logsumexp(logits.masked_fill(hot, -torch.inf), 1)
    return label - rest, torch.where(hot, 0, logits - rest.unsqueeze(1))


def _pearson(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """Pearson correlation along an axis; 0 where either side is constant."""
    varies = (_varies(a, axis) & _varies(b, axis)).squeeze(axis)
    a, b = a - a.mean(axis, keepdim=True), b - b.mean(axis, keepdim=True)
    square_a, square_b = a.square().sum(axis), b.square().sum(axis)
    # In fp32, the squares of small deviations can be zero.
    varies = varies & (square_a > 0) & (square_b > 0)
    norms = torch.where(varies, square_a, 1).sqrt() * torch.where(varies, square_b, 1).sqrt()
    return torch.where(varies, (a * b).sum(axis), 0) / (norms + PEARSON_EPS)


def _varies(x: Tensor, axis: int) -> Tensor:
    """Whether the values along an axis differ. Compares them, because a mean of equal values can be rounded."""
    x = x.detach()
    return x.amax(axis, keepdim=True) > x.amin(axis, keepdim=True)
