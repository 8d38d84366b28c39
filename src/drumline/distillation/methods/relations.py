"""Methods that relate the samples of a batch to each other: similarity, correlation, rkd, pkt and srd.

Promises: they see the whole global batch and return the paper's value for it. Rows that are equal or zero have no
direction and get no gradient, instead of an infinite one. No tensor holds B³ numbers: rkd computes angles in blocks
of anchors, which the backward recomputes. Rejects networks without the tap that the method reads. Only correlation
and srd train a helper, to bring both networks to one width; the others compare B x B tables, so the widths may
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drumline.config.limits import Range
from drumline.distillation.method import (
    Embeddings,
    LossInputs,
    Method,
    NetworkInfo,
    Scope,
    Taps,
    Weights,
    stages_among,
    unit,
)
from drumline.distillation.methods.logits import kd

PKT_EPS = 1e-7
"""Added to both probabilities in pkt's logarithm, as in the published code."""

BLOCK = 2**21
"""The most angles in a block of rkd's anchors (8 MiB in fp32), unless `LEAST` anchors have more."""

LEAST = 8
"""The fewest anchors in a block: with fewer, a large batch would take hundreds of small steps (32 MiB at B =
1024)."""


def similarity(student: Tensor, teacher: Tensor) -> Tensor:
    """Σ (rows(S Sᵀ) − rows(T Tᵀ))² / B², where a row of S or T is one sample's map and rows() normalises each row."""
    student, teacher = student.flatten(1), teacher.flatten(1)
    difference = unit(student @ student.T) - unit(teacher @ teacher.T)
    return difference.square().mean()


def correlation(student: Tensor, teacher: Tensor) -> Tensor:
    """mean over i < B − 1 of Σ_d δ_i δ_{i+1}, with δ = |s − t| of each row; 0 for a batch of one.

    It decreases as the embeddings approach each other, so it is added to the loss.
    """
    delta = (student - teacher).abs()
    return (delta[:-1] * delta[1:]).sum() / max(len(delta) - 1, 1)


def rkd_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """mean over all B² pairs of smooth-L1(ψ_s, ψ_t); ψ is the Euclidean distance over the mean positive one."""
    return F.smooth_l1_loss(_relative_distances(student), _relative_distances(teacher))


def rkd_angle(student: Tensor, teacher: Tensor) -> Tensor:
    """mean over all B³ triples of smooth-L1(cos_s, cos_t); cos(i, j, k) = e_ij · e_kj.

    e_ij = (x_i − x_j) / |x_i − x_j|, zero for equal rows. Forward and backward need the memory of one block of
    anchors j (32 MiB instead of 288 for B = 256, width 64, fp32). The size of a block depends on B alone.
    """
    total = student.new_zeros(())
    for anchors in _blocks(len(student)):
        total = total + _recomputed(_block_angle, student, teacher, student[anchors], teacher[anchors])
    return total / len(student) ** 3


def rkd(student: Tensor, teacher: Tensor, distance: float, angle: float) -> Tensor:
    """distance · `rkd_distance` + angle · `rkd_angle`."""
    return distance * rkd_distance(student, teacher) + angle * rkd_angle(student, teacher)


def pkt(student: Tensor, teacher: Tensor) -> Tensor:
    """mean over all B² entries of t log((t + ε)/(s + ε)), ε = 1e-7.

    s and t are rows of (cos + 1)/2 between samples, each divided by its sum.
    """
    s, t = _affinity(student), _affinity(teacher)
    return (t * ((t + PKT_EPS).log() - (s + PKT_EPS).log())).mean()


@dataclass(frozen=True)
class Similarity(Method):
    """Similarity-preserving distillation (Tung and Mori, 2019): which samples of the batch have similar last maps."""

    name: ClassVar[str] = "similarity"
    reads: ClassVar[str] = "last stage"
    weights: ClassVar[Weights] = Weights(b=3000.0)
    scope: ClassVar[Scope] = "global_batch"
    least_samples: ClassVar[int] = 2

    def loss(self, inputs: LossInputs) -> Tensor:
        return similarity(_last_map(inputs.taps), _last_map(inputs.teacher_taps))


@dataclass(frozen=True)
class Correlation(Method):
    """Correlation congruence (Peng et al., 2019): the errors of two neighbouring samples are not large together.

    The only method that depends on the order of the batch. It also trains the teacher's embedding.
    """

    name: ClassVar[str] = "correlation"
    reads: ClassVar[str] = "pooled"
    weights: ClassVar[Weights] = Weights(b=0.02)
    helper_reads_teacher: ClassVar[bool] = True
    scope: ClassVar[Scope] = "global_batch"
    least_samples: ClassVar[int] = 2

    dim: Annotated[int, Range(1, 65536)] = 128
    """Width of the two embeddings."""

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        return Embeddings(student, teacher, self.dim)

    def loss(self, inputs: LossInputs) -> Tensor:
        return correlation(inputs.helper_outputs["student"], inputs.helper_outputs["teacher"])


