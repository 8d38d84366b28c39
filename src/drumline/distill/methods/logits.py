"""Methods that compare logits: kd, dkd and dist, and the standardisation of logits that can go before them.

Promises: every logarithm of a probability is taken from the logits, so that nothing overflows or becomes NaN
in fp32, however sure a network is. Where a formula divides by a deviation of zero (all logits of a row equal,
a class that no sample of the batch is given), the value is defined and the gradient is zero.
Refuses networks with different numbers of classes, and temperatures that are not above zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from drumline.core.errors import UserError
from drumline.distill.method import Anatomy, Method, Needs, Scope, Seen, Weights

PEARSON_EPS = 1e-8
"""Added to the product of the two norms in `dist`, as its authors do: classes of tiny probability in the whole
batch count for little."""

STANDARD_EPS = 1e-7
"""Added to the deviation in `standardised`, as its authors do."""


def kd(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² KL(softmax(t/T) ‖ softmax(s/T)) of each row.

    T² keeps the size of the gradient when T changes, since softened gradients shrink as 1/T².
    """
    log_s = F.log_softmax(student / temperature, 1)
    log_t = F.log_softmax(teacher / temperature, 1)
    return temperature**2 * _kl(log_t, log_s)


def dkd(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float, alpha: float, beta: float
) -> Tensor:
    """T² (α TCKD + β NCKD) of each row, for the row's label.

    With p = softmax(z/T): TCKD is the KL of the two numbers (p_label, 1 − p_label), NCKD the KL of the other
    classes among themselves, p_i / (1 − p_label). kd is TCKD + (1 − p_label of the teacher) NCKD.

    The odds of the label, d = z_label − log Σ exp z_others, say all that TCKD needs: p_label = sigmoid(d) and
    1 − p_label = sigmoid(−d), which is never a difference from one, so it keeps its digits at 1e-30.
    """
    hot = torch.arange(student.shape[1], device=labels.device) == labels.unsqueeze(1)
    odds_s, log_s = _parted(student / temperature, hot)
    odds_t, log_t = _parted(teacher / temperature, hot)
    tckd = torch.sigmoid(odds_t) * (F.logsigmoid(odds_t) - F.logsigmoid(odds_s)) + torch.sigmoid(-odds_t) * (
        F.logsigmoid(-odds_t) - F.logsigmoid(-odds_s)
    )
    # At the label both logarithms are 0, so the label adds nothing.
    nckd = _kl(log_t, log_s)
    return temperature**2 * (alpha * tckd + beta * nckd)


def dist(student: Tensor, teacher: Tensor, temperature: float, beta: float, gamma: float) -> Tensor:
    """τ² [β (1 − ρ_row) + γ (1 − ρ_col)] over the batch, with p = softmax(z/τ).

    ρ_row is the Pearson correlation of a sample's probabilities, mean over samples; ρ_col that of a class's
    probabilities down the batch, mean over classes. ρ = Σab / (|a||b| + 1e-8) for the centred a and b; a row
    or column that does not vary correlates with nothing: ρ = 0, without gradient.
    """
    p_s, p_t = F.softmax(student / temperature, 1), F.softmax(teacher / temperature, 1)
    inter = 1 - _pearson(p_s, p_t, 1).mean()
    intra = 1 - _pearson(p_s, p_t, 0).mean()
    return temperature**2 * (beta * inter + gamma * intra)


def standardised(logits: Tensor) -> Tensor:
    """(z − mean) / (deviation + 1e-7) of each row, with the unbiased deviation.

    A student then has to match the teacher's order and spacing, not its scale. A row of equal logits becomes
    zeros and passes no gradient: the formula's slope there is 1e7, and a head that starts at zero would start
    with it.
    """
    varies = _varies(logits, 1)
    centred = torch.where(varies, logits - logits.mean(1, keepdim=True), 0)
    variance = centred.square().sum(1, keepdim=True) / max(logits.shape[1] - 1, 1)
    return centred / (torch.where(varies & (variance > 0), variance, 1).sqrt() + STANDARD_EPS)


@dataclass(frozen=True)
class Kd(Method):
    """Hinton's: the teacher's softened probabilities."""

    weights: ClassVar[Weights] = Weights(r=0.1, a=0.9, b=0.0, T=4.0)
    on_logits: ClassVar[bool] = True

    T: float = 4.0
    """Temperature of both softmaxes."""

    def __post_init__(self) -> None:
        _warm("kd", self.T)

    def needs(self, student: Anatomy, teacher: Anatomy) -> Needs:
        return _only_logits("kd", student, teacher)

    def loss(self, seen: Seen) -> Tensor:
        return kd(seen.logits, seen.teacher_logits, self.T)


