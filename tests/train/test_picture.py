"""The picture of a step, as far as it is not the drawing itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drumline.launch.world import host_name
from drumline.parallel.pipeline.instructions import Kind
from drumline.parallel.pipeline.simulate import Span
from drumline.train.picture import AFTER, TRACE, Picture


def test_lanes_of_two_machines_are_drawn_by_one_clock(tmp_path: Path) -> None:
    """Each counts the seconds since it was started."""

    class Two:
        def barrier(self) -> None:
            """All are here."""

        def collect(self, mine: tuple[str, float, list[Span]]) -> list[Any]:
            host, now, (span,) = mine
            assert host == host_name()
            theirs = Span(1, Kind.FORWARD, 1, 0, span.start + 9e5, span.end + 9e5)
            return [mine, ("elsewhere", now + 9e5 + 0.5, [theirs]), (host, now + 0.5, [span])]

    world: Any = Two()
    exchange: Any = SimpleNamespace(
        recording=False, spans=lambda: [Span(0, Kind.FORWARD, 0, 0, start=7.0, end=8.0)]
    )
    picture = Picture(exchange, "two", ["a", "b"], world, tmp_path, print)
    picture.follow(0)
    picture.after(AFTER)
    events = json.loads((tmp_path / TRACE).read_text())["traceEvents"]
    starts = [event["ts"] for event in events if event["ph"] == "X"]
    assert max(starts) - min(starts) < 1e6
