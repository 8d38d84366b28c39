"""Always-on timing of the training step: what the host does, and on a GPU what the device does and why it is idle.

Promises: never synchronises with the device and uses constant memory. The host's parts sum to the wall time. On a
GPU, one step in `sample_every` is bracketed by events on the step's stream, outside a captured graph; if the step is
not captured, its parts are, too. The time between two steps counts as waiting for data until the batch was on the
device (of that, as a copy once it was on the host), and from then on as a late host. A batch that the GPU makes by
itself counts as data from the moment at which the loop asks for it. Never guesses: until a GPU has finished its first
measured step, its times are NaN, not zero.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from drumline.core.account import BACKWARD, BETWEEN_STEPS, DATA, EXCHANGE, PARTS, Account, account

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
    copy_s: float = 0.0
    """The part of `data_s` in which the batch was on its way to the device."""
    behind: float = 0.0
    """How many steps the device had begun before the host had started all their work: the host is not ahead."""
    device_parts: Mapping[str, float] = field(default_factory=dict)
    """What the device did in the parts of a step that is not captured."""

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
            self.copy_s + other.copy_s,
            self.behind + other.behind,
            _added(self.device_parts, other.device_parts),
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
        self.batch_events: Callable[[], BatchEvents] = lambda: NO_EVENTS
        """Those of the present batch."""
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
            self._parts.listener = self._device.mark if self._device.begin(self.batch_events) else None

    def step_end(self) -> None:
        if self._device is not None:
            self._parts.listener = self._device.between if self._device.end() else None
        self._steps += 1

    def so_far(self) -> StepTimes:
        """The sums since the last `take`. Never waits for the device."""
        sums = self._parts.sums()
        parts = {part: sums[part] - self._before[part] for part in PARTS}
        if self._device is not None:
            return StepTimes(self._steps, parts, *self._device.mean().times(self._steps))
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


class BatchEvents(NamedTuple):
    """The events on a batch's way to the device."""

    arrived: _Event | None = None
    """Its copy began."""
    ready: _Event | None = None
    """It was on the device."""


NO_EVENTS = BatchEvents()
MOST_MARKS = 64
"""Parts of one step that are timed; beyond this, the last one takes the rest."""


class DeviceTimes(NamedTuple):
    """Seconds of a step on the device, or of several."""

    data_s: float = 0.0
    compute_s: float = 0.0
    late_s: float = 0.0
    copy_s: float = 0.0
    behind: float = 0.0
    """Steps that the device had begun before the host had started all their work."""
    parts: Mapping[str, float] = MappingProxyType({})

    def times(self, factor: float) -> DeviceTimes:
        return DeviceTimes(
            self.data_s * factor,
            self.compute_s * factor,
            self.late_s * factor,
            self.copy_s * factor,
            self.behind * factor,
            {name: seconds * factor for name, seconds in self.parts.items()},
        )

    def plus(self, other: DeviceTimes) -> DeviceTimes:
        return DeviceTimes(
            self.data_s + other.data_s,
            self.compute_s + other.compute_s,
            self.late_s + other.late_s,
            self.copy_s + other.copy_s,
            self.behind + other.behind,
            _added(self.parts, other.parts),
        )


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


UNKNOWN = DeviceTimes(math.nan, math.nan, math.nan, math.nan, math.nan)


@dataclass
class _Sample:
    """The events around one step: after the step before, at its start, at its parts and at its end; and those of its
    batch."""

    before: _Event
    begin: _Event
    end: _Event
    batch: BatchEvents = NO_EVENTS
    marks: list[tuple[str, _Event]] = field(default_factory=list)
    spare: list[_Event] = field(default_factory=list)
    making: _Event | None = None
    """The loop began to ask for the batch."""
    begun: bool = False
    behind: bool = False
    weight: int = 1

    def times(self) -> DeviceTimes:
        gap = self.before.elapsed_time(self.begin)
        data, copy = 0.0, 0.0
        if self.batch.ready is None and self.making is not None:
            data = self.making.elapsed_time(self.begin)
        if self.batch.ready is not None:
            data = min(max(self.before.elapsed_time(self.batch.ready), 0.0), gap)
        if self.batch.arrived is not None:
            copy = max(0.0, data - max(self.before.elapsed_time(self.batch.arrived), 0.0))
        parts: dict[str, float] = {}
        for (name, event), (_, after) in pairwise([*self.marks, ("", self.end)]):
            parts[name] = parts.get(name, 0.0) + event.elapsed_time(after) * 1e-3
        compute = self.begin.elapsed_time(self.end)
        return DeviceTimes(
            data * 1e-3, compute * 1e-3, (gap - data) * 1e-3, copy * 1e-3, float(self.behind), parts
        )

    def free(self) -> None:
        """Drops what belongs to its step."""
        self.spare += [event for _, event in self.marks]
        self.spare += [self.making] if self.making is not None else []
        self.making = None
        self.marks, self.batch, self.begun, self.behind = [], NO_EVENTS, False, False


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
        self._make_event = make_event
        self._free = [_Sample(make_event(), make_event(), make_event()) for _ in range(depth)]
        self._running: deque[_Sample] = deque()
        self._open: _Sample | None = None
        self._current_stream = current_stream
        self._sample_every = sample_every
        self._due, self._since = 1, 0
        self._sum, self._weight = DeviceTimes(), 0
        self._mean = UNKNOWN

    def resume(self) -> None:
        """The next step begins after something that is no step."""
        if self._open is None:
            self._open_if_due()
        else:
            self._open.before.record(self._current_stream())

    def begin(self, batch: Callable[[], BatchEvents]) -> bool:
        """Whether this step is sampled."""
        self._since += 1
        if self._open is None:
            return False
        if self._open.begun:  # a step that raised
            self._open.free()
        self._open.batch, self._open.begun = batch(), True
        self._open.begin.record(self._current_stream())
        return True

    def between(self, part: str, by_loop: bool) -> None:
        """The loop enters a part between two steps, before one that is sampled. A batch without events is made on the
        step's own stream, from then on."""
        if part == DATA and by_loop and self._open is not None and self._open.making is None:
            self._open.making = self._open.spare.pop() if self._open.spare else self._make_event()
            self._open.making.record(self._current_stream())

    def mark(self, part: str, by_loop: bool) -> None:
        """A part of the sampled step begins. Autograd's own threads may only say that an exchange does."""
        sample = self._open
        if sample is None or len(sample.marks) >= MOST_MARKS:
            return
        if not by_loop and not (part == EXCHANGE and sample.marks and sample.marks[-1][0] == BACKWARD):
            return
        event = sample.spare.pop() if sample.spare else self._make_event()
        event.record(self._current_stream())
        sample.marks.append((part, event))

    def end(self) -> bool:
        """Whether the next step is sampled."""
        if self._open is not None and self._open.begun:
            self._open.behind = self._open.begin.query()
            self._open.end.record(self._current_stream())
            self._open.weight = self._since
            self._running.append(self._open)
            self._open, self._since, self._due = None, 0, self._sample_every
        self._open_if_due()
        return self._open is not None

    def mean(self) -> DeviceTimes:
        """A mean step."""
        self._collect()
        if self._weight:
            self._mean = self._sum.times(1 / self._weight)
        return self._mean

    def forget(self) -> None:
        """Starts new sums. Without a new sample, the last mean holds."""
        self._sum, self._weight = DeviceTimes(), 0

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
            self._sum = self._sum.plus(sample.times().times(sample.weight))
            self._weight += sample.weight
            sample.free()
            self._free.append(sample)
