"""CRD's memory: one embedding of each sample by each network, spread over the processes.

Promises: sample i lives on rank i mod size, so a process holds its share and nothing is kept twice; what is read is
a sum over the processes to which only the owner adds, so it is exact and the same bits on any number of them. First
rows and negatives are pure functions of the seed and, for one, the sample id, for the other, the step and the slot:
nothing but the rows and the two normalisers has to be saved. Nothing here waits for the device or has a shape that
depends on data, so a step can be recorded as a CUDA graph. A sample may come only once in a global batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drumline.data.feed.draws import Purpose, uniform
from drumline.parallel.world import World

STUDENT, TEACHER = 0, 1
"""Where the two networks' rows lie in what `fetch` gives."""
_CHUNK = 8192
"""Rows made or collected at a time."""
_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


class ContrastBank:
    """Two banks of N x dim, the student's and the teacher's, and the normalisers of both directions."""

    def __init__(
        self, labels: Tensor, seed: int, world: World, *, dim: int, draws: int, momentum: float
    ) -> None:
        self.labels = labels
        """Of all samples, by sample id."""
        self.samples = len(labels)
        self.log_z = torch.full((2,), -math.inf, device=labels.device)
        """log Z with the student's vectors as anchors, and with the teacher's; -inf before the first step."""
        self._world, self._dim, self._momentum = world, dim, momentum
        self._key = _signed(_mixed_word((seed + _GOLDEN) % _WORD))
        self._step = torch.zeros((), dtype=torch.int64, device=labels.device)
        self._slots = torch.arange(1, draws + 1, device=labels.device) * _signed(_GOLDEN)
        owned = np.arange(world.rank, self.samples, world.size)
        # One spare row at the end takes the writes, and gives the reads, of samples that live elsewhere.
        self._spare = len(owned)
        self._rows = torch.zeros(self._spare + 1, 2, dim, device=labels.device)
        for start in range(0, self._spare, _CHUNK):
            ids = owned[start : start + _CHUNK]
            self._rows[start : start + len(ids)] = torch.from_numpy(first_rows(seed, ids, dim))

    def negatives(self) -> Tensor:
        """The step's sample ids, (draws,), with replacement: a hash of (seed, step, slot), modulo N."""
        key = _mixed(self._step * _signed(_GOLDEN) + self._key)
        return (_mixed(key + self._slots) & (2**63 - 1)) % self.samples

    @torch.no_grad()
    def fetch(self, ids: Tensor) -> Tensor:
        """The rows of these samples, (n, 2, dim), on every process. All processes call it, with the same ids."""
        mine, index = self._find(ids)
        # + 0.0: a sum over several processes has no negative zeros, so one process must not have them either.
        rows = torch.where(mine[:, None, None], self._rows[index], 0.0) + 0.0
        return self._world.all_reduce(rows)

    @torch.no_grad()
    def update(self, ids: Tensor, student: Tensor, teacher: Tensor) -> None:
        """Each sample's rows become unit(momentum row + (1 - momentum) new), from (n, dim) vectors of length 1.

        A vector that is not finite is left out: its row would stay so for ever.
        """
        _, index = self._find(ids)
        new = torch.stack([student, teacher], 1).to(self._rows.dtype)
        old = self._rows[index]
        moved = F.normalize(self._momentum * old + (1 - self._momentum) * new, dim=2)
        self._rows.index_copy_(0, index, torch.where(new.isfinite().all(2, keepdim=True), moved, old))

    @torch.no_grad()
    def settle(self, fresh: Tensor) -> Tensor:
        """The normalisers, (2,): `fresh` the first time that it is finite, and the same for ever after."""
        found = torch.where(self.log_z.isneginf(), fresh.to(self.log_z.dtype), self.log_z)
        self.log_z.copy_(torch.where(found.isfinite(), found, self.log_z))
        return found

    def at(self, step: int) -> None:
        """The step whose negatives come next."""
        self._step.fill_(step)

    def live(self) -> list[Tensor]:
        """The rows of this process, and the normalisers."""
        return [self._rows, self.log_z]

    def collect(self) -> dict[str, Tensor]:
        """Both banks in the order of sample ids, and the normalisers, on the host."""
        student, teacher = (torch.empty(self.samples, self._dim) for _ in range(2))
        for start in range(0, self.samples, _CHUNK):
            ids = torch.arange(start, min(start + _CHUNK, self.samples), device=self.labels.device)
            rows = self.fetch(ids)
            student[start : start + len(ids)] = rows[:, STUDENT]
            teacher[start : start + len(ids)] = rows[:, TEACHER]
        return {"student": student, "teacher": teacher, "log_z": self.log_z.cpu().clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes this process's rows of both banks, and the normalisers."""
        shapes = {name: tuple(state[name].shape) for name in self.shapes()}
        assert shapes == self.shapes(), shapes
        owned = slice(self._world.rank, None, self._world.size)
        self._rows[: self._spare, STUDENT] = state["student"][owned].to(self._rows)
        self._rows[: self._spare, TEACHER] = state["teacher"][owned].to(self._rows)
        self.log_z.copy_(state["log_z"])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what `collect` gives."""
        bank = (self.samples, self._dim)
        return {"student": bank, "teacher": bank, "log_z": (2,)}

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each sample lives here, and its row: the spare one if it does not."""
        mine = ids % self._world.size == self._world.rank
        return mine, torch.where(mine, ids // self._world.size, self._spare)


def first_rows(seed: int, ids: np.ndarray, dim: int) -> np.ndarray:
    """Rows before their sample was seen, (n, 2, dim): uniform within +-1 / sqrt(dim / 3), so of length about 1."""
    drawn = uniform(seed, 0, ids, Purpose.BANK, 2 * dim).reshape(len(ids), 2, dim)
    return ((2 * drawn - 1) / math.sqrt(dim / 3)).astype(np.float32)


def _mixed(words: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele et al., 2014) on 64-bit words held in int64, whose products wrap around."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        # int64 shifts in its sign; the mask makes it the shift of an unsigned word.
        words = (words ^ ((words >> shift) & (2 ** (64 - shift) - 1))) * _signed(multiplier)
    return words


def _mixed_word(word: int) -> int:
    """The same on a Python integer."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        word = (word ^ word >> shift) * multiplier % _WORD
    return word


def _signed(word: int) -> int:
    """A 64-bit word as int64 reads it."""
    return word - _WORD if word >= _WORD // 2 else word
