"""How the ranks of a user's process group tell each other short things: by its store, not by collectives.

A collective of ours could deadlock against one of the script's, or against a rank that has left its loop; a message
in the store cannot. Promises: `gather` returns what every rank said under one key, in rank order, and gives up loudly
when a rank never made a meeting; nothing here touches a GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch.distributed as dist

from drumline.core.errors import UserError

_NUMBERS = count()
_ABSENT_AFTER = 60.0
PATIENCE = 20.0
"""Seconds that a comparison waits for the other ranks. A rank that arrives later reads what the others left."""


class Absent(Exception):
    """The other ranks cannot come to a meeting any more, or have not come in time."""


class Meeting:
    """The ranks that train one model together; of size 1 without torch.distributed."""

    def __init__(self, rank: int, ranks: Sequence[int], store: dist.Store | None) -> None:
        self.rank, self.ranks, self._store = rank, tuple(ranks), store
        self.patience = PATIENCE
        self._old: list[str] = []
        self.post(f"here/{rank}", True)

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    def another(self) -> Meeting:
        """The same meeting over a connection of its own, for another thread: a client serves one call at a time."""
        store = self._store
        return Meeting(self.rank, self.ranks, None if store is None else store.clone())  # type: ignore[attr-defined]

    def post(self, key: str, value: Any) -> None:
        """Leaves a value (JSON) under a key."""
        if self._store is not None:
            self._store.set(key, json.dumps(value))

    def look(self, key: str) -> Any:
        """What was left under a key, None while there is nothing."""
        if self._store is None or not self._store.check([key]):
            return None
        return json.loads(self._store.get(key))

    def first(self, key: str, value: Any) -> Any:
        """Of all ranks that call, the first one's value, for all of them."""
        if self._store is None:
            return value
        return json.loads(self._store.compare_set(key, "", json.dumps(value)))

    def gather(
        self, key: str, value: Any, pause: Callable[[], None], seconds: float | None = None
    ) -> list[Any]:
        """Every rank's value, in the order of `ranks`. `pause` is called while waiting and may raise. After `seconds`
        the missing ones are None. Without `seconds`, `Absent` is raised after `patience`."""
        if self._store is None:
            return [value]
        self.post(f"{key}/{self.rank}", value)
        keys = [f"{key}/{rank}" for rank in self.ranks]
        began, nap, told = time.monotonic(), 0.0005, time.monotonic()
        while not self._store.check(keys):
            time.sleep(nap)
            nap = min(nap * 1.5, 0.02)
            now = time.monotonic()
            if now - told > 0.2:
                told = now
                pause()
                if seconds is not None and now - began > seconds:
                    return [self.look(name) for name in keys]
                if now - began > _ABSENT_AFTER:
                    self._require_all_here()
                if now - began > self.patience:
                    raise Absent
        values = [json.loads(text) for text in self._store.multi_get(keys)]
        self._forget(f"{key}/{self.rank}")
        return values

    def _forget(self, key: str) -> None:
        """Our key of the meeting before the last one can go: whoever came to the last one has read it."""
        assert self._store is not None
        self._old.append(key)
        if len(self._old) > 2:
            self._store.delete_key(self._old.pop(0))

    def _require_all_here(self) -> None:
        missing = [rank for rank in self.ranks if self.look(f"here/{rank}") is None]
        if missing:
            raise UserError(
                f"drumline.guard was not called on rank {', '.join(map(str, missing))}",
                "call it on every rank, with the same arguments",
            )


def meeting_of(group: dist.ProcessGroup | None) -> Meeting:
    """The meeting of a process group's ranks (None: the default group, or this process alone without one). Every rank
    must ask for its meetings in the same order."""
    if not (dist.is_available() and dist.is_initialized()):
        return Meeting(0, (0,), None)
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    number = next(_NUMBERS)
    if len(ranks) == 1:
        return Meeting(dist.get_rank(), ranks, None)
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        raise UserError(
            "the process group has no store (MPI?)", "start it by init_process_group with gloo or nccl"
        )
    assert group is not None
    name = f"drumline-guard/{number}/{group.group_name}"
    return Meeting(dist.get_rank(), ranks, dist.PrefixStore(name, store.clone()))  # type: ignore[attr-defined]
