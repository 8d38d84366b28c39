"""Where a feed and its workers spend their time.

Promises: written by the feed's thread alone, read by any thread. The parts of the feed sum to its wall time; the
workers' seconds add up over all of them, so they may exceed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any, NamedTuple

from drumline.core.account import Account

READ, MAKE, SPACE, WORK = "read", "make", "space", "work"
FEED_PARTS = {
    READ: "waiting for files",
    MAKE: "waiting for workers that decode and crop",
    SPACE: "waiting until the step takes a batch",
    WORK: "in Python, copying, augmenting",
}


class Spent(NamedTuple):
    """What workers have spent on some samples."""

    read_s: float = 0.0
    """Reading files, most of it waiting for the disk."""
    make_s: float = 0.0
    """Decoding, cropping, the user's own transform."""
    cpu_s: float = 0.0
    """The part of `make_s` that ran on a core."""
    megabytes: float = 0.0
    own_s: float = 0.0
    """In the user's own transform."""

    def plus(self, other: Spent) -> Spent:
        """The sum of both."""
        return Spent(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Spent()


class Stopwatch:
    """Measures a sample: first its bytes are read, then it is made."""

    def __init__(self) -> None:
        self._began, self._read_s, self._megabytes = perf_counter(), 0.0, 0.0
        self._cpu_from = thread_time()

    def read(self, size: int) -> None:
        """The bytes are there."""
        self._read_s, self._megabytes = perf_counter() - self._began, size / 2**20
        self._cpu_from = thread_time()

    def spent(self) -> Spent:
        """The sample is made."""
        make_s = perf_counter() - self._began - self._read_s
        return Spent(self._read_s, make_s, thread_time() - self._cpu_from, self._megabytes)


@dataclass
class FeedTimes:
    """Those of the feed that a run trains from."""

    account: Account = field(default_factory=lambda: Account(FEED_PARTS, WORK))
    by_python: Spent = NOTHING
    natively: Spent = NOTHING
    """Of the native threads that run now; those that have ended are in `by_python`."""
    ready: Any = None
    """The event after which the last batch was on the device."""
    arrived: Any = None
    """The event after which its copy to the device began."""

    def sums(self) -> dict[str, float]:
        """Seconds, and megabytes read, from the start."""
        total = self.by_python.plus(self.natively)
        return {
            **{f"feed_{part}": seconds for part, seconds in self.account.sums().items()},
            "workers_read": total.read_s,
            "workers_make": total.make_s,
            "workers_make_cpu": total.cpu_s,
            "workers_own": total.own_s,
            "read_mb": total.megabytes,
        }
