"""Tries the best change that a diagnosis names in a short run, and compares the speed with the prediction.

Promises: before and after are measured in the same way, one after the other, and the prediction comes before both.
All but `apply` is pure.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.core.errors import UserError
from drumline.core.text import percent, rate
from drumline.diagnosis.evidence import Evidence
from drumline.diagnosis.figures import Figures
from drumline.diagnosis.slowdown import Slowdown
from drumline.diagnosis.trial import Command

PAUSES = {"evaluation": "train.eval_every", "checkpoint": "checkpoint.every_epochs"}
"""The reasons that are about what happens between steps, with the field that counts epochs."""
CYCLES = 2
"""Evaluations or saves that a measurement of them must see."""
LONGEST = 120.0
"""The longest such measurement without an explicit --seconds."""


@dataclass(frozen=True)
class Applied:
    """A change, as it was predicted and as it was measured: images per second over all of the time."""

    found: Slowdown
    before: float
    after: float
    command: str
    """The command line with the change."""

    @property
    def predicted(self) -> float:
        return self.before / (1 - self.found.saving)

    @property
    def error(self) -> float:
        """How far the measured speed is from the predicted one, as a fraction of it."""
        return self.after / self.predicted - 1

    @property
    def saved(self) -> float:
        """The fraction of the time that the change has saved; negative if it costs time."""
        return 1 - self.before / self.after

    def lines(self) -> list[str]:
        """For people."""
        off = percent(abs(self.error))
        than = (
            f"{off} {'faster' if self.error > 0 else 'slower'} than predicted"
            if off != percent(0)
            else "as predicted"
        )
        text = (
            f"{self.found.flag}: {rate(self.before, 'img')} before, predicted {rate(self.predicted, 'img')}, "
            f"measured {rate(self.after, 'img')}: {than}"
        )
        return [text, self.command if self.after > self.before else "the change does not help here"]

    def as_dict(self) -> dict[str, Any]:
        """For the line of JSON."""
        return {
            "code": self.found.code,
            "flag": self.found.flag,
            "before": self.before,
            "predicted": self.predicted,
            "measured": self.after,
            "error": self.error,
            "predicted_saving": self.found.saving,
            "measured_saving": self.saved,
            "command": self.command,
        }


def choose(findings: Sequence[Slowdown]) -> Slowdown:
    """The best reason that a setting removes."""
    for each in findings:
        if each.flag and each.saving > 0:
            return each
    if findings:
        raise UserError(
            f"no setting removes what was found: {findings[0].text}",
            findings[0].fix or "see docs/why-slow.md",
        )
    raise UserError("nothing stands out, so there is nothing to apply", "")


def seconds_needed(found: Slowdown, evidence: Evidence, seconds: float) -> float:
    """How long to measure: long enough for some evaluations or saves, if the change is about them."""
    field = PAUSES.get(found.code)
    name, _, value = found.flag.partition("=")
    if field is None or not value:
        return seconds
    figures = Figures(evidence)
    steps = float(value)
    if name == field:
        last = evidence.intervals[-1]
        steps *= last.step / last.epoch
    # A cycle may have begun when the measurement begins.
    needed = (CYCLES + 1) * steps * figures.wall_ms * (1 - found.saving) / 1e3
    if needed > max(seconds, LONGEST):
        raise UserError(
            f"{found.flag}: {CYCLES + 1} times that many steps take {needed:,.0f} s, too long for a short run",
            f"give --seconds {needed:.0f} to measure it anyway",
        )
    return max(seconds, math.ceil(needed))


def apply(
    command: Command, found: Slowdown, before: Evidence | None, run: Callable[[Command], Evidence]
) -> Applied:
    """Measures a command with the change, and first as it is, unless `before` is that measurement. `run` runs a
    command for a short time."""
    changed = command.having(*shlex.split(found.flag))
    speeds = []
    for evidence in (before or run(command), run(changed)):
        if len(evidence.intervals) < 2:
            raise UserError("the short run was too short to be measured", "give a larger --seconds")
        speeds.append(Figures(evidence).images_per_s)
    before_speed, after_speed = speeds
    return Applied(found, before_speed, after_speed, str(changed))
