"""Where the time of a training loop goes: the loop is in exactly one part of a step at a time.

Promises: the parts of an interval sum to its wall time. Entering a part costs a read of the clock and an addition,
and never waits for a device. Only the thread that runs the loop is counted: calls from other threads have no effect,
so a lower layer can mark what it does wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter

DATA, COMPUTE, TEACHER, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER, GUARDS, LOG, EVALUATION, CHECKPOINT, OTHER = (
    "data",
    "compute",
    "teacher",
    "forward",
    "backward",
    "exchange",
    "optimizer",
    "guards",
    "log",
    "evaluation",
    "checkpoint",
    "other",
)
PARTS = {
    DATA: "waiting for the next batch",
    COMPUTE: "in the step, outside the parts below: copying the batch, starting work on the device",
    TEACHER: "the teacher's forward",
    FORWARD: "the model's forward and the loss",
    BACKWARD: "backward, as far as no exchange is waited for",
    EXCHANGE: "waiting for other processes: gradients, statistics, rows",
    OPTIMIZER: "clipping, the update, averaged weights",
    GUARDS: "guards",
    LOG: "logging and the display",
    EVALUATION: "evaluation",
    CHECKPOINT: "saving",
    OTHER: "everything else between two steps",
}
"""Each part with what the host does in it. On a GPU, the host only starts the work."""
BETWEEN_STEPS = (EVALUATION, CHECKPOINT)
"""Parts that do not belong to a step."""


class Account:
    """The time that one thread has spent in each part."""

    def __init__(
        self, parts: Iterable[str] = PARTS, first: str = OTHER, clock: Callable[[], float] = perf_counter
    ) -> None:
        """`first` is the part that it begins in."""
        self._parts, self._first, self._clock = tuple(parts), first, clock
        self.listener: Callable[[str, bool], None] | None = None
        """Called with each part that is entered, and whether by the thread that is counted."""
        self._kept: list[tuple[float, str]] | None = None
        self.restart()

    def restart(self) -> None:
        """Sets all sums to zero and counts the calling thread from now on."""
        self._sums = dict.fromkeys(self._parts, 0.0)
        self.adopt()

    def adopt(self) -> None:
        """Counts the calling thread from now on, in addition to the sums so far."""
        self._owner = get_ident()
        self._part, self._since = self._first, self._clock()

    def enter(self, part: str) -> str:
        """Ends the present part, begins another one, and returns the one that ended."""
        before = self._part
        if get_ident() == self._owner:
            now = self._clock()
            self._sums[before] += now - self._since
            self._part, self._since = part, now
            if self.listener is not None:
                self.listener(part, True)
        elif self.listener is not None:
            self.listener(part, False)
        return before

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """A part that ends where it began."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Waiting for other processes; during an evaluation or a save, a part of that."""
        before = self._part
        if before not in BETWEEN_STEPS:
            self.enter(EXCHANGE)
        try:
            yield
        finally:
            if before not in BETWEEN_STEPS:
                self.enter(before)

    def record(self, most: int) -> None:
        """Keeps when each part begins from now on, up to so many, until `recorded`."""
        kept = self._kept = [(self._since, self._part)]
        plain = Account.enter

        def enter(part: str) -> str:
            before = plain(self, part)
            if get_ident() == self._owner and len(kept) < most:
                kept.append((self._since, part))
            return before

        # On this instance only, and only meanwhile: `enter` itself is as fast as if nothing could be recorded. (With
        # a subclass, or after `vars(self)`, it is slower for good.)
        self.enter = enter  # type: ignore[method-assign]

    def recorded(self) -> list[tuple[float, str]]:
        """The parts since `record`, each with the time at which it began. Any thread may ask."""
        if self._kept is None:
            return []
        del self.enter
        kept, self._kept = self._kept, None
        return kept

    @property
    def present(self) -> tuple[int, str]:
        """The thread that is counted, and the part that it is in."""
        return self._owner, self._part

    def sums(self) -> dict[str, float]:
        """Seconds in each part up to now. Any thread may ask."""
        part, since, sums = self._part, self._since, dict(self._sums)
        sums[part] += self._clock() - since
        return sums


account = Account()
"""That of this process's training loop."""
within, waiting = account.within, account.waiting
