"""The times of a loop in a bounded number of intervals, with the use of the machine in each.

Promises: the steps at which an interval ends depend on the number of steps alone, so they are the same on every rank.
The first interval has the first steps, which include one-time work. Memory is bounded: when there are too
many intervals, neighbours are joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drumline.core.account import PARTS
from drumline.observe.clock import StepTimes
from drumline.observe.usage import Usage

FIRST_STEPS = 3
STEPS = 10
"""Steps of an interval, until intervals are joined."""
MOST = 48
"""Intervals that are kept."""
_MOST_USAGES = 256


@dataclass(frozen=True)
class Stretch:
    """Some steps of this rank."""

    step: int
    """The last one."""
    passes: float
    """Passes over the loader, up to it."""
    times: StepTimes
    counts: Mapping[str, float]
    """Sums: samples, and what is known of the loader."""
    began: float
    ended: float
    """By `perf_counter`."""

    def __add__(self, later: Stretch) -> Stretch:
        counts = {name: self.counts[name] + later.counts[name] for name in later.counts}
        return Stretch(later.step, later.passes, self.times + later.times, counts, self.began, later.ended)


class History:
    """The intervals of this rank."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self.stretches = now, list[Stretch]()
        self._size = STEPS
        self._before: Mapping[str, float] = {}
        self._began = now()
        self._usages: list[tuple[Usage, float]] = []
        """With the CPU time of the loader's workers so far."""

    def begin(self, counts: Mapping[str, float]) -> None:
        """The first step begins now."""
        self._before, self._began = dict(counts), self._now()

    def is_due(self, step: int) -> bool:
        """Whether an interval ends after this step."""
        return step == FIRST_STEPS or (step > FIRST_STEPS and (step - FIRST_STEPS) % self._size == 0)

    def end(self, step: int, passes: float, times: StepTimes, counts: Mapping[str, float]) -> None:
        """An interval ends after this step. What follows the last step, such as an evaluation, belongs to it."""
        now = self._now()
        gained = {name: value - self._before.get(name, 0.0) for name, value in counts.items()}
        stretch = Stretch(step, passes, times, gained, self._began, now)
        if not times.steps and self.stretches:
            stretch = self.stretches.pop() + stretch
        self.stretches.append(stretch)
        self._before, self._began = dict(counts), now
        if len(self.stretches) > MOST:
            first, *rest = self.stretches
            self.stretches = [first, *(a + b for a, b in zip(rest[::2], rest[1::2], strict=True))]
            self._size *= 2

    def used(self, usage: Usage, workers_cpu_s: float) -> None:
        """What this process and its loader's workers have used up to now. Called by another thread."""
        self._usages.append((usage, workers_cpu_s))
        if len(self._usages) > _MOST_USAGES:
            self._usages = [self._usages[0], *self._usages[1::2]]

    def rows(self) -> list[dict[str, Any]]:
        """The intervals as other ranks read them: JSON."""
        return [self._row(each) for each in self.stretches if each.times.steps]

    def _row(self, stretch: Stretch) -> dict[str, Any]:
        times, steps, counts = stretch.times, stretch.times.steps, stretch.counts
        per_step = {
            "step_ms": times.step_s,
            "data_ms": times.data_s,
            "copy_ms": times.copy_s,
            "compute_ms": times.compute_s,
            "late_ms": times.late_s,
            **{f"host_{part}_ms": times.parts[part] for part in PARTS},
            **{f"device_{part}_ms": seconds for part, seconds in times.device_parts.items()},
            "loader_start_ms": counts.get("start_s", 0.0),
            "data_cpu_ms": counts.get("data_cpu_s", 0.0),
            "taking_ms": counts.get("taking_s", 0.0),
        }
        values = {name: 1e3 * seconds / steps for name, seconds in per_step.items()}
        values["behind"] = times.behind / steps
        values |= self._used_in(stretch)
        return {
            "step": stretch.step,
            "epoch": stretch.passes,
            "steps": steps,
            "samples": counts["samples"],
            "values": {name: value for name, value in values.items() if math.isfinite(value)},
        }

    def _used_in(self, stretch: Stretch) -> dict[str, float]:
        """Between the last look before the stretch and the first one after it."""
        usages = self._usages
        before = [each for each in usages if each[0].time_s <= stretch.began] or usages[:1]
        after = [each for each in usages if each[0].time_s >= stretch.ended] or usages[-1:]
        if not usages or after[0][0].time_s <= before[-1][0].time_s:
            return {}
        (first, cpu_before), (last, cpu_after) = before[-1], after[0]
        cores = (cpu_after - cpu_before) / (last.time_s - first.time_s)
        # Workers that are started anew for a pass have used less than those of the last.
        return last.since(first) | ({"loader_cores": cores} if cores >= 0 else {})
