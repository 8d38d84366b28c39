"""A finding of a guard, the exception that stops training with it, and the reporter that prints or raises it.

Promises: a finding says what is wrong, where, since when and what to do. A reporter raises it or prints it once per
guard, and a warning names the option that silences it. Rejects unknown actions and unknown guards in `ignore`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from drumline.core.errors import UserError

Action = Literal["stop", "warn"]

GUARDS = (
    "accumulation",
    "averaging",
    "buffers",
    "bypass",
    "clipping",
    "device",
    "drift",
    "ema",
    "eval-mode",
    "evaluation",
    "frozen-norms",
    "gather",
    "hidden-nan",
    "inputs",
    "labels",
    "loss",
    "memory",
    "modes",
    "non-finite",
    "parameters",
    "rounding",
    "same-samples",
    "scaler",
    "schedule",
    "seed",
    "set-epoch",
    "setup",
    "shared-gpu",
    "stale-gradients",
    "steps",
    "teacher",
    "train-mode",
    "waiting",
    "zero-grad",
    "zero-gradients",
)
"""The guards of a user's loop (docs/guards.md)."""


@dataclass(frozen=True)
class Finding:
    """One mistake. `guard` is the guard's name ("bypass", "drift", ...) in code, messages and documentation.

    `where` names the tensor, rank, file and line, as far as they are known. `since` names a step or a moment. Empty
    fields are not printed.
    """

    guard: str
    what: str
    where: str = ""
    since: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"drumline guard [{self.guard}]: {self.what}"]
        for label, text in (("where", self.where), ("since", self.since), ("fix", self.fix)):
            if text:
                lines.append(f"  {label}: {text}")
        return "\n".join(lines)


Found = tuple[Finding, bool]
"""A finding, and whether it is certain. Only certain findings stop a script; the others warn."""


class GuardError(RuntimeError):
    """A guard stopped training. `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(str(finding))


class Reporter:
    """Reports findings: raises `GuardError`, or prints the first finding of each guard on stderr."""

    def __init__(self, action: Action, ignore: Collection[str] = ()) -> None:
        if action not in ("stop", "warn"):
            raise UserError(f"guard: action={action!r} is unknown", 'use action="stop" or action="warn"')
        for guard in ignore:
            if guard not in GUARDS:
                near = get_close_matches(guard, GUARDS, 1)
                raise UserError(
                    f"guard: ignore={guard!r} is unknown",
                    f"use {near[0]!r}" if near else f"use one of: {', '.join(GUARDS)}",
                )
        self.action = action
        self.ignore = frozenset(ignore)
        self.reported: list[Finding] = []

    def report(self, finding: Finding) -> None:
        """Stops, or warns once per guard."""
        if self.action == "stop" and finding.guard not in self.ignore:
            self.reported.append(finding)
            raise GuardError(finding)
        self.warn(finding)

    def warn(self, finding: Finding) -> None:
        """Warns once per guard, whatever the action."""
        if not self.is_done(finding.guard):
            self.reported.append(finding)
            print(f"{finding}\n  silence: ignore=[{finding.guard!r}]", file=sys.stderr, flush=True)

    def is_done(self, guard: str) -> bool:
        """Whether this guard has reported or is ignored, so that it does not need to check any more."""
        return guard in self.ignore or any(finding.guard == guard for finding in self.reported)


def rank_names(ranks: Collection[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def listed(names: Collection[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
