"""The rules, one module per subject: pure functions of the figures that return the reasons that they find."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from drumline.diagnosis.evidence import Evidence
from drumline.diagnosis.figures import Figures
from drumline.diagnosis.rules import between, change, data, device, exchange, host
from drumline.diagnosis.slowdown import Slowdown, ranked

Rule = Callable[[Figures], Iterable[Slowdown]]
RULES: tuple[Rule, ...] = (
    *data.RULES,
    *host.RULES,
    *exchange.RULES,
    *between.RULES,
    *change.RULES,
    *device.RULES,
)


def diagnose(evidence: Evidence, rules: Iterable[Rule] = RULES) -> list[Slowdown]:
    """Why this is slow: the largest predicted saving first. Empty if nothing stands out."""
    if not evidence.intervals:
        return []
    figures = Figures(evidence)
    return ranked(found for rule in rules for found in rule(figures))
