"""Records when a lane computes, waits and sends. The times are read after the step, so recording does not delay it.

Promises: on a CPU the host's clock, on a GPU events on the streams that do the work, without synchronizing between
`start` and `spans`. Times are seconds of the host's monotonic clock, so lanes of one machine share a time axis.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from drumline.parallel.pipeline.instructions import Kind, Span

T = TypeVar("T")
Moment = float | torch.cuda.Event
"""A time of the host's clock, or an event that a stream reaches."""


class Recorder:
    """Records one lane, for one step at a time."""

    def __init__(self, lane: int, device: torch.device) -> None:
        self.lane, self.device = lane, device
        self._entries: list[tuple[Kind, int, int, Moment, Moment]] = []
        self._origin: tuple[float, torch.cuda.Event] | None = None

    def start(self) -> None:
        """Clears the entries of the step before. On a GPU, waits until it is idle and relates its clock to the
        host's."""
        self._entries.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._origin = (time.perf_counter(), event)

    def now(self, stream: torch.cuda.Stream | None = None) -> Moment:
        """The current moment on the lane's device: on a GPU, of `stream` or else the current stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def add(self, kind: Kind, stage: int, micro: int, start: Moment, end: Moment) -> None:
        """Adds one entry, from any thread."""
        self._entries.append((kind, stage, micro, start, end))

    def spans(self) -> list[Span]:
        """The entries in order of their start, after the step. On a GPU, waits for the recorded events."""
        spans = [
            Span(self.lane, kind, stage, micro, self._seconds(start), self._seconds(end))
            for kind, stage, micro, start, end in self._entries
        ]
        return sorted(spans, key=lambda span: (span.start, span.end))

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        assert self._origin is not None, "start() must be called before the step on a GPU"
        host, event = self._origin
        moment.synchronize()
        return host + event.elapsed_time(moment) / 1e3


def timed(recorder: Recorder | None, kind: Kind, micro: int, work: Callable[[], T]) -> T:
    """Returns what `work` returns, and records how long it took if there is a recorder."""
    if recorder is None:
        return work()
    start = recorder.now()
    result = work()
    recorder.add(kind, 0, micro, start, recorder.now())
    return result
