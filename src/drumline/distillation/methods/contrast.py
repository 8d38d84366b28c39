"""Contrastive representation distillation (CRD): match a sample's two embeddings among those of many other samples.

Promises: all anchors of a step use the same K negatives, so the scores are one B x K product and no B x K x dim
tensor exists. Negatives of an anchor's own class do not count for it. Everything is computed in logarithms. The
result does not depend on the number of processes. Rejects networks without a pooled vector.

The memory is one embedding per sample and network, sharded over the processes: rank i mod size holds sample i, and
nothing is stored twice. A read is a sum over the processes to which only the owner contributes, so it is exact and
has the same bits on any number of processes. The initial rows are a pure function of seed and sample id, the
negatives of seed, step and slot, so only the rows and the two normalisers have to be saved. Nothing waits for the
device, and no shape depends on data, so a step can be captured as a CUDA graph. If a sample occurs several times in a
global batch, as class-balanced sampling may draw it, its rows take the vectors of its last occurrence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.config.limits import Range
from drumline.data.feed.draws import Purpose, uniform
from drumline.distillation.method import (
    Embeddings,
    LossInputs,
    Method,
    NetworkInfo,
    Scope,
    Weights,
)
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
    noise = torch.where(keep, F.logsigmoid(odds[:, None] - negative), 0.0).sum(1)
    return -(found + noise).mean()


@dataclass(frozen=True)
class Crd(Method):
    """Contrastive representation distillation (Tian et al., 2020): a sample's two embeddings against many negatives.

    The loss is `nce` of the student's vectors against the teacher's bank, plus `nce` of the teacher's vectors against
    the student's bank.
    """

    name: ClassVar[str] = "crd"
    reads: ClassVar[str] = "pooled"
    weights: ClassVar[Weights] = Weights(b=0.8)
    helper_reads_teacher: ClassVar[bool] = True
    scope: ClassVar[Scope] = "global_batch"
    mixes: ClassVar[bool] = False

    K: Annotated[int, Range(1, 2**24)] = 16384
    """Negatives per step, drawn with replacement, so there may be more than samples."""
    tau: Annotated[float, Range(above=0)] = 0.07
    """The temperature of the scores."""
    momentum: Annotated[float, Range(0, below=1)] = 0.5
    """Weight of a bank's old row when its sample comes again."""
    dim: Annotated[int, Range(1, 65536)] = 128
    """Width of the embeddings."""

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
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


_CHUNK = 8192
"""Rows that are initialised or collected at a time."""
_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


class BankRows(NamedTuple):
    """The embeddings of some samples, (n, dim) each."""

    student: Tensor
    teacher: Tensor


