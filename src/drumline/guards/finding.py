"""What a guard found, in words, and the two ways to tell it.

Promises: a finding always says what is wrong, where, since when and what to do, each on a line of its own; `tell`
stops with it or prints it once per guard, and does nothing else. A warning says how to silence it. Refuses any action
but "stop" and "warn", and a guard in `ignore` that does not exist.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from drumline.core.errors import UserError

Action = Literal["stop", "warn"]

CODES = (
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
"""Every guard by its short name (docs/guards.md)."""


@dataclass(frozen=True)
class Finding:
    """One mistake. `guard` is its short name ("bypass", "drift", ...), the same in code, messages and documentation.

    `where` names the tensor, rank, file and line, as far as known; `since` a step, or the moment; empty lines
    are left out.
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


class Stopped(RuntimeError):
    """Training was stopped by a guard; `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(str(finding))


class Teller:
    """Tells findings: raises `Stopped`, or prints each guard's first one on stderr."""

    def __init__(self, action: Action, ignore: Collection[str] = ()) -> None:
        if action not in ("stop", "warn"):
            raise UserError(f"guard: action={action!r} is unknown", 'use action="stop" or action="warn"')
        for code in ignore:
            if code not in CODES:
                near = get_close_matches(code, CODES, 1)
                raise UserError(
                    f"guard: ignore={code!r} is unknown",
                    f"use {near[0]!r}" if near else f"use one of: {', '.join(CODES)}",
                )
        self.action = action
        self.ignore = frozenset(ignore)
        self.told: list[Finding] = []

    def tell(self, finding: Finding) -> None:
        """Stops, or warns once per guard."""
        if self.action == "stop" and finding.guard not in self.ignore:
            self.told.append(finding)
            raise Stopped(finding)
        self.warn(finding)

    def warn(self, finding: Finding) -> None:
        """Warns once per guard, whatever the action."""
        if not self.has_told(finding.guard):
            self.told.append(finding)
            print(f"{finding}\n  silence: ignore=[{finding.guard!r}]", file=sys.stderr, flush=True)

    def has_told(self, guard: str) -> bool:
        """Whether this guard has reported, or is ignored, so that it need not check any more."""
        return guard in self.ignore or any(told.guard == guard for told in self.told)
