"""Contrastive representation distillation (CRD): tell a sample's other view from those of many other samples.

Promises: one set of K negatives a step, shared by all anchors, so that scores are one B x K product and never a
B x K x dim tensor; negatives of an anchor's own class do not count for it; everything is computed in logarithms.
The result is the same on any number of processes. Refuses networks without a pooled vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.core.errors import UserError
from drumline.distill.bank import STUDENT, TEACHER, ContrastBank
from drumline.distill.method import Anatomy, Method, Needs, Scope, Seen, Weights
from drumline.distill.methods.pooled import Embeddings, require_pooled
from drumline.parallel.world import World


def scores(anchors: Tensor, positives: Tensor, negatives: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """v . w / tau of each anchor with its own positive, (B,), and with every negative, (B, K)."""
    return (anchors * positives).sum(1) / tau, anchors @ negatives.T / tau


def log_partition(positive: Tensor, negative: Tensor, keep: Tensor, samples: int) -> Tensor:
    """log Z, where Z = `samples` x the mean of exp(score) over all positives and all kept negatives; one number."""
    kept = torch.where(keep, negative, -math.inf)
    count = keep.sum() + len(positive)
    total = torch.cat([positive, kept.flatten()]).logsumexp(0)
    return total - count.to(total.dtype).log() + math.log(samples)


def nce(positive: Tensor, negative: Tensor, keep: Tensor, log_z: Tensor, samples: int) -> Tensor:
    """Noise-contrastive loss of one direction, from `scores`; the mean over anchors, one number.

    With P = exp(score) / Z, and c = m / N for an anchor with m kept negatives (B, K) among N samples, an anchor costs

        -log(P+ / (P+ + c))  -  sum over its kept negatives of log(c / (P- + c))

    As P / (P + c) is the sigmoid of log P - log c, neither large nor small scores overflow. An anchor without any
    negative counts as if it had one, with c = 1 / N.
    """
    odds = keep.sum(1).clamp_min(1).to(positive.dtype).log() - math.log(samples) + log_z
    found = F.logsigmoid(positive - odds)
    refused = torch.where(keep, F.logsigmoid(odds[:, None] - negative), 0.0).sum(1)
    return -(found + refused).mean()


@dataclass(frozen=True)
class Crd(Method):
    """Contrastive representation distillation (Tian et al., 2020): `nce` with the student's vectors as anchors among
    the bank of the teacher's, plus `nce` with the teacher's among the bank of the student's."""

    weights: ClassVar[Weights] = Weights(r=1.0, a=0.0, b=0.8)
    helper_asks_teacher: ClassVar[bool] = True
    scope: ClassVar[Scope] = "global_batch"
    mixes: ClassVar[bool] = False

    K: int = 16384
    """Negatives of a step. Drawn with replacement, so there may be more of them than samples."""
    tau: float = 0.07
    """Temperature of the scores."""
    momentum: float = 0.5
    """How much of a bank's row stays when its sample is seen again."""
    dim: int = 128
    """Length of an embedding."""

    def __post_init__(self) -> None:
        for name, right, rule, paper in (
            ("K", self.K >= 1, "must be 1 or more", 16384),
            ("tau", self.tau > 0, "must be above 0", 0.07),
            ("momentum", 0 <= self.momentum < 1, "must be in [0, 1)", 0.5),
            ("dim", self.dim >= 1, "must be 1 or more", 128),
        ):
            if not right:
                raise UserError(
                    f"distill.options {name} = {getattr(self, name):g}: {rule}", f"the paper's is {paper}"
                )

    def needs(self, student: Anatomy, teacher: Anatomy) -> Needs:
        """The pooled vectors."""
        return require_pooled("crd", student, teacher)

    def helper(self, student: Anatomy, teacher: Anatomy) -> nn.Module:
        """Two linear embeddings."""
        return Embeddings(student, teacher, self.dim)

    def memory(self, labels: Tensor, seed: int, world: World) -> ContrastBank:
        """The two banks, one row in each for each of the labels."""
        return ContrastBank(labels, seed, world, dim=self.dim, draws=self.K, momentum=self.momentum)

    def loss(self, seen: Seen) -> Tensor:
        """One number. Afterwards the bank has taken in the batch."""
        bank = seen.memory
        assert isinstance(bank, ContrastBank)
        # Scaled to length 1 here and not in the helper: in half precision the length would be off by up to 0.4 %.
        student, teacher = F.normalize(seen.helped["student"]), F.normalize(seen.helped["teacher"])
        negatives = bank.negatives()
        rows = bank.fetch(torch.cat([seen.samples, negatives])).to(student.dtype)
        positive, negative = rows[: len(student)], rows[len(student) :]
        keep = bank.labels[seen.samples][:, None] != bank.labels[negatives]
        both = (
            scores(student, positive[:, TEACHER], negative[:, TEACHER], self.tau),
            scores(teacher, positive[:, STUDENT], negative[:, STUDENT], self.tau),
        )
        with torch.no_grad():
            log_z = bank.settle(torch.stack([log_partition(*found, keep, bank.samples) for found in both]))
        losses = [nce(*found, keep, z, bank.samples) for found, z in zip(both, log_z, strict=True)]
        bank.update(seen.samples, student, teacher)
        return losses[0] + losses[1]
