"""What the launchers of one run, one per machine, tell each other.

Promises: when a machine fails, the others know within a second, stop, and show the same cause; the machine
that hosts the shared store leaves last. On one machine there is nobody to tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import DistError, Store

from drumline.launch.failure import Failure, from_json, to_json

T = TypeVar("T")

POSTED = "drumline/posted"
CAUSE_SECONDS = 3.0
"""How long a machine that only lost contact waits for another one to say what really happened."""

LEAVE_SECONDS = 10.0
"""How long the machine with the store waits for the others to stop their workers and read it."""


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
        deadline = time.monotonic() + CAUSE_SECONDS
        while self._machines > 1 and time.monotonic() < deadline:
            answer = self._quietly(self.failures)
            found = answer or []
            if answer is None or any(not failure.follows for failure in found):
                break
            time.sleep(0.1)
        return found

    def wait_for_all(self, give_up: Callable[[], bool]) -> list[Failure]:
        """Waits until every machine's workers have finished, or one has failed: gives those failures."""
        keys = [self._key("done", machine) for machine in range(self._machines)]
        self._quietly(lambda: self._store.set(self._key("done"), ""))
        while self._machines > 1 and not give_up():
            failures = self._quietly(self.failures)
            if failures:
                return failures
            # A store out of reach has lost its machine; ours has done its part all the same.
            if failures is None or self._quietly(lambda: self._store.check(keys)) is not False:
                break
            time.sleep(0.1)
        return []

    def leave(self, hosts_store: bool) -> bool:
        """The last thing a machine does with the store. The one that hosts it lets the others go first, so
        that they never find it gone. Gives whether every machine has left."""
        left = self._quietly(lambda: self._store.add("drumline/left", 1))
        deadline = time.monotonic() + LEAVE_SECONDS
        while hosts_store and left is not None and left < self._machines and time.monotonic() < deadline:
            time.sleep(0.1)
            left = self._quietly(lambda: self._store.add("drumline/left", 0))
        return left == self._machines

    def _key(self, what: str, machine: int | None = None) -> str:
        return f"drumline/{what}/{self._machine if machine is None else machine}"

    @staticmethod
    def _quietly(ask: Callable[[], T]) -> T | None:
        """The store's answer, or None when it is out of reach: its machine has left."""
        try:
            return ask()
        except DistError:
            return None
