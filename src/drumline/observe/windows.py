"""Records the parts of single steps, of the host and the feed, in windows of steps, for a trace.

Promises: outside a window, a step costs one comparison; a window has at most `STEPS` steps and `MOST` parts on each
track; a process records at most some twenty windows, however long it trains. All ranks record the same steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from time import perf_counter

from drumline.core.account import Account

STEPS = 20
SKIPPED = 3
"""Steps after an evaluation, or after the first one, before a window: they still fill queues and caches."""
FIRST = 8
"""So many intervals have a window each. Of the later ones, those whose number is a power of two."""
MOST = 4096


class StepWindows:
    """The windows of one rank. `tracks` are the accounts that are recorded."""

    def __init__(self, rank: int, tracks: Mapping[str, Account]) -> None:
        self._rank, self._tracks = rank, tracks
        self._interval = 0
        self._starts_at: float = math.inf
        """The number of finished steps at which the next window starts."""
        self._ends_at = math.inf
        self._marks: list[tuple[float, int]] = []
        self._since: tuple[float, float] | None = None
        """When the window started: by the wall clock, and by the accounts' clock."""
        self._window = ""

    def begin(self, done: int) -> None:
        """An interval begins, with this number of finished steps."""
        self._interval += 1
        number = self._interval
        wanted = number <= FIRST or number & (number - 1) == 0
        self._starts_at = done + SKIPPED if wanted else math.inf

    def step_done(self, done: int) -> None:
        """A step is finished."""
        if done >= self._starts_at:
            self._step(done)

    def take(self) -> str:
        """The window of the interval that ends, as a line of JSON; empty if it has none. A new interval begins."""
        if self._since is not None:
            self._finish()
        window, self._window = self._window, ""
        return window

    def _step(self, done: int) -> None:
        if self._since is None:
            self._since, self._marks = (time.time(), perf_counter()), []
            self._ends_at = done + STEPS
            for account in self._tracks.values():
                account.record(MOST)
        self._marks.append((perf_counter(), done))
        if done >= self._ends_at:
            self._finish()

    def _finish(self) -> None:
        assert self._since is not None
        wall, began = self._since
        self._starts_at, self._since = math.inf, None

        def after_us(at: float) -> int:
            return round(1e6 * (at - began))

        tracks = {
            name: [[max(0, after_us(at)), part] for at, part in account.recorded()]
            for name, account in self._tracks.items()
        }
        record = {
            "kind": "window",
            "step": self._marks[-1][1],
            "rank": self._rank,
            "time": wall,
            "end_us": after_us(perf_counter()),
            "steps": [[after_us(at), done] for at, done in self._marks],
            "tracks": tracks,
        }
        self._window = json.dumps(record, separators=(",", ":")) + "\n"