@dataclass(frozen=True)
class Dkd(Method):
    """Decoupled kd: how sure the teacher is of the label, and how it sees the other classes, weighed apart.

    A mixed image has two labels, and the parting is by one: not for mixed images.
    """

    weights: ClassVar[Weights] = Weights(r=1.0, a=0.0, b=1.0, T=4.0)
    on_logits: ClassVar[bool] = True
    mixes: ClassVar[bool] = False

    T: float = 4.0
    """Temperature of both softmaxes."""
    alpha: float = 1.0
    """Weight of the label against the rest."""
    beta: float = 8.0
    """Weight of the other classes among themselves."""
    warmup: float = 20.0

    def __post_init__(self) -> None:
        _warm("dkd", self.T)

    def needs(self, student: Anatomy, teacher: Anatomy) -> Needs:
        if student.classes < 2:
            raise UserError(
                f"distill.method = dkd: compares the classes beside the label, and {student.name} has one class",
                "use distill.method = hint or another that compares features",
            )
        return _only_logits("dkd", student, teacher)

    def loss(self, seen: Seen) -> Tensor:
        return dkd(seen.logits, seen.teacher_logits, seen.labels, self.T, self.alpha, self.beta)


@dataclass(frozen=True)
class Dist(Method):
    """Correlation instead of equality: classes within a sample, and samples within a class."""

    weights: ClassVar[Weights] = Weights(r=1.0, a=0.0, b=2.0, T=1.0)
    scope: ClassVar[Scope] = "global_batch"
    on_logits: ClassVar[bool] = True

    T: float = 1.0
    """Temperature of both softmaxes."""
    beta: float = 1.0
    """Weight of the correlation within a sample."""
    gamma: float = 1.0
    """Weight of the correlation within a class, down the batch."""

    def __post_init__(self) -> None:
        _warm("dist", self.T)

    def needs(self, student: Anatomy, teacher: Anatomy) -> Needs:
        return _only_logits("dist", student, teacher)

    def loss(self, seen: Seen) -> Tensor:
        return dist(seen.logits, seen.teacher_logits, self.T, self.beta, self.gamma)


def _kl(log_t: Tensor, log_s: Tensor) -> Tensor:
    """Σ t (log t − log s) of each row, from logarithms."""
    return (log_t.exp() * (log_t - log_s)).sum(1)


def _parted(logits: Tensor, hot: Tensor) -> tuple[Tensor, Tensor]:
    """A row's log odds of its label, and the log probabilities of the others among themselves (0 at the label).

    Masks and sums, not gather: the backward of gather adds in any order on a GPU.
    """
    label = torch.where(hot, logits, 0).sum(1)
    rest = torch.logsumexp(logits.masked_fill(hot, -torch.inf), 1)
    return label - rest, torch.where(hot, 0, logits - rest.unsqueeze(1))


def _pearson(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """Pearson correlation along an axis, 0 where either side does not vary."""
    varies = (_varies(a, axis) & _varies(b, axis)).squeeze(axis)
    a, b = a - a.mean(axis, keepdim=True), b - b.mean(axis, keepdim=True)
    square_a, square_b = a.square().sum(axis), b.square().sum(axis)
    # Squares of small deviations can be zero in fp32 where the deviations are not.
    varies = varies & (square_a > 0) & (square_b > 0)
    norms = torch.where(varies, square_a, 1).sqrt() * torch.where(varies, square_b, 1).sqrt()
    return torch.where(varies, (a * b).sum(axis), 0) / (norms + PEARSON_EPS)


def _varies(x: Tensor, axis: int) -> Tensor:
    """Whether the values along an axis differ at all. Compared, since a mean of equal values can be rounded."""
    x = x.detach()
    return x.amax(axis, keepdim=True) > x.amin(axis, keepdim=True)


def _warm(method: str, temperature: float) -> None:
    if not temperature > 0:
        raise UserError(
            f"distill.method = {method}: a temperature of {temperature:g} divides nothing", "use T above 0"
        )


def _only_logits(method: str, student: Anatomy, teacher: Anatomy) -> Needs:
    if student.classes != teacher.classes:
        raise UserError(
            f"distill.method = {method}: compares logits, but {teacher.name} (teacher) has {teacher.classes} "
            f"classes and {student.name} (student) {student.classes}",
            "use a teacher of the same classes, or a method that compares features",
        )
    return Needs()
