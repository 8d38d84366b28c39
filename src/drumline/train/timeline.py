"""One early step of a run as a picture: when each lane computed which micro-batch, beside what was to be expected.

Promises: one step is recorded, some steps after the start, and costs the others nothing; the prediction is made
before it, from the times of the rehearsed step. Writes `timeline.svg` and `timeline.json` (for ui.perfetto.dev) into
the run folder. A picture that cannot be written does not end a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Protocol

from drumline.core.files import write_text
from drumline.core.machine import host_name
from drumline.observe.timeline import perfetto
from drumline.observe.timeline_svg import timeline_svg
from drumline.parallel.pipeline.instructions import InstructionLists, Kind, Span
from drumline.parallel.pipeline.simulate import Times, bubble, simulate, step_time
from drumline.parallel.world import World

AFTER = 4
"""Steps after the start that are left to settle before one is recorded."""
SVG, TRACE = "timeline.svg", "timeline.json"


class Recording(Protocol):
    """An exchange that can record when it does what."""

    recording: bool

    def spans(self) -> list[Span]:
        """Of this process, in the last recorded step."""


class Picture:
    """Of one run. All ranks call every method."""

    def __init__(
        self,
        exchange: Recording,
        title: str,
        lanes: Sequence[str],
        world: World,
        folder: Path | None,
        log: Callable[[str], None],
    ) -> None:
        """`lanes` are the names of those that are drawn: of the first replica, where there are several."""
        self.exchange, self.title, self.lanes = exchange, title, lanes
        self.world, self.folder, self.log = world, folder, log
        self.at = -1
        self._predicted: tuple[Span, ...] = ()

    def follow(self, step: int) -> None:
        """Before step `step`, with which a run begins: some steps later, one is drawn."""
        self.at = step + AFTER

    def expect(self, lists: InstructionLists, rehearsed: Sequence[Span]) -> None:
        """From this process's share of a rehearsed step: how long one will take."""
        stages = 1 + max(item.stage for items in lists for item in items)
        self._predicted = simulate(lists, typical_times(self._drawn(rehearsed), stages))

    def expect_alike(self, rehearsed: Sequence[Span]) -> None:
        """The same where every lane computes the whole model, one micro-batch after the other."""
        self._predicted = in_turn(self._drawn(rehearsed), len(self.lanes))

    def before(self, step: int) -> None:
        if step == self.at:
            self.exchange.recording = True

    def after(self, step: int) -> None:
        """Draws the step if it was the one."""
        if step != self.at:
            return
        self.exchange.recording = False
        measured = self._drawn(self.exchange.spans())
        if self.folder is None or not measured:
            return
        try:
            title = f"{self.title}, step {step + 1:,}"
            write_text(self.folder / SVG, timeline_svg(measured, self._predicted, title, self.lanes))
            write_text(self.folder / TRACE, perfetto(measured, self._predicted, self.lanes))
        except OSError as error:
            self.log(f"WARNING: no picture of the step, {error.strerror or error}: {self.folder / SVG}")
            return
        if self._predicted:
            now, expected = (
                f"bubble {bubble(spans):.1%} of {step_time(spans) * 1e3:.1f} ms"
                for spans in (measured, self._predicted)
            )
            self.log(f"step {step + 1:,}: {now}, expected {expected}; picture in {self.folder / SVG}")

    def _drawn(self, mine: Sequence[Span]) -> list[Span]:
        """The spans of the lanes that are drawn, on every rank, by the first one's clock. Each machine counts from
        its own start: others are set by what all clocks say at one moment."""
        self.world.barrier()
        everybody = self.world.all_gather_object((host_name(), time.perf_counter(), list(mine)))
        host, now, _ = everybody[0]
        drawn: list[Span] = []
        for theirs, then, spans in everybody:
            behind = 0.0 if theirs == host else now - then
            drawn += [
                replace(span, start=span.start + behind, end=span.end + behind)
                for span in spans
                if span.lane < len(self.lanes)
            ]
        return drawn


def in_turn(spans: Sequence[Span], lanes: int) -> tuple[Span, ...]:
    """A step in which no lane is slower than another and none waits: every forward and backward as long as the middle
    of all lanes'. Pure."""
    taken: dict[tuple[int, Kind], list[float]] = {}
    for span in sorted(spans, key=lambda span: (span.micro, span.kind is Kind.BACKWARD)):
        taken.setdefault((span.micro, span.kind), []).append(span.end - span.start)
    found, now = [], 0.0
    for (micro, kind), seconds in taken.items():
        end = now + median(seconds)
        found += [Span(lane, kind, 0, micro, now, end) for lane in range(lanes)]
        now = end
    return tuple(found)


def typical_times(spans: Sequence[Span], stages: int) -> Times:
    """The middle of each stage's times over its micro-batches; of copies the shortest, for the others also waited for
    whoever receives them. Pure."""

    def of(kind: Kind, stage: int, typical: Callable[[list[float]], float] = median) -> float:
        found = [span.end - span.start for span in spans if span.kind is kind and span.stage == stage]
        return typical(found) if found else 0.0

    return Times(
        forward=[of(Kind.FORWARD, stage) for stage in range(stages)],
        backward=[of(Kind.BACKWARD, stage) for stage in range(stages)],
        transfer=[of(Kind.SEND_OUTPUT, stage, min) for stage in range(stages - 1)],
        reduce=[of(Kind.REDUCE, stage) for stage in range(stages)],
    )