class ContrastBank:
    """Two banks of N x dim, one per network, and the normalisers of both directions."""

    def __init__(
        self, labels: Tensor, seed: int, world: World, *, dim: int, draws: int, momentum: float
    ) -> None:
        self.labels = labels
        """One per sample id."""
        self.samples = len(labels)
        self.log_z = torch.full((2,), -math.inf, device=labels.device)
        """log Z with the student's and with the teacher's vectors as anchors; -inf before the first step."""
        self._world, self._dim, self._momentum = world, dim, momentum
        self._key = _signed(_mixed_word((seed + _GOLDEN) % _WORD))
        self._step = torch.zeros((), dtype=torch.int64, device=labels.device)
        self._slots = torch.arange(1, draws + 1, device=labels.device) * _signed(_GOLDEN)
        owned = np.arange(world.rank, self.samples, world.size)
        # The spare row at the end takes the reads and writes of samples that other ranks hold.
        self._spare = len(owned)
        self._rows = torch.zeros(self._spare + 1, 2, dim, device=labels.device)
        for start in range(0, self._spare, _CHUNK):
            ids = owned[start : start + _CHUNK]
            self._rows[start : start + len(ids)] = torch.from_numpy(first_rows(seed, ids, dim))

    def negatives(self) -> Tensor:
        """The sample ids of the step's negatives, (draws,), with replacement: a hash of (seed, step, slot) modulo
        N."""
        key = _mixed(self._step * _signed(_GOLDEN) + self._key)
        return (_mixed(key + self._slots) & (2**63 - 1)) % self.samples

    @torch.no_grad()
    def fetch(self, ids: Tensor) -> BankRows:
        """The rows of these samples, on every process. A collective: all processes pass the same ids."""
        mine, index = self._find(ids)
        # + 0.0 removes negative zeros, which a sum over several processes does not have either.
        rows = torch.where(mine[:, None, None], self._rows[index], 0.0) + 0.0
        return BankRows(*self._world.all_reduce(rows).unbind(1))

    @torch.no_grad()
    def update(self, ids: Tensor, student: Tensor, teacher: Tensor) -> None:
        """Sets each sample's rows to normalize(momentum row + (1 - momentum) new), from (n, dim) unit vectors.

        Skips vectors that are not finite: their rows would never recover.
        """
        _, index = self._find(ids)
        # All occurrences of a sample write the same values, so the order in which a device writes them is irrelevant.
        ordered, order = ids.sort(stable=True)
        last = order[torch.searchsorted(ordered, ids, right=True) - 1]
        new = torch.stack([student, teacher], 1).to(self._rows.dtype)[last]
        old = self._rows[index]
        moved = F.normalize(self._momentum * old + (1 - self._momentum) * new, dim=2)
        self._rows.index_copy_(0, index, torch.where(new.isfinite().all(2, keepdim=True), moved, old))

    @torch.no_grad()
    def normalisers(self, fresh: Tensor) -> Tensor:
        """log Z of both directions, (2,). The first finite `fresh` is kept for the rest of the run."""
        found = torch.where(self.log_z.isneginf(), fresh.to(self.log_z.dtype), self.log_z)
        self.log_z.copy_(torch.where(found.isfinite(), found, self.log_z))
        return found

    def at(self, step: int) -> None:
        """Sets the step, which determines the next negatives."""
        self._step.fill_(step)

    def live(self) -> list[Tensor]:
        """The rows of this process and the normalisers."""
        return [self._rows, self.log_z]

    def collect(self) -> dict[str, Tensor]:
        """On rank 0, both banks, ordered by sample id, and the normalisers, on the host. Elsewhere nothing: every
        process of a machine would hold a copy."""
        kept = self.samples if self._world.is_rank_zero else 0
        student, teacher = (torch.empty(kept, self._dim) for _ in range(2))
        for start in range(0, self.samples, _CHUNK):
            ids = torch.arange(start, min(start + _CHUNK, self.samples), device=self.labels.device)
            rows = self.fetch(ids)
            if kept:
                student[start : start + len(ids)] = rows.student
                teacher[start : start + len(ids)] = rows.teacher
        return {"student": student, "teacher": teacher, "log_z": self.log_z.cpu().clone()} if kept else {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Loads this process's rows of both banks, and the normalisers."""
        shapes = {name: tuple(state[name].shape) for name in self.shapes()}
        assert shapes == self.shapes(), shapes
        owned = slice(self._world.rank, None, self._world.size)
        for network, name in enumerate(BankRows._fields):
            self._rows[: self._spare, network] = state[name][owned].to(self._rows)
        self.log_z.copy_(state["log_z"])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that `collect` returns."""
        bank = (self.samples, self._dim)
        return {"student": bank, "teacher": bank, "log_z": (2,)}

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Whether this rank holds each sample, and the sample's row (the spare row if it does not)."""
        mine = ids % self._world.size == self._world.rank
        return mine, torch.where(mine, ids // self._world.size, self._spare)


def first_rows(seed: int, ids: np.ndarray, dim: int) -> np.ndarray:
    """Initial rows, (n, 2, dim): uniform within +-1 / sqrt(dim / 3), so their length is about 1."""
    drawn = uniform(seed, 0, ids, Purpose.BANK, 2 * dim).reshape(len(ids), 2, dim)
    return ((2 * drawn - 1) / math.sqrt(dim / 3)).astype(np.float32)


def _mixed(words: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele et al., 2014) on 64-bit words in int64, whose products wrap around."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        # int64 shifts in the sign bit; the mask makes it an unsigned shift.
        words = (words ^ ((words >> shift) & (2 ** (64 - shift) - 1))) * _signed(multiplier)
    return words


def _mixed_word(word: int) -> int:
    """The same on a Python integer."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        word = (word ^ word >> shift) * multiplier % _WORD
    return word


def _signed(word: int) -> int:
    """A 64-bit word as int64."""
    return word - _WORD if word >= _WORD // 2 else word
