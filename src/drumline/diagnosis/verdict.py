"""The verdict in lines of text: where the time goes, then the reasons, the most expensive first."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.text import percent, rate, wrapped_lines
from drumline.diagnosis.evidence import Evidence
from drumline.diagnosis.figures import Figures
from drumline.diagnosis.slowdown import Slowdown


def verdict_lines(evidence: Evidence, found: Sequence[Slowdown], width: int) -> list[str]:
    """What `drumline why` prints."""
    figures = Figures(evidence)
    computes = figures.mean("compute_ms") / figures.wall_ms
    if not found:
        return [f"nothing stands out: {percent(computes)} of the time computes"]
    lines = []
    for number, each in enumerate(found, 1):
        lines += wrapped_lines(each.text, width, "   ", f"{number}. ")
        speeds = f"{rate(each.images_per_s, 'img')} -> {rate(each.predicted_images_per_s, 'img')}"
        saved = f"saves {percent(each.saving)}: {speeds}"
        lines += wrapped_lines("; ".join(filter(None, [each.flag, each.fix, saved])), width, "   ", "   ")
    return lines
