"""Writes docs/images/timeline-1f1b.svg: a predicted step beside one whose computing takes a little longer.

Run `python docs/make_timeline_example.py` after changing how a timeline is drawn; a test fails while it is stale.
Both halves are simulated, so that the picture is the same on every machine; a run's own has a measured half.
"""

from __future__ import annotations

import random
from pathlib import Path

from drumline.observe.timeline_svg import timeline_svg
from drumline.parallel.lanes import Span, StageTimes, simulate
from drumline.parallel.pipeline.schedule import instruction_lists

PICTURE = Path(__file__).parent / "images" / "timeline-1f1b.svg"

_LANES = (
    "rank 0: stage 0 (conv1 .. layer1.1)",
    "rank 1: stage 1 (layer2.0 .. layer2.1)",
    "rank 2: stage 2 (layer3.0 .. layer3.1)",
    "rank 3: stage 3 (layer4.0 .. fc)",
)


def picture() -> str:
    """Four stages, eight micro-batches, two replicas that exchange gradients at the end."""
    title = "resnet18, 1f1b, 4 stages, 8 micro-batches (both halves simulated)"
    return timeline_svg(step(0.4, seed=0), step(0.0, seed=0), title, _LANES)


def step(spread: float, seed: int) -> tuple[Span, ...]:
    """Stages about as uneven as those of an even split; each up to `spread` milliseconds slower, by chance."""
    slower = random.Random(seed)
    forward = [(2.6, 2.2, 2.1, 2.0)[stage] + spread * slower.random() for stage in range(4)]
    times = StageTimes(
        forward=[time / 1e3 for time in forward],
        backward=[2 * time / 1e3 for time in forward],
        transfer=[0.0008, 0.0005, 0.0003],
        reduce=[0.0007, 0.0012, 0.0024, 0.0048],
    )
    return simulate(instruction_lists("1f1b", 4, 1, 8, True), times)


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(), encoding="utf-8")
