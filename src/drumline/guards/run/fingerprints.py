"""The fingerprint monitor: takes fingerprints of a run after chosen steps, compares the ranks, and records the chain.

Promises: taking them costs two small kernels per tensor and never waits. They are compared one step later (at once
after the first steps and before a save), on all ranks at the same step. A difference is named by tensor, group and
rank; the majority is right. What is recorded depends on the step and the recipe alone: fingerprints beyond the plan
(after a resume, at a save on request) are compared and not recorded.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.core.host_copy import HostCopy
from drumline.guards.checks.data import repeated_ids
from drumline.guards.checks.drift import drifted
from drumline.guards.finding import Finding, rank_names
from drumline.guards.run.nonfinite import NonFiniteGate
from drumline.parallel.sharded import is_sharded, local_shard, shard_span
from drumline.parallel.world import World
from drumline.state.chain import GROUPS, record_text
from drumline.state.fingerprint import fingerprint, fingerprints_of, first_difference

Key = tuple[str, str]
"""The group and name of a tensor."""
Named = dict[Key, torch.Tensor]

_FIX = {
    "gradient": "call the wrapped model in every forward, on all ranks; check for hooks that change them on some",
    "buffer": "check for code that writes a buffer on some ranks only, or a buffer that counts a rank's own samples",
    "parameter": "check for code that changes weights on some ranks only, or calls the model around its DDP wrapper",
    "optimizer": "check for code that changes the optimizer's state on some ranks only",
    "average": "check for code that changes the averaged weights on some ranks only",
    "scaler": "check for code that changes the loss scale on some ranks only",
}


class ChainLog(Protocol):
    """Where the chain of fingerprints is recorded."""

    chain: str
    """The value that the next record follows."""

    def record(self, text: str, chain: str) -> None:
        """Appends a record, which ends with a chain value."""


@dataclass(frozen=True)
class Result:
    """The result of a comparison. The same on every rank."""

    step: int
    findings: tuple[Finding, ...]
    nonfinite_step: int
    """The step whose gradients were not finite; 0 if all were."""
    own_findings: bool
    """Whether a rank has findings of its own to report."""
    moved: tuple[Key, ...] = ()
    """The watched tensors that have changed since the last comparison."""
    since: str = ""


@dataclass(frozen=True)
class _Taken:
    step: int
    order: list[Key]
    sharded: list[int]
    """Indices in `order` of the tensors of which this process holds a shard."""
    samples: int
    record: str
    own_findings: int
    values: HostCopy


class FingerprintMonitor:
    """Fingerprints of one run on one rank. `tensors` returns what they are taken of."""

    def __init__(
        self,
        tensors: Callable[[], Named],
        world: World,
        log: ChainLog,
        gate: NonFiniteGate | None = None,
        replica_size: int = 1,
        drawn_at: Callable[[int], NDArray[np.int64]] | None = None,
    ) -> None:
        """`replica_size` is the number of processes that hold one copy of the model together. Rank r is compared with
        the ranks that are equal to it modulo `replica_size`. `drawn_at` returns the sample ids of a step's batch, or
        none if no sample may occur twice in it."""
        self.tensors, self.world, self.log, self.gate = tensors, world, log, gate
        self.replica_size, self._drawn_at = replica_size, drawn_at
        self._orders: tuple[list[int], list[list[Key]]] = ([], [])
        self.agreed = 0
        """The last step after which all ranks agreed."""
        self.watched: frozenset[Key] = frozenset()
        """Tensors that must not change."""
        self._seen: dict[Key, int] = {}
        self.last = -1
        """The last step whose fingerprints were taken."""
        self._taken: _Taken | None = None

    @property
    def pending(self) -> bool:
        """Whether fingerprints were taken and not compared. The same on every rank."""
        return self._taken is not None

    def take(self, step: int, samples: torch.Tensor, record: str = "", own_findings: int = 0) -> None:
        """Takes fingerprints after `step` steps, the last of them on these sample ids. `record` is `full`, `short`,
        or empty for a comparison alone; `own_findings` is the number of findings that this rank has itself."""
        assert self._taken is None, "the last fingerprints have not been compared"
        named = self.tensors()
        held = [key for key, tensor in named.items() if not tensor.is_meta]  # meta tensors have no values
        order = sorted(held, key=lambda key: (GROUPS.index(key[0]), key[1]))
        values = fingerprints_of(
            [local_shard(named[key]) for key in order], [shard_span(named[key]) for key in order]
        )
        sharded = [index for index, key in enumerate(order) if is_sharded(named[key])]
        tally = self.gate.tally if self.gate is not None else values.new_zeros(3)
        # Stages of one process may be on GPUs besides its own.
        home = self.world.device
        copy = HostCopy(torch.cat([each.to(home, torch.int64) for each in (tally, values, samples)]))
        self._taken = _Taken(step, order, sharded, len(samples), record, own_findings, copy)
        self.last = step

    def compare(self) -> Result:
        """Compares the fingerprints that were taken last on all ranks, and records them. All ranks call it."""
        taken, self._taken = self._taken, None
        assert taken is not None
        tally, values, samples = taken.values.values().split([3, len(taken.order), taken.samples])
        names = "\n".join(f"{group} {name}" for group, name in taken.order)
        head = [*tally.tolist(), taken.samples, len(taken.order), zlib.crc32(names.encode())]
        heads = self.world.all_gather_integers(torch.tensor([*head, taken.own_findings]))
        nonfinite = max(self._nonfinite_step(taken.step, row[:3]) for row in heads)
        own_findings = bool(heads[:, 6].any())
        different = self._different_names(heads, taken)
        if different is not None:
            return Result(taken.step, (different,), nonfinite, own_findings)
        ids = self._gather(samples, heads[:, 3].tolist())
        ranks = _summed_shards(self._gather(values, heads[:, 4].tolist()), taken.sharded)
        orders = self._orders_of(taken, heads)
        since, moved = self._since(taken.step), self._moved(orders, ranks)
        drifts = [self._drift(member, orders, ranks, taken.step) for member in range(self.replica_size)]
        planned = torch.from_numpy(self._drawn_at(taken.step - 1).copy()) if self._drawn_at else None
        repeats = repeated_ids(ids, taken.step, planned)
        found = [each for each in (repeats, *drifts) if each is not None]
        if not any(drifts):
            self.agreed = taken.step
        stopped = nonfinite and self.gate is not None and not self.gate.once
        if taken.record and not stopped:
            self._record(taken, orders, ranks, torch.cat(ids))
        return Result(taken.step, tuple(found), nonfinite, own_findings, moved, since)

    def _moved(self, orders: list[list[Key]], ranks: list[torch.Tensor]) -> tuple[Key, ...]:
        """The watched tensors whose fingerprints differ from the last ones. The first replica holds all of them."""
        moved = []
        for order, numbers in zip(orders, ranks, strict=False) if self.watched else ():
            for key, number in zip(order, numbers.tolist(), strict=True):
                if key in self.watched:
                    if self._seen.get(key, number) != number:
                        moved.append(key)
                    self._seen[key] = number
        return tuple(moved)

    def _orders_of(self, taken: _Taken, heads: torch.Tensor) -> list[list[Key]]:
        """The tensors of each process of a replica. Gathered again if names have changed."""
        if self.replica_size == 1:
            return [taken.order]
        now = heads[:, 4:6].flatten().tolist()
        if now != self._orders[0]:
            self._orders = now, self.world.all_gather_object(taken.order)[: self.replica_size]
        return self._orders[1]

    def _drift(
        self, member: int, orders: list[list[Key]], ranks: list[torch.Tensor], step: int
    ) -> Finding | None:
        """A tensor on which the processes at one position of their replicas differ."""
        names = [f"{group} {name}" for group, name in orders[member]]
        different = first_difference(names, torch.stack(ranks[member :: self.replica_size]))
        if different is None:
            return None
        group, _, name = different[0].partition(" ")
        accused = rank_names([member + self.replica_size * each for each in different[1]])
        where = f"{group} '{name}', {accused} of {self.world.size}"
        return drifted(group, name, accused, where, self._since(step), _FIX[group])

    def _nonfinite_step(self, at: int, tally: torch.Tensor) -> int:
        return self.gate.step_of(at, tally) if self.gate is not None else 0

    def _gather(self, values: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """Every rank's values, in rank order. For sample ids, this is the order of the global batch."""
        padded = torch.full((max(counts),), -1, dtype=torch.int64)
        padded[: len(values)] = values
        rows = self.world.all_gather_integers(padded)
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def _record(
        self, taken: _Taken, orders: list[list[Key]], ranks: list[torch.Tensor], ids: torch.Tensor
    ) -> None:
        """One record for all layouts: the processes of the first replica hold the whole state together."""
        values: dict[str, dict[str, int]] = {"ids": {"batch": int(fingerprint(ids))}}
        for order, numbers in zip(orders, ranks, strict=False):
            for (group, name), number in zip(order, numbers.tolist(), strict=True):
                values.setdefault(group, {})[name] = number
        self.log.record(*record_text(taken.step, values, taken.record == "full", self.log.chain))

    def _different_names(self, heads: torch.Tensor, taken: _Taken) -> Finding | None:
        """Ranks that hold different tensors, found by number and checksum of their names."""
        wrong = torch.zeros(len(heads), dtype=torch.bool)
        for member in range(self.replica_size):
            rows = heads[member :: self.replica_size, 4:6]
            wrong[member :: self.replica_size] = (rows != rows.mode(dim=0).values).any(dim=1)
        if not wrong.any():
            return None
        accused = wrong.nonzero().flatten().tolist()
        ranks, count = rank_names(accused), int(heads[accused[0], 4])
        return Finding(
            "drift",
            f"{ranks} hold{'s' * (len(accused) == 1)} different parameters, gradients or buffers from the rest",
            where=f"{ranks} of {self.world.size}: {count} tensors, here {len(taken.order)}",
            since=self._since(taken.step),
            fix="build the same model on every rank, and use all of it in every forward",
        )

    def _since(self, step: int) -> str:
        if self.agreed == step - 1:
            return f"step {step:,}"
        return f"between step {self.agreed:,}, after which all agreed, and step {step:,}"


def _summed_shards(ranks: list[torch.Tensor], sharded: list[int]) -> list[torch.Tensor]:
    """Adds up the fingerprints of shards, which differ between ranks, to those of the whole tensors."""
    if not sharded:
        return ranks
    rows = torch.stack(ranks)
    rows[:, sharded] = rows[:, sharded].sum(dim=0)
    return list(rows)
