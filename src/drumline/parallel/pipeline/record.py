"""When a lane computed, waited and sent: read after the step, so that the step itself is not held up.

Promises: on a CPU, the host's clock; on a GPU, events on the streams that do the work, and no synchronizing between
`start` and `spans`. All times are of the host's monotonic clock, in seconds, so lanes of one machine fit together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from drumline.parallel.pipeline.instructions import Kind
from drumline.parallel.pipeline.simulate import Span

T = TypeVar("T")
Mark = float | torch.cuda.Event
"""A moment: of the host, or one that a stream comes to."""


class Recorder:
    """The notes of one lane, for one step at a time."""

    def __init__(self, lane: int, device: torch.device) -> None:
        self.lane, self.device = lane, device
        self._notes: list[tuple[Kind, int, int, Mark, Mark]] = []
        self._origin: tuple[float, torch.cuda.Event] | None = None

    def start(self) -> None:
        """Before the step: forgets the last one's notes; on a GPU, waits until it is idle, and ties its clock to the
        host's."""
        self._notes.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._origin = (time.perf_counter(), event)

    def now(self, stream: torch.cuda.Stream | None = None) -> Mark:
        """This moment on the lane's device; on a GPU, of the current stream or the one given."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def note(self, kind: Kind, stage: int, micro: int, start: Mark, end: Mark) -> None:
        """From any thread."""
        self._notes.append((kind, stage, micro, start, end))

    def spans(self) -> list[Span]:
        """After the step; on a GPU, waits for what was noted. In order of their start."""
        spans = [
            Span(self.lane, kind, stage, micro, self._seconds(start), self._seconds(end))
            for kind, stage, micro, start, end in self._notes
        ]
        return sorted(spans, key=lambda span: (span.start, span.end))

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._origin is not None, "a recorder of a GPU is started before the step"
        host, event = self._origin
        mark.synchronize()
        return host + event.elapsed_time(mark) / 1e3


def timed(recorder: Recorder | None, kind: Kind, micro: int, work: Callable[[], T]) -> T:
    """What the work gives; noted where there is a recorder."""
    if recorder is None:
        return work()
    start = recorder.now()
    result = work()
    recorder.note(kind, 0, micro, start, recorder.now())
    return result
