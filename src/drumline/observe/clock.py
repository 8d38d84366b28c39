"""Always-on timing of the training step: how long it waits for data, how long it computes.

Promises: never synchronises with the device, uses constant memory, and costs 0.5 us a step on a CPU (measured); on a
GPU, one step in `sample_every` also takes two event records and a query. Never guesses: until a GPU has finished its
first measured step, the compute time is NaN, not zero.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class StepTimes:
    """Sums over the steps since the previous `take`, in seconds.

    On a GPU the host runs ahead of the device, so `data_s` and `compute_s` may overlap. The GPU was idle for
    `wall_s - compute_s`.
    """

    steps: int
    data_s: float
    """Time that the host waited for batches."""
    compute_s: float
    """Time that the steps computed: host time on a CPU, on a GPU device time estimated from sampled steps."""
    wall_s: float
    """All time since the previous `take` (or since the clock was created), including evaluation."""


class StepClock:
    """Times a loop that calls `data_begin/data_end` around fetching and `step_begin/step_end` around a step.

    On a GPU, CUDA events bracket one step in `sample_every`. They are read when they are done, up to `depth` samples
    later. The default is prime, so that the samples do not coincide with work done every 2, 10 or 100 steps.
    """

    def __init__(self, device: torch.device, depth: int = 16, sample_every: int = 7) -> None:
        self._compute: _HostTimer | _DeviceTimer
        if device.type == "cuda":
            self._compute = _DeviceTimer(
                depth,
                sample_every,
                make_event=lambda: torch.cuda.Event(enable_timing=True),
                current_stream=lambda: torch.cuda.current_stream(device),
            )
        else:
            self._compute = _HostTimer()
        self._steps = 0
        self._data_s = 0.0
        self._data_from = 0.0
        self._taken_at = perf_counter()

    def data_begin(self) -> None:
        self._data_from = perf_counter()

    def data_end(self) -> None:
        self._data_s += perf_counter() - self._data_from

    def step_begin(self) -> None:
        self._compute.begin()

    def step_end(self) -> None:
        self._compute.end()
        self._steps += 1

    def data_share(self) -> float:
        """The fraction of the time since the last `take` that was spent waiting for data."""
        return self._data_s / max(1e-9, perf_counter() - self._taken_at)

    def take(self) -> StepTimes:
        """The sums since the last call. Never waits for the device."""
        now = perf_counter()
        times = StepTimes(self._steps, self._data_s, self._compute.take(self._steps), now - self._taken_at)
        self._steps, self._data_s, self._taken_at = 0, 0.0, now
        return times


class _HostTimer:
    """Compute time on a CPU: the host is the device."""

    def __init__(self) -> None:
        self._from = 0.0
        self._sum_s = 0.0

    def begin(self) -> None:
        self._from = perf_counter()

    def end(self) -> None:
        self._sum_s += perf_counter() - self._from

    def take(self, steps: int) -> float:
        sum_s, self._sum_s = self._sum_s, 0.0
        return sum_s


class _Event(Protocol):
    """The methods of torch.cuda.Event used here, so that the timer can be tested without a GPU."""

    def record(self, stream: torch.cuda.Stream, /) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any, /) -> float: ...


class _DeviceTimer:
    """Compute time on a GPU, from sampled steps.

    A sample counts for itself and the steps before it that were not sampled. The first counts for itself alone, so
    that a slow first step (compilation, autotuning) is not multiplied.
    """

    def __init__(
        self,
        depth: int,
        sample_every: int,
        make_event: Callable[[], _Event],
        current_stream: Callable[[], torch.cuda.Stream],
    ) -> None:
        assert depth >= 1
        assert sample_every >= 1
        self._free = [(make_event(), make_event()) for _ in range(depth)]
        self._running: deque[tuple[_Event, _Event, int]] = deque()
        self._open: tuple[_Event, _Event] | None = None
        self._current_stream = current_stream
        self._sample_every = sample_every
        self._due = 1
        self._since = 0
        self._sum_s = 0.0
        self._weight = 0
        self._mean_s = math.nan

    def begin(self) -> None:
        self._since += 1
        if self._since < self._due:
            return
        self._collect()
        # A pair is still open if a step raised; no pair is free if the device is far behind.
        if self._open is None and self._free:
            self._open = self._free.pop()
        if self._open is not None:
            self._open[0].record(self._current_stream())

    def end(self) -> None:
        if self._open is None:
            return
        begin, end = self._open
        end.record(self._current_stream())
        self._running.append((begin, end, self._since))
        self._open, self._since, self._due = None, 0, self._sample_every

    def take(self, steps: int) -> float:
        self._collect()
        if self._weight:
            self._mean_s = self._sum_s / self._weight
            self._sum_s, self._weight = 0.0, 0
        return self._mean_s * steps

    def _collect(self) -> None:
        while self._running and self._running[0][1].query():
            begin, end, weight = self._running.popleft()
            self._sum_s += begin.elapsed_time(end) * 1e-3 * weight
            self._weight += weight
            self._free.append((begin, end))
