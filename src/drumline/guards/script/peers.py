"""How the ranks of a user's process group exchange messages and findings: through its store, not by collectives.

A collective of the guard could deadlock against one of the script's, or against a rank that has left its loop; a
message in the store cannot. Promises: `gather` returns every rank's message under one key, in rank order, in bounded
time. A rank that stops leaves its finding in the store first, and every rank that waits or is about to step stops
with the same one. Nothing here uses a GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from itertools import count
from typing import Any, Literal

import torch.distributed as dist

from drumline.core.errors import UserError
from drumline.guards.finding import Finding, GuardError
from drumline.guards.table import GUARDS

Action = Literal["stop", "warn"]

TIMEOUT_SECONDS = 20.0
"""How long a comparison waits for the other ranks. A rank that arrives later reads what the others left."""
_GUARD_MISSING_SECONDS = 60.0
"""After this time, a rank that never called `drumline.guard` is an error."""
_POLL_SECONDS = 0.2
_NUMBERS = count()


class PeerTimeout(Exception):
    """The other ranks have not arrived in time, or cannot arrive any more."""


class Peers:
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

    def clone(self) -> Peers:
        """The same ranks over a new connection, for another thread: a client serves one call at a time."""
        store = self._store
        return Peers(self.rank, self.ranks, None if store is None else store.clone())  # type: ignore[attr-defined]

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
        `seconds` the missing ones are None. Without `seconds`, raises `PeerTimeout` after `timeout`."""
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
                    raise PeerTimeout
        values = [json.loads(text) for text in self._store.multi_get(keys)]
        self._delete_old(f"{key}/{self.rank}")
        return values

    def _delete_old(self, key: str) -> None:
        """Deletes our key of the gather before the last: every rank of the last one has read it."""
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


def peers_of(group: dist.ProcessGroup | None) -> Peers:
    """The ranks of a process group (None: the default group, or this process alone without one). Every rank must call
    this in the same order."""
    if not (dist.is_available() and dist.is_initialized()):
        return Peers(0, (0,), None)
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    number = next(_NUMBERS)
    if len(ranks) == 1:
        return Peers(dist.get_rank(), ranks, None)
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        raise UserError(
            "the process group has no store (MPI?)", "start it by init_process_group with gloo or nccl"
        )
    assert group is not None
    name = f"drumline-guard/{number}/{group.group_name}"
    return Peers(dist.get_rank(), ranks, dist.PrefixStore(name, store.clone()))  # type: ignore[attr-defined]


class Reporter:
    """Reports the findings of one model: raises `GuardError`, or prints the first finding of each guard on stderr."""

    def __init__(self, action: Action, ignore: Collection[str] = (), peers: Peers | None = None) -> None:
        if action not in ("stop", "warn"):
            raise UserError(f"guard: action={action!r} is unknown", 'use action="stop" or action="warn"')
        for guard in ignore:
            if guard not in GUARDS:
                near = get_close_matches(guard, GUARDS, 1)
                raise UserError(
                    f"guard: ignore={guard!r} is unknown",
                    f"use {near[0]!r}" if near else f"use one of: {', '.join(GUARDS)}",
                )
        self.action, self.ignore = action, frozenset(ignore)
        self.reported: set[str] = set()
        """The guards that have reported."""
        self.stopped = False
        self._peers = peers or Peers(0, (0,), None)

    def is_done(self, guard: str) -> bool:
        """Whether this guard has reported or is ignored, so that it does not need to check any more."""
        return guard in self.ignore or guard in self.reported

    def report(self, finding: Finding | None) -> None:
        """Reports a finding of this rank. If it is certain, the other ranks stop with the same message."""
        if finding is None:
            return
        if finding.certain and self.action == "stop" and finding.guard not in self.ignore:
            self._peers.first("alert", vars(finding))
            self.stop(finding)
        if not self.is_done(finding.guard):
            self.reported.add(finding.guard)
            print(f"{finding}\n  silence: ignore=[{finding.guard!r}]", file=sys.stderr, flush=True)

    def report_once(self, finding: Finding | None) -> None:
        """Reports a finding that all ranks have. Only the first rank prints a warning."""
        stops = finding is not None and finding.certain and self.action == "stop"
        if stops or self._peers.rank == self._peers.ranks[0]:
            self.report(finding)

    def stop(self, finding: Finding) -> None:
        """Stops this rank with a finding."""
        self.stopped = True
        self.reported.add(finding.guard)
        raise GuardError(finding)

    def stop_with_others(self) -> None:
        """Stops this rank if another one has stopped."""
        alert = self._peers.read("alert")
        if alert is not None:
            self.stop(Finding(**alert))
