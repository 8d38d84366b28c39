"""Which fraction of each batch the GPU decodes beside the CPU: as little as keeps the step from waiting.

Decoding on the GPU takes time from the model, so the GPU decodes nothing while the CPU keeps up. When the device runs
out of work, a fraction of each batch moves to it; when decoding there becomes the slower half, some of it moves back.
Promises: only the speed depends on it, never a pixel (see `rule.py`). Nothing waits for a measurement.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TypeVar

import torch

WINDOW = 4
"""Batches per decision."""
UNDER_WAY = 8
"""Batches under way when the fraction changes. They say nothing about the new one."""
IDLE, HOST_WAIT = 0.005, 0.05
"""Fractions of the time above which the device counts as waiting for batches, and the feed for the CPU's half."""
FIRST_RISE, RETREAT, FALL = 1 / 8, 31 / 32, 1 / 128

Item = TypeVar("Item")


def next_fraction(fraction: float, idle: float, host_wait: float) -> float:
    """The next fraction, from the fraction of time that the device was idle for want of a batch, and that in which
    the feed waited for the CPU's half. Moves no more than was missing, and not beyond the point where both halves
    take the same time."""
    if idle < IDLE:
        return max(0.0, fraction - FALL)
    if host_wait < HOST_WAIT:  # the GPU's half is the slower one
        return fraction * RETREAT
    if fraction == 0.0:
        return min(idle, FIRST_RISE)
    level = fraction / ((1.0 - fraction) * (1.0 - host_wait) + fraction)
    return fraction + min(idle, level - fraction)


class GpuFraction:
    """The fraction, adjusted by what the two ends of a feed measure: its own thread, and the one that takes
    batches."""

    def __init__(self) -> None:
        self.value = 0.0
        self._handed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._skip, self._batches = UNDER_WAY, 0
        self._idle_ms = self._took_ms = 0.0
        # Written by the feed's thread alone; the other one reads differences.
        self._host_s = self._fed_s = 0.0
        self._host_before = self._fed_before = 0.0

    def timed(self, items: Iterator[Item]) -> Iterator[Item]:
        """For the feed's thread: the CPU's halves of the batches. Records how long it waits for each."""
        last = time.perf_counter()
        while True:
            began = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            now = time.perf_counter()
            self._host_s += now - began
            self._fed_s += now - last
            last = now
            yield item

    def wanted(self, device: torch.device) -> torch.cuda.Event:
        """For the thread that takes the batches: marks the point on its stream where the next one is needed."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def handed(self, wanted: torch.cuda.Event, ready: torch.cuda.Event) -> None:
        """A batch was needed at one event and ready at the other. Decides every `WINDOW` batches."""
        self._handed.append((wanted, ready))
        while len(self._handed) > 1 and self._handed[0][1].query() and self._handed[1][0].query():
            (needed, came), (next_needed, _) = self._handed.popleft(), self._handed[0]
            if self._skip:
                self._skip -= 1
                self._host_before, self._fed_before = self._host_s, self._fed_s
                continue
            self._idle_ms += max(0.0, needed.elapsed_time(came))
            self._took_ms += needed.elapsed_time(next_needed)
            self._batches += 1
            if self._batches == WINDOW:
                self._decide()

    def _decide(self) -> None:
        waited, fed = self._host_s - self._host_before, self._fed_s - self._fed_before
        idle = self._idle_ms / self._took_ms if self._took_ms > 0 else 0.0
        fraction = next_fraction(self.value, idle, waited / fed if fed > 0 else 0.0)
        self._skip = UNDER_WAY if fraction > self.value or idle >= IDLE else 0
        self._batches, self._idle_ms, self._took_ms = 0, 0.0, 0.0
        self._host_before, self._fed_before = self._host_s, self._fed_s
        self.value = fraction
