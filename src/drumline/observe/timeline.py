"""One step of a pipeline as spans on lanes, and as a trace for ui.perfetto.dev and chrome://tracing.

Promises: the predicted and the measured step share one time scale, and each starts at 0. Nothing is smoothed: what
overlaps gets a row of its own. Everything here is pure; `timeline_svg.py` draws it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from drumline.core.text import printable
from drumline.parallel.lanes import Kind, Span

COMPUTE = (Kind.FORWARD, Kind.BACKWARD)
TRANSFERS = (
    (Kind.SEND_OUTPUT, Kind.SEND_GRADIENT),
    (Kind.RECEIVE_INPUT, Kind.RECEIVE_GRADIENT),
    (Kind.REDUCE,),
)
"""What moves data, in the order of display. Waiting is not included: it is the lane's idle time."""


@dataclass(frozen=True)
class Step:
    """The predicted or the measured step, from time 0."""

    name: str
    spans: tuple[Span, ...]
    length: float

    def of(self, lane: int, kinds: Iterable[Kind]) -> list[Span]:
        """The spans of these kinds in a lane."""
        return [span for span in self.spans if span.lane == lane and span.kind in kinds]


def step_of(name: str, spans: Sequence[Span]) -> Step:
    """Spans sorted and shifted to start at 0."""
    assert spans, f"no {name} spans"
    assert all(0 <= span.end - span.start < math.inf for span in spans), f"{name} spans end before they start"
    zero = min(span.start for span in spans)
    moved = [replace(span, start=span.start - zero, end=span.end - zero) for span in spans]
    moved.sort(key=lambda span: (span.start, span.end))
    return Step(name, tuple(moved), max(span.end for span in moved))


def idle_times(half: Step, lane: int) -> Iterator[tuple[float, float, Span | None]]:
    """The times when a lane does not compute, each with what it computes next."""
    done = 0.0
    for span in half.of(lane, COMPUTE):
        if span.start > done:
            yield done, span.start, span
        done = max(done, span.end)
    if half.length > done:
        yield done, half.length, None


def rows_of(spans: Iterable[Span], slack: float = 0.0) -> list[list[Span]]:
    """Spans, sorted by start, in as few rows as possible. Spans of a row overlap by at most `slack` seconds."""
    rows: list[list[Span]] = []
    for span in spans:
        for row in rows:
            if row[-1].end <= span.start + slack:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


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
        for kinds, what in (([kind for kind in Kind if kind not in moved], ""), (moved, ", transfers")):
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
