"""What a guard found, in words, and the two ways to tell it.

Promises: a finding always says what is wrong, where, since when and what to do, each on a line of its own; `tell`
stops with it or prints it once per guard, and does nothing else. Refuses any action but "stop" and "warn".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from drumline.errors import UserError

Action = Literal["stop", "warn"]


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

    def __init__(self, action: Action) -> None:
        if action not in ("stop", "warn"):
            raise UserError(f"guard: action={action!r} is unknown", 'use action="stop" or action="warn"')
        self.action = action
        self.told: list[Finding] = []

    def tell(self, finding: Finding) -> None:
        """Stops, or warns once per guard."""
        if self.action == "stop":
            self.told.append(finding)
            raise Stopped(finding)
        self.warn(finding)

    def warn(self, finding: Finding) -> None:
        """Warns once per guard, whatever the action."""
        if not self.has_told(finding.guard):
            self.told.append(finding)
            print(finding, file=sys.stderr, flush=True)

    def has_told(self, guard: str) -> bool:
        """Whether this guard has spoken, so that it need not look any more."""
        return any(told.guard == guard for told in self.told)
