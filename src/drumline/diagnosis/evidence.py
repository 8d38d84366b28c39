"""What is known about the speed of a run: the times of every rank in each interval, its recipe and its machine.

Promises: reads only the small files of a run folder, also while the run trains. Values that an older run did not
record are missing, never zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.core.account import BETWEEN_STEPS
from drumline.observe.runs import metric_lines, run_settings

TIMES = "times"
"""The kind of the lines in metrics.jsonl that hold an interval's times."""
_OWN = ("time", "kind", "step", "epoch", "steps", "images_per_s")
"""Entries of such a line that are no facts."""


@dataclass(frozen=True)
class Interval:
    """The steps between two lines of times: one value per rank for everything that was measured."""

    step: int
    """The last step of the interval."""
    epoch: float
    steps: int
    images_per_s: float
    """In steps: without evaluations and saves."""
    values: Mapping[str, tuple[float, ...]]
    """By the names in metrics.jsonl: `data_ms`, `host_forward_ms`, `feed_read_ms`, `own_cores`, ... Milliseconds are
    those of a mean step."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What does not vary between ranks, and text: `workers`, `pool`, `cores`, `captured`, `own_code`, ..."""

    def get(self, name: str) -> tuple[float, ...]:
        """The value of each rank; zeros if it took no time or was not recorded."""
        return self.values.get(name, (0.0,) * self.ranks)

    def mean(self, name: str) -> float:
        """The mean over the ranks."""
        return sum(self.get(name)) / self.ranks

    @property
    def ranks(self) -> int:
        return len(self.values["step_ms"])

    @property
    def seconds(self) -> float:
        """How long it took, with its evaluations and saves."""
        return self.steps * max(self.walls) / 1e3

    @property
    def walls(self) -> tuple[float, ...]:
        """Of each rank: milliseconds per step, with evaluations and saves."""
        names = ("step_ms", *(f"host_{part}_ms" for part in BETWEEN_STEPS))
        return tuple(map(sum, zip(*map(self.get, names), strict=True)))


def merged(intervals: Sequence[Interval]) -> Interval:
    """Several intervals as one. What was not recorded in all of them is a mean over those that have it; the facts are
    those of the last."""
    last, steps = intervals[-1], sum(each.steps for each in intervals)
    values = {}
    for name in {name: None for each in intervals for name in each.values}:
        # Times that are missing are zero; anything else is not known.
        having = [each for each in intervals if name in each.values or name.endswith("_ms")]
        weight = sum(each.steps for each in having)
        values[name] = tuple(
            sum(each.get(name)[rank] * each.steps for each in having) / weight for rank in range(last.ranks)
        )
    seconds = sum(each.steps / each.images_per_s for each in intervals if each.images_per_s)
    return Interval(last.step, last.epoch, steps, steps / seconds if seconds else 0.0, values, last.facts)


@dataclass(frozen=True)
class Evidence:
    """Everything that the rules read."""

    intervals: Sequence[Interval]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Dotted names and values; empty for a user's own loop."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """As environment.json records it."""
    arms: Mapping[str, float] = field(default_factory=dict)
    """Images per second in measured trials: `synthetic`, `cold`, `cached`."""


def read_evidence(run: Path) -> Evidence:
    """The evidence in a run folder: of the processes that the run has now, if a resume has changed their number."""
    lines = (line for line in metric_lines(run) if line.get("kind") == TIMES)
    intervals = [_interval(line) for line in lines if _is_whole(line)]
    intervals = [each for each in intervals if each.ranks == intervals[-1].ranks]
    try:
        environment = json.loads((run / "environment.json").read_text())
    except (OSError, ValueError):
        environment = {}
    return Evidence(intervals, run_settings(run) or {}, environment if isinstance(environment, dict) else {})


def _is_whole(line: Mapping[str, Any]) -> bool:
    """Whether a line has what every rule reads. A damaged one has not."""
    ranks = line.get("step_ms")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(each, int | float) for each in ranks):
        return False
    numbers = all(
        isinstance(line.get(name), int | float) for name in ("step", "epoch", "steps", "images_per_s")
    )
    lists = (value for value in line.values() if isinstance(value, list))
    return numbers and line["steps"] > 0 and all(len(each) == len(ranks) for each in lists)


def _interval(line: Mapping[str, Any]) -> Interval:
    values, facts = {}, {}
    for name, value in line.items():
        if isinstance(value, list) and all(isinstance(each, int | float) for each in value):
            values[name] = tuple(value)
        elif name not in _OWN and name not in line.get("nonfinite", ()):
            facts[name] = value
    return Interval(line["step"], line["epoch"], line["steps"], line["images_per_s"], values, facts)
