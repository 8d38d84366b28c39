"""What is known about the speed of a run: the times of every rank in each interval, its recipe and its machine.

Promises: reads only the small files of a run folder, while the run goes on too. What an older run did not record is
missing, never zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.observe.runs import metric_lines, run_settings

TIMES = "times"
"""The kind of the lines in metrics.jsonl that hold an interval's times."""


@dataclass(frozen=True)
class Interval:
    """The steps between two lines of times: one value per rank for everything that was measured."""

    step: int
    """The last step of the interval."""
    epoch: float
    steps: int
    images_per_s: float
    values: Mapping[str, tuple[float, ...]]
    """By the names in metrics.jsonl: `data_ms`, `host_forward_ms`, `feed_read_ms`, `own_cores`, ... Milliseconds are
    those of a mean step."""

    def get(self, name: str) -> tuple[float, ...]:
        """The value of each rank; zeros if it took no time or was not recorded."""
        return self.values.get(name, (0.0,) * self.ranks)

    def mean(self, name: str) -> float:
        """The mean over the ranks."""
        return sum(self.get(name)) / self.ranks

    @property
    def ranks(self) -> int:
        return len(self.values["step_ms"])


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
    """The evidence in a run folder."""
    intervals = [_interval(line) for line in metric_lines(run) if line.get("kind") == TIMES]
    try:
        environment = json.loads((run / "environment.json").read_text())
    except (OSError, ValueError):
        environment = {}
    return Evidence(intervals, run_settings(run) or {}, environment)


def _interval(line: Mapping[str, Any]) -> Interval:
    values = {name: tuple(value) for name, value in line.items() if isinstance(value, list)}
    return Interval(line["step"], line["epoch"], line["steps"], line["images_per_s"], values)
