"""The timeline of one early step: when each lane computed which micro-batch, next to the prediction.

Promises: one step is recorded, some steps after the start, and the other steps cost nothing. The prediction is made
before it, from the times of a rehearsed step. Writes `timeline.svg` (`timeline_svg.py`) and `timeline.json`, a trace
for ui.perfetto.dev and chrome://tracing, into the run folder. If they cannot be written, the run continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from drumline.core.files import write_text
from drumline.core.machine import host_name
from drumline.core.text import printable
from drumline.observe.run_log import Log
from drumline.observe.timeline_svg import TRANSFERS, Step, rows_of, step_of, timeline_svg
from drumline.parallel.lanes import Lanes, Op, Span, StageTimes, bubble, simulate, step_time
from drumline.parallel.strategy import Strategy

AFTER = 4
"""Steps after the start before one is recorded: the first ones are slower."""
SVG, TRACE = "timeline.svg", "timeline.json"


class StepTimeline:
    """Records one step of a run. All processes call every method."""

    def __init__(self, lanes: Lanes, folder: Path | None, log: Log) -> None:
        self.lanes, self.folder = lanes, folder
        self._log = log
        self._step = -1
        self._predicted: tuple[Span, ...] = ()

    @staticmethod
    def of(strategy: Strategy, model: str, folder: Path | None, log: Log) -> StepTimeline | None:
        """The timeline of a run; None where it would show one forward and one backward."""
        lanes = strategy.lanes()
        if lanes is None:
            return None
        return StepTimeline(replace(lanes, title=f"{model}, {lanes.title}"), folder, log)

    def begin(self, step: int) -> None:
        """Before the first step of a run: the step to record comes some steps later."""
        self._step = step + AFTER

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the step that is computed inside."""
        self.lanes.record(True)
        try:
            yield
        finally:
            self.lanes.record(False)

    def predict(self) -> None:
        """From the step just recorded: how long each part of a step will take."""
        spans, lists = self._gathered(), self.lanes.instructions
        if lists is None:
            self._predicted = in_turn(spans, len(self.lanes.names))
        else:
            stages = 1 + max(item.stage for items in lists for item in items)
            self._predicted = simulate(lists, typical_times(spans, stages))

    def before(self, step: int) -> None:
        """At the beginning of each step."""
        if step == self._step:
            self.lanes.record(True)

    def after(self, step: int) -> None:
        """At the end of each step: draws the one that was recorded."""
        if step != self._step:
            return
        self.lanes.record(False)
        measured = self._gathered()
        if self.folder is None or not measured:
            return
        try:
            title, names = f"{self.lanes.title}, step {step + 1:,}", self.lanes.names
            write_text(self.folder / SVG, timeline_svg(measured, self._predicted, title, names))
            write_text(self.folder / TRACE, perfetto(measured, self._predicted, names))
        except OSError as error:
            self._log(f"WARNING: no timeline of the step, {error.strerror or error}: {self.folder / SVG}")
            return
        if self._predicted:
            now, expected = (
                f"bubble {bubble(spans):.1%} of {step_time(spans) * 1e3:.1f} ms"
                for spans in (measured, self._predicted)
            )
            # Whole models side by side have no bubble that a person would wait for.
            show = self.lanes.instructions is not None
            self._log(f"step {step + 1:,}: {now}, expected {expected}; timeline in {self.folder / SVG}", show)

    def _gathered(self) -> list[Span]:
        """The spans of the lanes to draw, on every process, by the first one's clock. Each machine's clock has its
        own origin: the others are set by what all clocks show at one moment."""
        world = self.lanes.world
        world.barrier()
        every = world.all_gather_object((host_name(), time.perf_counter(), self.lanes.spans()))
        host, now, _ = every[0]
        drawn: list[Span] = []
        for theirs, then, spans in every:
            behind = 0.0 if theirs == host else now - then
            drawn += [
                replace(span, start=span.start + behind, end=span.end + behind)
                for span in spans
                if span.lane < len(self.lanes.names)
            ]
        return drawn


def in_turn(spans: Sequence[Span], lanes: int) -> tuple[Span, ...]:
    """A step in which no lane is slower than another and none waits: every forward and backward takes the median of
    all lanes. Pure."""
    taken: dict[tuple[int, Op], list[float]] = {}
    for span in sorted(spans, key=lambda span: (span.micro, span.kind is Op.BACKWARD)):
        taken.setdefault((span.micro, span.kind), []).append(span.end - span.start)
    found, now = [], 0.0
    for (micro, kind), seconds in taken.items():
        end = now + median(seconds)
        found += [Span(lane, kind, 0, micro, now, end) for lane in range(lanes)]
        now = end
    return tuple(found)


def typical_times(spans: Sequence[Span], stages: int) -> StageTimes:
    """The median of each stage's times over its micro-batches; of copies the shortest, because the others include
    waiting for the receiver. Pure."""

    def of(kind: Op, stage: int, typical: Callable[[list[float]], float] = median) -> float:
        found = [span.end - span.start for span in spans if span.kind is kind and span.stage == stage]
        return typical(found) if found else 0.0

    return StageTimes(
        forward=[of(Op.FORWARD, stage) for stage in range(stages)],
        backward=[of(Op.BACKWARD, stage) for stage in range(stages)],
        transfer=[of(Op.SEND_OUTPUT, stage, min) for stage in range(stages - 1)],
        reduce=[of(Op.REDUCE, stage) for stage in range(stages)],
    )


def perfetto(measured: Sequence[Span], predicted: Sequence[Span] | None, lanes: Sequence[str]) -> str:
    """Trace events (JSON): a process for the measured and the predicted step, a thread for each lane and for its
    transfers. Viewers drop events of one thread that overlap without nesting, so such events get another thread."""
    events = list(_process_events(1, step_of("measured", measured), lanes))
    if predicted:
        events += _process_events(2, step_of("predicted", predicted), lanes)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _process_events(pid: int, step: Step, lanes: Sequence[str]) -> Iterator[dict[str, object]]:
    yield _named("process", pid, 0, step.name)
    yield _sorted("process", pid, 0)
    tid = 0
    for lane, name in enumerate(lanes):
        moved = [kind for kinds in TRANSFERS for kind in kinds]
        for kinds, what in (([kind for kind in Op if kind not in moved], ""), (moved, ", transfers")):
            for row, spans in enumerate(rows_of(step.of(lane, kinds)) or [[]]):
                tid += 1
                yield _named("thread", pid, tid, f"{name}{what}" + (f" ({row + 1})" if row else ""))
                yield _sorted("thread", pid, tid)
                for span in spans:
                    yield _slice(pid, tid, span)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": printable(name)}}


def _sorted(what: str, pid: int, tid: int) -> dict[str, object]:
    place = {"sort_index": tid or pid}
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_sort_index", "args": place}


def _slice(pid: int, tid: int, span: Span) -> dict[str, object]:
    # Eighths of a microsecond are exact in binary: no viewer's rounding makes neighbours overlap.
    start, end = (round(time * 8e6) / 8 for time in (span.start, span.end))
    name = f"{span.kind} {span.micro}" if span.micro >= 0 else str(span.kind)
    args = {"stage": span.stage, "micro-batch": span.micro} if span.micro >= 0 else {"stage": span.stage}
    place = {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": end - start}
    return place | {"name": name, "cat": str(span.kind), "args": args}
