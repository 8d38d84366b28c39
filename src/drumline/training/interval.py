"""The times and resources of all ranks in an interval of steps, for metrics.jsonl.

Promises: the ranks exchange their numbers in host memory, and only the end of an evaluation or of the run waits for
them. All ranks must request them after the same step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from drumline.core.environment import TRIAL
from drumline.data.feed.times import FeedTimes
from drumline.observe.clock import StepTimes
from drumline.observe.sampler import Sampler
from drumline.observe.usage import LEVELS, RATES, Usage
from drumline.parallel.world import World

FIRST_S, EVERY_S = 8.0, 30.0
"""Seconds of steps before the first line of times, and between two later ones, if no evaluation comes first."""
MANY = 8
"""Ranks above which lines, which have a column for each, come less often."""
LEAST_STEPS = 4
"""Steps of an interval that ends before an evaluation."""
TRIAL_S = 0.5
"""Seconds between two lines in a short run of `drumline why`; one step is enough there."""
PLACE = 56
"""Characters of a place in the user's code."""
_NEVER = -math.inf


class IntervalTimes:
    """The times and resources of all ranks between two lines of metrics.jsonl."""

    def __init__(self, world: World, feed: FeedTimes, sampler: Sampler | None = None) -> None:
        self._world, self._feed, self._sampler = world, feed, sampler or Sampler()
        self._times: StepTimes | None = None
        self._pending: _Pending | None = None
        self._next = 0
        self._written = 0
        self.facts: Mapping[str, Any] = {}
        """Written with each line."""
        self.restart()

    def begin(self) -> None:
        """Steps begin now."""
        self._sampler.start()
        self.restart()

    def restart(self) -> None:
        """Forgets what was used so far."""
        self._usage, self._fed = Usage.now(), self._feed.sums()
        self._sampler.take()

    def add(self, times: StepTimes) -> None:
        self._times = times if self._times is None else self._times + times

    def due(self, done: int, seconds_per_step: float) -> bool:
        """Whether an interval ends after `done` steps. The same on all ranks, because the step's mean time is."""
        if not seconds_per_step:
            return False
        if not self._next:
            seconds = EVERY_S * max(1.0, self._world.size / MANY) if self._written else FIRST_S
            seconds, least = (TRIAL_S, 1) if TRIAL in os.environ else (seconds, LEAST_STEPS)
            self._next = done + max(least, int(seconds / seconds_per_step))
        return done >= self._next

    def request(self, step: int) -> None:
        """Ends the interval and starts to exchange its numbers. Every rank calls it after the same step, and there
        must be none under way."""
        assert self._pending is None
        self._next = 0
        times, usage, fed = self._times, self._usage, self._fed
        if times is None or not times.steps:
            return
        self._times = None
        self._written += 1
        self._usage, self._fed = Usage.now(), self._feed.sums()
        place, share, device = self._sampler.take()
        # The same names on every rank: parts of the device come and go, and systems report different counters.
        per_step = {
            "step_ms": times.step_s,
            "data_ms": times.data_s,
            "copy_ms": times.copy_s,
            "compute_ms": times.compute_s,
            "late_ms": times.late_s,
            **{f"host_{part}_ms": seconds for part, seconds in times.parts.items()},
            **{f"device_{part}_ms": times.device_parts.get(part, 0.0) for part in times.parts},
            **{f"{name}_ms": self._fed[name] - fed[name] for name in fed if name != "read_mb"},
        }
        row = {name: 1e3 * seconds / times.steps for name, seconds in per_step.items()}
        row |= {
            "read_mb": (self._fed["read_mb"] - fed["read_mb"]) / times.steps,
            "behind": times.behind / times.steps,
            "own_code_share": share,
        }
        used = self._usage.since(usage)
        row |= {name: used.get(name, math.nan) for name in USAGE_VALUES}
        row |= {name: device.get(name, 0.0) for name in GPU_VALUES}
        self._pending = _Pending(self._world, step, times.steps, row, place)

    def arrived(self, wait: bool = False) -> tuple[int, dict[str, Any]] | None:
        """The step at which an interval ended and its numbers, once they are there: lists over the ranks. What is
        zero everywhere is left out, and counters that no system reports. None before, unless it shall `wait`."""
        pending = self._pending
        if pending is None or not (wait or pending.is_done()):
            return None
        self._pending = None
        values, places = pending.values()
        found: dict[str, Any] = {
            name: [float(f"{value:.5g}") for value in row]
            for name, row in values.items()
            if any(row) and not (name in USAGE_VALUES and all(map(math.isnan, row)))
        }
        if any(places):
            found["own_code"] = list(places)
        return pending.step, {"steps": pending.steps, **found, **self.facts}


USAGE_VALUES = (*RATES, *LEVELS)
"""What `observe/usage.py` reports."""
GPU_VALUES = (
    *("gpu_use", "gpu_memory_mb", "gpu_clock", "gpu_celsius", "gpu_watts", "gpu_watts_limit"),
    *("gpu_hot", "gpu_capped"),
)
"""What `observe/nvml.py` reports."""


class _Pending:
    """A row of numbers and a short text, on their way between all ranks."""

    def __init__(self, world: World, step: int, steps: int, row: Mapping[str, float], text: str) -> None:
        self.step, self.steps, self._names = step, steps, tuple(row)
        letters = [float(ord(letter)) for letter in text[:PLACE].ljust(PLACE)]
        numbers = [*row.values(), *letters]
        self._table = torch.full((world.size, len(numbers)), _NEVER, dtype=torch.float64)
        # The maximum of a number and of minus infinity is the number; a NaN would win or lose by chance.
        self._table[world.rank] = torch.tensor([_NEVER if math.isnan(n) else n for n in numbers])
        self._work = world.all_reduce_max_async(self._table)

    def is_done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def values(self) -> tuple[dict[str, tuple[float, ...]], list[str]]:
        """The numbers by name and rank, and the text of each rank. Waits for them."""
        if self._work is not None:
            self._work.wait()
        count = len(self._names)
        rows = [[math.nan if n == _NEVER else n for n in row] for row in self._table.tolist()]
        columns = zip(*(row[:count] for row in rows), strict=True)
        places = ["".join(chr(int(number)) for number in row[count:]).rstrip() for row in rows]
        return dict(zip(self._names, columns, strict=True)), places
