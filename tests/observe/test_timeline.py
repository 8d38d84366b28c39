"""The timeline of a step, apart from the drawing itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drumline.core.machine import host_name
from drumline.observe.timeline import AFTER, TRACE, StepTimeline, in_turn
from drumline.parallel.lanes import Lanes, Op, Span


def test_lanes_of_two_machines_are_drawn_by_one_clock(tmp_path: Path) -> None:
    """Each counts the seconds since it was started."""

    class Two:
        def barrier(self) -> None:
            """All are here."""

        def all_gather_object(self, mine: tuple[str, float, list[Span]]) -> list[Any]:
            host, now, (span,) = mine
            assert host == host_name()
            theirs = Span(1, Op.FORWARD, 1, 0, span.start + 9e5, span.end + 9e5)
            return [mine, ("elsewhere", now + 9e5 + 0.5, [theirs]), (host, now + 0.5, [span])]

    world: Any = Two()
    recorder: Any = SimpleNamespace(
        recording=False, spans=lambda: [Span(0, Op.FORWARD, 0, 0, start=7.0, end=8.0)]
    )
    log: Any = print
    timeline = StepTimeline(Lanes("two", ["a", "b"], world, [recorder]), tmp_path, log)
    timeline.begin(0)
    timeline.after(AFTER)
    events = json.loads((tmp_path / TRACE).read_text())["traceEvents"]
    starts = [event["ts"] for event in events if event["ph"] == "X"]
    assert max(starts) - min(starts) < 1e6


def test_ranks_that_compute_the_whole_model_are_expected_to_be_alike() -> None:
    forward, backward = Op.FORWARD, Op.BACKWARD
    rehearsed = [
        Span(lane, kind, 0, micro, start, start + seconds)
        for lane, slower in ((0, 1.0), (1, 1.0), (2, 3.0))
        for micro, kind, start, seconds in (
            (0, forward, 50.0, 1.0 * slower),
            (1, forward, 57.0, 2.0 * slower),
            (1, backward, 60.0, 4.0 * slower),
            (0, backward, 52.0, 2.0 * slower),
        )
    ]
    found = in_turn(rehearsed, lanes=3)
    one = [(span.kind, span.micro, span.start, span.end) for span in found if span.lane == 2]
    assert one == [
        (forward, 0, 0.0, 1.0),
        (backward, 0, 1.0, 3.0),
        (forward, 1, 3.0, 5.0),
        (backward, 1, 5.0, 9.0),
    ]
    assert len(found) == 3 * 4
    assert in_turn([], lanes=3) == ()
