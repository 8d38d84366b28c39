"""The curves of two runs side by side: loss and top-1 at the epochs that both have evaluated, with their times.

Promises: pure, from the lines of metrics.jsonl. An epoch that only one run has is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.core.text import duration, loss_text

MOST = 10
"""Rows of the table, spread over the epochs; the last epoch is one of them."""


@dataclass(frozen=True)
class CurvePoint:
    """Both runs at the same epoch."""

    epoch: float
    loss: tuple[float | None, float | None]
    top1: tuple[float | None, float | None]
    seconds: tuple[float, float]
    """Since the first line of metrics, with pauses before resumes."""


def curve_points(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[CurvePoint]:
    """The evaluations that both runs have."""
    one, other = _evaluations(a), _evaluations(b)
    begin = [next((float(line["time"]) for line in lines if "time" in line), 0.0) for lines in (a, b)]
    return [
        CurvePoint(
            epoch,
            (_number(one[epoch], "loss"), _number(other[epoch], "loss")),
            (_number(one[epoch], "top1"), _number(other[epoch], "top1")),
            (float(one[epoch]["time"]) - begin[0], float(other[epoch]["time"]) - begin[1]),
        )
        for epoch in sorted(one.keys() & other.keys())
    ]


def curve_lines(points: Sequence[CurvePoint]) -> list[str]:
    """A table of at most `MOST` epochs."""
    if not points:
        return []
    step = max(1, -(-len(points) // MOST))
    shown = [*points[:-1][::step], points[-1]]
    head = (
        f"{'epoch':>7}{'loss A':>10}{'loss B':>10}{'top-1 A':>10}{'top-1 B':>10}{'time A':>10}{'time B':>10}"
    )
    rows = [
        f"{round(point.epoch, 2):>7g}"
        + "".join(f"{'-' if value is None else loss_text(value):>10}" for value in point.loss)
        + "".join(f"{'-' if value is None else f'{value:.2%}':>10}" for value in point.top1)
        + "".join(f"{duration(value):>10}" for value in point.seconds)
        for point in shown
    ]
    return [head, *rows]


def _evaluations(lines: Sequence[Mapping[str, Any]]) -> dict[float, Mapping[str, Any]]:
    found: dict[float, Mapping[str, Any]] = {}
    for line in lines:
        if line.get("kind") == "eval" and isinstance(line.get("epoch"), int | float) and "time" in line:
            found[round(float(line["epoch"]), 3)] = line
    return found


def _number(line: Mapping[str, Any], name: str) -> float | None:
    """A metric: of the averaged weights if there are any."""
    value = line.get(f"average_{name}", line.get(name))
    return float(value) if isinstance(value, int | float) else None
