"""Contrastive representation distillation (CRD): match a sample's two embeddings among those of many other samples.

Promises: all anchors of a step use the same K negatives, so the scores are one B x K product and no B x K x dim
tensor exists. Negatives of an anchor's own class do not count for it. Everything is computed in logarithms. The
result does not depend on the number of processes. Rejects networks without a pooled vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.distillation.bank import ContrastBank
from drumline.distillation.method import LossInputs, Method, Needs, NetworkInfo, Scope, Weights, check_option
from drumline.distillation.methods.taps import Embeddings, require_pooled
from drumline.parallel.world import World


def scores(anchors: Tensor, positives: Tensor, negatives: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """v . w / tau of each anchor with its positive, (B,), and with every negative, (B, K)."""
    return (anchors * positives).sum(1) / tau, anchors @ negatives.T / tau


def log_partition(positive: Tensor, negative: Tensor, keep: Tensor, samples: int) -> Tensor:
    """log Z, one number: Z is `samples` times the mean of exp(score) over all positives and all kept negatives."""
    kept = torch.where(keep, negative, -math.inf)
    count = keep.sum() + len(positive)
    total = torch.cat([positive, kept.flatten()]).logsumexp(0)
    return total - count.to(total.dtype).log() + math.log(samples)


def nce(positive: Tensor, negative: Tensor, keep: Tensor, log_z: Tensor, samples: int) -> Tensor:
    """The noise-contrastive loss of one direction, from `scores`: the mean over anchors, one number.

    With P = exp(score) / Z, and c = m / N for an anchor with m kept negatives among N samples, the loss of an anchor
    is

        -log(P+ / (P+ + c))  -  sum over its kept negatives of log(c / (P- + c))

    P / (P + c) is the sigmoid of log P - log c, so no score overflows. For an anchor without negatives, c = 1 / N.
    """
    odds = keep.sum(1).clamp_min(1).to(positive.dtype).log() - math.log(samples) + log_z
    found = F.logsigmoid(positive - odds)
    refused = torch.where(keep, F.logsigmoid(odds[:, None] - negative), 0.0).sum(1)
    return -(found + refused).mean()


@dataclass(frozen=True)
class Crd(Method):
    """Contrastive representation distillation (Tian et al., 2020): `nce` of the student's vectors against the
    teacher's bank, plus `nce` of the teacher's vectors against the student's bank."""

    weights: ClassVar[Weights] = Weights(r=1.0, a=0.0, b=0.8)
    helper_reads_teacher: ClassVar[bool] = True
    scope: ClassVar[Scope] = "global_batch"
    mixes: ClassVar[bool] = False

    K: int = 16384
    """Negatives per step, drawn with replacement, so there may be more than samples."""
    tau: float = 0.07
    """The temperature of the scores."""
    momentum: float = 0.5
    """Weight of a bank's old row when its sample comes again."""
    dim: int = 128
    """Width of the embeddings."""

    def __post_init__(self) -> None:
        check_option("K", self.K, self.K >= 1, "1 or more", 16384)
        check_option("tau", self.tau, self.tau > 0, "above 0", 0.07)
        check_option("momentum", self.momentum, 0 <= self.momentum < 1, "in [0, 1)", 0.5)
        check_option("dim", self.dim, self.dim >= 1, "1 or more", 128)

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """The pooled vectors."""
        return require_pooled("crd", student, teacher)

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        """Two linear embeddings."""
        return Embeddings(student, teacher, self.dim)

    def memory(self, labels: Tensor, seed: int, world: World) -> ContrastBank:
        """The two banks, with one row per label."""
        return ContrastBank(labels, seed, world, dim=self.dim, draws=self.K, momentum=self.momentum)

    def loss(self, inputs: LossInputs) -> Tensor:
        """One number. Updates the banks with the batch."""
        bank = inputs.memory
        assert isinstance(bank, ContrastBank)
        # Normalised here and not in the helper: in half precision the length would be off by up to 0.4 %.
        student, teacher = (
            F.normalize(inputs.helper_outputs["student"]),
            F.normalize(inputs.helper_outputs["teacher"]),
        )
        negatives = bank.negatives()
        rows = bank.fetch(torch.cat([inputs.samples, negatives]))
        students, teachers = rows.student.to(student.dtype), rows.teacher.to(student.dtype)
        count = len(student)
        keep = bank.labels[inputs.samples][:, None] != bank.labels[negatives]
        both = (
            scores(student, teachers[:count], teachers[count:], self.tau),
            scores(teacher, students[:count], students[count:], self.tau),
        )
        with torch.no_grad():
            log_z = bank.normalisers(
                torch.stack([log_partition(*found, keep, bank.samples) for found in both])
            )
        losses = [nce(*found, keep, z, bank.samples) for found, z in zip(both, log_z, strict=True)]
        bank.update(inputs.samples, student, teacher)
        return losses[0] + losses[1]