@dataclass(frozen=True)
class Rkd(Method):
    """Relational kd (Park et al., 2019): the distances of pairs of samples and the angles of triples."""

    name: ClassVar[str] = "rkd"
    reads: ClassVar[str] = "pooled"
    weights: ClassVar[Weights] = Weights(b=1.0)
    scope: ClassVar[Scope] = "global_batch"
    least_samples: ClassVar[int] = 3

    distance: Annotated[float, Range(0)] = 25.0
    """Weight of the distances."""
    angle: Annotated[float, Range(0)] = 50.0
    """Weight of the angles."""

    def loss(self, inputs: LossInputs) -> Tensor:
        return rkd(inputs.taps["pooled"], inputs.teacher_taps["pooled"], self.distance, self.angle)


@dataclass(frozen=True)
class Pkt(Method):
    """Probabilistic knowledge transfer (Passalis and Tefas, 2018): the probability that each sample picks another as
    its neighbour, by cosine."""

    name: ClassVar[str] = "pkt"
    reads: ClassVar[str] = "pooled"
    weights: ClassVar[Weights] = Weights(b=30000.0)
    scope: ClassVar[Scope] = "global_batch"
    least_samples: ClassVar[int] = 2

    def loss(self, inputs: LossInputs) -> Tensor:
        return pkt(inputs.taps["pooled"], inputs.teacher_taps["pooled"])


def _affinity(x: Tensor) -> Tensor:
    rows = unit(x)
    # The cosine of opposite vectors can round to just below −1, and a logarithm follows.
    alike = ((rows @ rows.T + 1) / 2).clamp(min=0)
    return alike / alike.sum(1, keepdim=True)


def _relative_distances(x: Tensor) -> Tensor:
    """B x B distances divided by the mean of the positive ones; zero if all rows are equal."""
    distances = torch.cat([_recomputed(_block_distances, x, x[rows]) for rows in _blocks(len(x))])
    positive = (distances.detach() > 0).sum()
    mean = distances.sum() / positive.clamp(min=1)
    return distances / torch.where(positive > 0, mean, 1)


def _block_distances(x: Tensor, rows: Tensor) -> Tensor:
    """Distances of some rows to all rows. Computed from differences: |a|² + |b|² − 2ab has rounding noise for close
    rows, which the square root amplifies."""
    square = (x.unsqueeze(0) - rows.unsqueeze(1)).square().sum(-1)
    some = square > 0
    return torch.where(some, torch.where(some, square, 1).sqrt(), 0)


def _block_angle(student: Tensor, teacher: Tensor, anchors: Tensor, teacher_anchors: Tensor) -> Tensor:
    """The sum of smooth-L1 over the triples whose vertex is one of the anchors."""
    return F.smooth_l1_loss(_cosines(student, anchors), _cosines(teacher, teacher_anchors), reduction="sum")


def _cosines(x: Tensor, anchors: Tensor) -> Tensor:
    """The cosines of the angles at each anchor, (anchors, B, B)."""
    rays = unit(x.unsqueeze(0) - anchors.unsqueeze(1))
    return rays @ rays.mT


def _blocks(rows: int) -> Iterator[slice]:
    """Slices of the batch of at least `LEAST` rows, whose B x B tables otherwise stay within `BLOCK`."""
    size = max(LEAST, BLOCK // rows**2)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _recomputed(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Calls the function and keeps only its arguments; the backward recomputes the rest."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _last_map(taps: Taps) -> Tensor:
    return taps[stages_among(taps)[-1]]


def srd(student: Tensor, teacher: Tensor, exponent: float) -> Tensor:
    """log of the sum of |s - t|^exponent over all samples and channels of normalised vectors (n, C); one number.

    The sum is at least the smallest normal number; below it, as for equal tensors, there is no gradient.
    """
    total = ((student - teacher).abs() ** exponent).sum()
    return total.clamp_min(torch.finfo(total.dtype).tiny).log()


@dataclass(frozen=True)
class Srd(Method):
    """Role of the projector (Miles and Mikolajczyk, 2024): projected features, and kd.

    The loss is 2 `srd` of the pooled vectors plus the mean of `kd`. The student's vector is projected; both pass a
    BatchNorm without weights.
    """

    name: ClassVar[str] = "srd"
    reads: ClassVar[str] = "pooled, logits"
    weights: ClassVar[Weights] = Weights(b=1.0, T=1.0)
    helper_reads_teacher: ClassVar[bool] = True
    scope: ClassVar[Scope] = "global_batch"
    least_samples: ClassVar[int] = 2

    exponent: Annotated[float, Range(1)] = 4.0
    """Exponent of the differences."""
    T: Annotated[float, Range(0.001, 1e6)] = 1.0
    """The temperature of the kd term."""

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        return _Project(student.shapes["pooled"][0], teacher.shapes["pooled"][0])

    def loss(self, inputs: LossInputs) -> Tensor:
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
