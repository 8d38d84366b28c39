"""Ends a run between two steps, on all ranks at the same one.

Promises: SIGINT and SIGTERM never tear a step; every rank leaves the loop after the same step, so the saved
state is one state; an alarm that one rank raises reaches all of them in the same way. Agreement travels as a tiny
message on the host, started at one check and read at the next, so no step waits for it; checks are about a tenth of a
second apart. A second signal ends the process at once.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

import torch

from drumline.launch.environment import LAUNCHER
from drumline.launch.world import World

CHECK_SECONDS = 0.1
SAME_REQUEST_SECONDS = 0.5
SHOW_CURSOR = b"\x1b[?25h"


class StopSign:
    """Watches the signals of this process and asks the other ranks. Use as a context manager."""

    def __init__(self, world: World, watch: Callable[[int], int] = lambda step: 0) -> None:
        """`watch` is asked after each check's step; what it gives, if not 0, becomes everybody's `alarm`."""
        self.world, self.watch = world, watch
        self.asked = False
        self.alarm = 0
        """The highest that any rank's `watch` gave, or 0. The same on every rank after the same step."""
        self._asked_at = -math.inf
        self._before: dict[int, object] = {}
        self._message = torch.zeros(3, dtype=torch.int64)
        self._on_its_way: object | None = None
        self._next_check = 0
        self._checked_at = (0, time.perf_counter())

    def __enter__(self) -> StopSign:
        for number in (signal.SIGINT, signal.SIGTERM):
            # A signal ignored on purpose (nohup, a shell's background job) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def seen(self, step: int) -> bool:
        """Whether to leave the loop after `step` steps. True on every rank at the same step."""
        if self.world.size == 1:
            self.alarm = self.watch(step)
            return self.asked
        self.alarm = 0
        if step < self._next_check:
            return False
        interval = 1
        if self._on_its_way is not None:
            self._on_its_way.wait()  # type: ignore[attr-defined]
            agreed, interval, self.alarm = self._message.tolist()
            if agreed:
                self._on_its_way = None
                return True
        self._message = torch.tensor([int(self.asked), self._steps_between_checks(step), self.watch(step)])
        self._on_its_way = self.world.maximum_later(self._message)
        self._next_check = step + interval
        return False

    def settle(self) -> None:
        """Waits for a message still on its way, so that the ranks part in step."""
        if self._on_its_way is not None:
            self._on_its_way.wait()  # type: ignore[attr-defined]
            self._on_its_way = None

    def _steps_between_checks(self, step: int) -> int:
        last_step, last_time = self._checked_at
        now = time.perf_counter()
        self._checked_at = (step, now)
        seconds_per_step = (now - last_time) / max(1, step - last_step)
        return max(1, min(1000, int(CHECK_SECONDS / max(seconds_per_step, 1e-6))))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again = time.monotonic() - self._asked_at > SAME_REQUEST_SECONDS
        if self.asked and not again:
            return  # one keystroke, passed on by a wrapper too
        self._asked_at = time.monotonic()
        if self.asked:
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = True
        if LAUNCHER not in os.environ and self.world.size == 1:  # otherwise the launcher says it
            os.write(2, b"\nfinishing what is under way, then saving; once more ends it at once\n")
