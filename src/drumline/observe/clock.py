"""Always-on timing of the training step: what the host does, and on a GPU what the device does and why it is idle.

Promises: never synchronises with the device and uses constant memory. The host's parts sum to the wall time. On a
GPU, one step in `sample_every` is bracketed by events on the step's stream, outside a captured graph. The time
between two steps counts as waiting for data until the batch was on the device, and from then on as a late host. Never
guesses: until a GPU has finished its first measured step, its times are NaN, not zero.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from drumline.core.account import BETWEEN_STEPS, DATA, PARTS, Account, account

COMPUTING = ("compute", "teacher", "forward", "backward", "exchange", "optimizer")
"""The parts that are the step itself. On a CPU, the host computes in them."""


@dataclass(frozen=True)
class StepTimes:
    """Sums over the steps since the previous `take`, in seconds."""

    steps: int
    parts: Mapping[str, float]
    """What the host did: the parts of `core/account.py`."""
    data_s: float
    """Time that the device waited for batches."""
    compute_s: float
    """Time that it computed."""
    late_s: float
    """Time that it waited for the host, although the batch was there. On a CPU, the time between steps but for
    data."""

    @property
    def step_s(self) -> float:
        """All time but that of evaluations and saves."""
        return sum(seconds for part, seconds in self.parts.items() if part not in BETWEEN_STEPS)

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(
            self.steps + other.steps,
            {part: self.parts[part] + other.parts[part] for part in self.parts},
            self.data_s + other.data_s,
            self.compute_s + other.compute_s,
            self.late_s + other.late_s,
        )


class StepClock:
    """Times a loop that enters the parts of an account, and calls `step_begin/step_end` around a step.

    On a GPU, events bracket one step in `sample_every`. They are read when they are done, up to `depth` samples
    later. The default is prime, so that the samples do not coincide with work done every 2, 10 or 100 steps.
    """

    def __init__(
        self, device: torch.device, depth: int = 16, sample_every: int = 7, parts: Account = account
    ) -> None:
        self._parts = parts
        self._device: _DeviceTimer | None = None
        if device.type == "cuda":
            self._device = _DeviceTimer(
                depth,
                sample_every,
                make_event=lambda: torch.cuda.Event(enable_timing=True),
                current_stream=lambda: torch.cuda.current_stream(device),
            )
        self.ready: Callable[[], _Event | None] = lambda: None
        """The event after which the present batch was on the device, if it has one with a time."""
        self.begin()

    def begin(self) -> None:
        """Counts the calling thread, from now on."""
        self._parts.restart()
        self._before = dict.fromkeys(PARTS, 0.0)
        self._steps = 0
        self.resume()

    def resume(self) -> None:
        """After an evaluation or a save, which the device did not idle in."""
        if self._device is not None:
            self._device.resume()

    def step_begin(self) -> None:
        if self._device is not None:
            self._device.begin(self.ready)

    def step_end(self) -> None:
        if self._device is not None:
            self._device.end()
        self._steps += 1

    def so_far(self) -> StepTimes:
        """The sums since the last `take`. Never waits for the device."""
        sums = self._parts.sums()
        parts = {part: sums[part] - self._before[part] for part in PARTS}
        if self._device is not None:
            data, compute, late = self._device.mean()
            return StepTimes(
                self._steps, parts, data * self._steps, compute * self._steps, late * self._steps
            )
        compute = sum(parts[part] for part in COMPUTING)
        rest = sum(parts.values()) - sum(parts[part] for part in BETWEEN_STEPS)
        return StepTimes(self._steps, parts, parts[DATA], compute, rest - parts[DATA] - compute)

    def take(self) -> StepTimes:
        """The sums since the last call. Never waits for the device."""
        times = self.so_far()
        if self._device is not None:
            self._device.forget()
        for part, seconds in times.parts.items():
            self._before[part] += seconds
        self._steps = 0
        return times


class _Event(Protocol):
    """The methods of torch.cuda.Event used here, so that the timer can be tested without a GPU."""

    def record(self, stream: torch.cuda.Stream, /) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any, /) -> float: ...


@dataclass
class _Sample:
    """The events around one step: after the step before, at its start and at its end; and that of its batch."""

    before: _Event
    begin: _Event
    end: _Event
    ready: _Event | None = None
    begun: bool = False
    weight: int = 1

    def seconds(self) -> tuple[float, float, float]:
        """Waiting for data, computing, waiting for the host."""
        gap = self.before.elapsed_time(self.begin)
        data = min(max(self.before.elapsed_time(self.ready), 0.0), gap) if self.ready is not None else 0.0
        return data * 1e-3, self.begin.elapsed_time(self.end) * 1e-3, (gap - data) * 1e-3


class _DeviceTimer:
    """What a GPU does, from sampled steps.

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
        self._free = [_Sample(make_event(), make_event(), make_event()) for _ in range(depth)]
        self._running: deque[_Sample] = deque()
        self._open: _Sample | None = None
        self._current_stream = current_stream
        self._sample_every = sample_every
        self._due, self._since = 1, 0
        self._sums, self._weight = (0.0, 0.0, 0.0), 0
        self._mean = (math.nan, math.nan, math.nan)

    def resume(self) -> None:
        """The next step begins after something that is no step."""
        if self._open is None:
            self._open_if_due()
        else:
            self._open.before.record(self._current_stream())

    def begin(self, ready: Callable[[], _Event | None]) -> None:
        self._since += 1
        if self._open is not None:
            self._open.ready, self._open.begun = ready(), True
            self._open.begin.record(self._current_stream())

    def end(self) -> None:
        if self._open is not None and self._open.begun:
            self._open.end.record(self._current_stream())
            self._open.weight = self._since
            self._running.append(self._open)
            self._open, self._since, self._due = None, 0, self._sample_every
        self._open_if_due()

    def mean(self) -> tuple[float, float, float]:
        """Seconds of a step: waiting for data, computing, waiting for the host."""
        self._collect()
        if self._weight:
            data, compute, late = (total / self._weight for total in self._sums)
            self._mean = data, compute, late
        return self._mean

    def forget(self) -> None:
        """Starts new sums. Without a new sample, the last mean holds."""
        self._sums, self._weight = (0.0, 0.0, 0.0), 0

    def _open_if_due(self) -> None:
        """Opens a sample if the next step is due. None is free if the device is far behind."""
        if self._open is not None or self._since + 1 < self._due:
            return
        self._collect()
        if self._free:
            self._open = self._free.pop()
            self._open.begun = False
            self._open.before.record(self._current_stream())

    def _collect(self) -> None:
        while self._running and self._running[0].end.query():
            sample = self._running.popleft()
            data, compute, late = (
                total + seconds * sample.weight
                for total, seconds in zip(self._sums, sample.seconds(), strict=True)
            )
            self._sums = data, compute, late
            self._weight += sample.weight
            sample.ready = None
            self._free.append(sample)
