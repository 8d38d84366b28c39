"""The rules: each is a pure function of the figures and returns the reasons that it finds; one module per subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from drumline.diagnosis.evidence import Evidence
from drumline.diagnosis.figures import Figures
from drumline.diagnosis.rules import between, change, data, device, exchange, host
from drumline.diagnosis.slowdown import Slowdown, ranked

RULES: tuple[Callable[[Figures], Iterable[Slowdown]], ...] = (
    *data.RULES,
    *host.RULES,
    *exchange.RULES,
    *between.RULES,
    *change.RULES,
    *device.RULES,
)


def diagnose(evidence: Evidence) -> list[Slowdown]:
    """Why this is slow: the largest predicted saving first. Empty if nothing stands out."""
    if not evidence.intervals:
        return []
    figures = Figures(evidence)
    return ranked(found for rule in RULES for found in rule(figures))
