"""Ends a run between two steps, on all ranks at the same one.

Promises: SIGINT, SIGTERM and SIGHUP (a terminal that is closed) never tear a step; every rank leaves the loop after
the same step, so the saved state is one state; an alarm that one rank raises reaches all of them in the same way.
Agreement travels as a tiny message on the host, started at one check and read at the next, so no step waits for it;
checks are about a tenth of a second apart. A second signal ends the process at once, without saving. Outside the main
thread, where Python allows no signal handler, only an alarm ends a run early.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from drumline.core.environment import LAUNCHER
from drumline.core.errors import KILLED
from drumline.observe import text_log
from drumline.parallel.world import World

CHECK_SECONDS = 0.1
SAME_REQUEST_SECONDS = 0.5
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSign:
    """Watches the signals of this process and asks the other ranks. Use as a context manager."""

    def __init__(
        self,
        world: World,
        watch: Callable[[int], int] = lambda step: 0,
        record: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`watch(step)` is called at each check; its result, if not 0, becomes the `alarm` of all ranks. The signal
        handler calls `record` with the last line of a process that a second signal ends."""
        self.world, self.watch, self.record = world, watch, record
        self.signal = ""
        """The name of the signal that this process received."""
        self.stopped_by = ""
        """The name of the signal that stopped the run, once `seen` has returned True. The same on every rank."""
        self.seconds_per_step = 0.0
        """As measured since the last check, the slowest rank's; 0 until known. The same on every rank."""
        self.alarm = 0
        """The highest result of any rank's `watch`, or 0. The same on every rank after the same step."""
        self.watching = False
        """Whether signals are caught."""
        self._asked_at = -math.inf
        self._before: dict[int, object] = {}
        self._message = torch.zeros(3, dtype=torch.int64)
        self._on_its_way: object | None = None
        self._next_check = 0
        self._checked_at: tuple[int, float] | None = None

    def __enter__(self) -> StopSign:
        self.watching = True
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        for number in STOPS if threading.current_thread() is threading.main_thread() else ():
            # A signal ignored on purpose (nohup, a shell's background job) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def attached(self, watch: Callable[[int], int], record: Callable[[str], None]) -> Iterator[None]:
        """Calls these meanwhile, and holds them no longer."""
        before = self.watch, self.record
        self.watch, self.record = watch, record
        try:
            yield
        finally:
            self.watch, self.record = before

    def seen(self, step: int) -> bool:
        """Whether to leave the loop after `step` steps. True on every rank at the same step."""
        if self.world.size == 1:
            self.alarm = self.watch(step)
            if step >= self._next_check:
                self.seconds_per_step = self._measure(step)
                self._next_check = step + self._interval()
            self.stopped_by = self.signal
            return self.asked
        self.alarm = 0
        if step < self._next_check:
            return False
        if self._on_its_way is not None:
            self._on_its_way.wait()  # type: ignore[attr-defined]
            number, microseconds, self.alarm = self._message.tolist()
            self.seconds_per_step = microseconds / 1e6
            if number:
                self._on_its_way, self.stopped_by = None, signal.Signals(number).name
                return True
        mine = [
            signal.Signals[self.signal] if self.signal else 0,
            round(1e6 * self._measure(step)),
            self.watch(step),
        ]
        self._message = torch.tensor(mine)
        self._on_its_way = self.world.all_reduce_max_async(self._message)
        self._next_check = step + self._interval()
        return False

    @property
    def asked(self) -> bool:
        """Whether this process has received a signal."""
        return bool(self.signal)

    def finish(self) -> None:
        """Waits for a message still on its way, so that the ranks part in step."""
        if self._on_its_way is not None:
            self._on_its_way.wait()  # type: ignore[attr-defined]
            self._on_its_way = None

    def _measure(self, step: int) -> float:
        """Seconds per step since the last call."""
        now, before = time.perf_counter(), self._checked_at
        self._checked_at = (step, now)
        if before is None or step <= before[0]:
            return 0.0
        return (now - before[1]) / (step - before[0])

    def _interval(self) -> int:
        """Steps until the next check."""
        if not self.seconds_per_step:
            return 1
        return max(1, min(1000, int(CHECK_SECONDS / self.seconds_per_step)))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        again = time.monotonic() - self._asked_at > SAME_REQUEST_SECONDS
        if self.asked and (not again or number == signal.SIGHUP):
            return  # one keystroke, passed on by a wrapper too; a closing terminal signals several times
        self._asked_at = time.monotonic()
        name = signal.Signals(number).name
        if self.asked:
            self.record(f"{text_log.STOPPED}{name} again: ended at once, without saving")
            text_log.leave_bar()
            os._exit(KILLED)
        self.signal = name
        if LAUNCHER not in os.environ and self.world.size == 1:  # otherwise the launcher reports it
            text_log.say(
                f"{name}: finishing the step, then saving; {name} again ends the run at once, without saving"
            )

    def _leave_terminal(self) -> None:
        """Redirects output from a closed terminal: writing to it would raise an error before the run has saved."""
        for number in self._terminals:
            if not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)
