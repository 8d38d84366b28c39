"""What the launchers of one run, one per machine, tell each other.

Promises: when a machine fails, the others know within a second, stop, and show the same cause; nobody who
holds the shared store leaves before the others have read it. On one machine there is nobody to tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import DistError, Store

from drumline.launch.failure import Failure, from_json, to_json

T = TypeVar("T")

POSTED = "drumline/posted"
READ_SECONDS = 3.0
"""How long a leaving machine lets the others read what it posted."""


class NoticeBoard:
    """Notices in the store that the rendezvous gave the launchers."""

    def __init__(self, store: Store, machine: int, machines: int) -> None:
        self._store, self._machine, self._machines = store, machine, machines
        self._posted = False

    def post(self, failure: Failure) -> None:
        """Tells the other machines why this one stops. Only the first notice counts."""
        if self._machines > 1 and not self._posted:
            self._posted = True
            self._quietly(lambda: self._store.set(self._key("failed"), to_json(failure)))
            self._quietly(lambda: self._store.set(POSTED, ""))

    def failures(self) -> list[Failure]:
        """What the other machines have posted. Raises `DistError` when the store is out of reach."""
        if self._machines == 1 or not self._store.check([POSTED]):
            return []
        keys = [self._key("failed", machine) for machine in range(self._machines) if machine != self._machine]
        return [from_json(self._store.get(key).decode()) for key in keys if self._store.check([key])]

    def wait_for_cause(self) -> list[Failure]:
        """The same, giving the others a moment to post a failure that does not follow from another; an
        unreachable store has nothing to say."""
        found: list[Failure] = []
        deadline = time.monotonic() + READ_SECONDS
        while self._machines > 1 and time.monotonic() < deadline:
            answer = self._quietly(self.failures)
            found = answer or []
            if answer is None or any(not failure.follows for failure in found):
                break
            time.sleep(0.1)
        return found

    def leave(self) -> None:
        """Says that this machine has read everything, and waits a moment until all have."""
        if self._machines > 1:
            self._quietly(lambda: self._store.set(self._key("left"), ""))
            self._wait("left", time.monotonic() + READ_SECONDS, lambda: False)

    def wait_for_all(self, give_up: Callable[[], bool]) -> list[Failure]:
        """Waits until every machine's workers have finished, or one has failed: gives those failures. The
        machine with the store may leave first: a store that is gone then means that all was done."""
        if self._machines == 1:
            return []
        self._quietly(lambda: self._store.set(self._key("done"), ""))
        self._wait("done", float("inf"), lambda: give_up() or bool(self.failures()))
        return self._quietly(self.failures) or []

    def last_one_out(self) -> bool:
        """Whether every other machine has called this before."""
        return self._quietly(lambda: self._store.add("drumline/out", 1)) == self._machines

    def _wait(self, what: str, deadline: float, give_up: Callable[[], bool]) -> None:
        keys = [self._key(what, machine) for machine in range(self._machines)]
        while time.monotonic() < deadline and self._quietly(give_up) is False:
            if self._quietly(lambda: self._store.check(keys)) is not False:
                return
            time.sleep(0.1)

    def _key(self, what: str, machine: int | None = None) -> str:
        return f"drumline/{what}/{self._machine if machine is None else machine}"

    @staticmethod
    def _quietly(ask: Callable[[], T]) -> T | None:
        """The store's answer, or None when it is out of reach: its machine has left."""
        try:
            return ask()
        except DistError:
            return None
