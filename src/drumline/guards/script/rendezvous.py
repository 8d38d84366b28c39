"""How the ranks of a user's process group exchange short messages: through its store, not by collectives.

A collective of the guard could deadlock against one of the script's, or against a rank that has left its loop; a
message in the store cannot. Promises: `gather` returns every rank's message under one key, in rank order, in bounded
time. A rank that stops leaves its finding in the store first, and every rank that waits or is about to step stops
with the same one. Nothing here uses a GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch.distributed as dist

from drumline.core.errors import UserError
from drumline.guards.finding import Finding, GuardError, Reporter

TIMEOUT_SECONDS = 20.0
"""How long a comparison waits for the other ranks. A rank that arrives later reads what the others left."""
_GUARD_MISSING_SECONDS = 60.0
"""After this time, a rank that never called `drumline.guard` is an error."""
_POLL_SECONDS = 0.2
_NUMBERS = count()


class RendezvousTimeout(Exception):
    """The other ranks have not arrived in time, or cannot arrive any more."""


class Rendezvous:
    """The ranks that train one model together; a single rank without torch.distributed."""

    def __init__(self, rank: int, ranks: Sequence[int], store: dist.Store | None) -> None:
        self.rank, self.ranks, self._store = rank, tuple(ranks), store
        self.timeout = TIMEOUT_SECONDS
        self._old_keys: list[str] = []
        self.post(f"here/{rank}", True)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def clone(self) -> Rendezvous:
        """The same ranks over a new connection, for another thread: a client serves one call at a time."""
        store = self._store
        return Rendezvous(self.rank, self.ranks, None if store is None else store.clone())  # type: ignore[attr-defined]

    def post(self, key: str, value: Any) -> None:
        """Leaves a message (JSON) under a key."""
        if self._store is not None:
            self._store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """The message under a key; None while there is none."""
        if self._store is None or not self._store.check([key]):
            return None
        return json.loads(self._store.get(key))

    def first(self, key: str, value: Any) -> Any:
        """The value of the rank that calls first, on every rank that calls."""
        if self._store is None:
            return value
        return json.loads(self._store.compare_set(key, "", json.dumps(value)))

    def gather(
        self, key: str, value: Any, poll: Callable[[], None], seconds: float | None = None
    ) -> list[Any]:
        """Every rank's message, in the order of `ranks`. `poll` is called while waiting and may raise. After
        `seconds`
        the missing ones are None. Without `seconds`, raises `RendezvousTimeout` after `timeout`."""
        if self._store is None:
            return [value]
        self.post(f"{key}/{self.rank}", value)
        keys = [f"{key}/{rank}" for rank in self.ranks]
        began, nap, polled = time.monotonic(), 0.0005, time.monotonic()
        while not self._store.check(keys):
            time.sleep(nap)
            nap = min(nap * 1.5, 0.02)
            now = time.monotonic()
            if now - polled > _POLL_SECONDS:
                polled = now
                poll()
                if seconds is not None and now - began > seconds:
                    return [self.read(name) for name in keys]
                if now - began > _GUARD_MISSING_SECONDS:
                    self._require_guards()
                if now - began > self.timeout:
                    raise RendezvousTimeout
        values = [json.loads(text) for text in self._store.multi_get(keys)]
        self._delete_old(f"{key}/{self.rank}")
        return values

    def _delete_old(self, key: str) -> None:
        """Deletes our key of the rendezvous before the last: every rank of the last one has read it."""
        assert self._store is not None
        self._old_keys.append(key)
        if len(self._old_keys) > 2:
            self._store.delete_key(self._old_keys.pop(0))

    def _require_guards(self) -> None:
        missing = [rank for rank in self.ranks if self.read(f"here/{rank}") is None]
        if missing:
            raise UserError(
                f"drumline.guard was not called on rank {', '.join(map(str, missing))}",
                "call it on every rank, with the same arguments",
            )


def rendezvous_of(group: dist.ProcessGroup | None) -> Rendezvous:
    """The rendezvous of a process group's ranks (None: the default group, or this process alone without one). Every
    rank must create its rendezvous in the same order."""
    if not (dist.is_available() and dist.is_initialized()):
        return Rendezvous(0, (0,), None)
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    number = next(_NUMBERS)
    if len(ranks) == 1:
        return Rendezvous(dist.get_rank(), ranks, None)
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        raise UserError(
            "the process group has no store (MPI?)", "start it by init_process_group with gloo or nccl"
        )
    assert group is not None
    name = f"drumline-guard/{number}/{group.group_name}"
    return Rendezvous(dist.get_rank(), ranks, dist.PrefixStore(name, store.clone()))  # type: ignore[attr-defined]


class RankReporter:
    """Reports the findings of one model, on this rank or on all ranks. Only the first rank prints a warning that all
    ranks find."""

    def __init__(self, reporter: Reporter, rendezvous: Rendezvous) -> None:
        self.reporter, self._rendezvous = reporter, rendezvous
        self.stopped = False

    def from_all_ranks(self, finding: Finding, certain: bool) -> None:
        """A finding that all ranks have."""
        if certain and self.reporter.action == "stop":
            self.report(finding)
        elif self._rendezvous.rank == self._rendezvous.ranks[0]:
            self.reporter.warn(finding)

    def from_this_rank(self, finding: Finding, certain: bool) -> None:
        """A finding that only this rank has."""
        (self.report if certain else self.reporter.warn)(finding)

    def report(self, finding: Finding) -> None:
        """A certain finding: the other ranks stop with the same message."""
        if self.reporter.action == "stop" and finding.guard not in self.reporter.ignore:
            self.stopped = True
            self._rendezvous.first("alert", vars(finding))
        self.reporter.report(finding)

    def raise_for(self, finding: Finding | None) -> None:
        """Stops with a finding of another rank or of the hang monitor."""
        if finding is not None:
            self.stopped = True
            raise GuardError(finding)

    def raise_if_stopped(self) -> None:
        """Stops if another rank has stopped."""
        alert = self._rendezvous.read("alert")
        self.raise_for(None if alert is None else Finding(**alert))

    def not_compared(self, step: int) -> None:
        """Not all ranks reached a comparison in time. A rank that arrives later compares by itself."""
        self.reporter.warn(
            Finding(
                "waiting",
                f"ranks were not compared at step {step}: not all arrived within {self._rendezvous.timeout:.0f} s",
                f"rank {self._rendezvous.rank}",
                f"step {step}",
                "ignore this if a rank is saving or evaluating; otherwise check for a step that a rank skips",
            )
        )
