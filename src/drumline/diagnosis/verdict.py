"""The verdict as text: where the time goes, then the reasons, the most expensive first."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.account import BETWEEN_STEPS
from drumline.core.text import counted, percent, rate, wrapped_lines
from drumline.diagnosis.evidence import Evidence
from drumline.diagnosis.figures import Figures, ms
from drumline.diagnosis.rules.host import STALL_WORTH, stalled_ms
from drumline.diagnosis.slowdown import Slowdown

SHOWN = 0.005
"""Fractions of the time below this have no row of their own."""
BAR = 24
"""Characters of the longest bar."""
DIFFERS = 0.05
"""Ranks are listed one by one if a part differs by this fraction of a step."""
MOST_RANKS = 8
FEW_S = 5.0
"""Seconds of training that say little."""


def verdict_lines(evidence: Evidence, found: Sequence[Slowdown], width: int) -> list[str]:
    """What `drumline why` prints."""
    figures = Figures(evidence)
    return [*_head(figures, width), "", *_table(figures, width), "", *_reasons(figures, found, width)]


def time_parts(figures: Figures, rank: int) -> dict[str, float]:
    """Where a rank's time goes: milliseconds of a mean step, with evaluations and saves. On a GPU, what the device
    does; the parts add up to the whole time."""

    def of(name: str) -> float:
        return figures.get(name)[rank]

    between = {name: of(f"host_{name}_ms") for name in BETWEEN_STEPS}
    if figures.on_gpu:
        copy = of("copy_ms")
        step = {"data": of("data_ms") - copy, "copy": copy, "late": of("late_ms")}
        inside = {"teacher": of("device_teacher_ms"), "exchange": of("device_exchange_ms")}
        return {"compute": of("compute_ms") - sum(inside.values()), **inside, **step, **between}
    stall = stalled_ms(figures, rank)
    inside = {"exchange": of("host_exchange_ms"), "teacher": of("host_teacher_ms")}
    stall = stall if stall >= STALL_WORTH * figures.step_ms else 0.0
    rest = {name: of(f"host_{name}_ms") for name in ("guards", "log", "other")}
    # The loop may sleep outside the model, too: there it is a part of `other`.
    asleep = min(rest["other"], max(0.0, stall - of("compute_ms") + sum(inside.values())))
    rest["other"] -= asleep
    computes = of("compute_ms") - sum(inside.values()) - (stall - asleep)
    inside["stall"] = stall
    if not any(name.startswith("host_") for name in figures.whole.values):  # a run of an older version
        rest["unknown"] = max(0.0, of("step_ms") - of("compute_ms") - of("data_ms"))
    return {
        "compute": computes,
        **inside,
        "data": of("data_ms"),
        **rest,
        **between,
    }


MEANINGS = {
    "compute": "computing",
    "teacher": "the teacher",
    "exchange": "waiting for other ranks",
    "stall": "idle",
    "data": "waiting for data",
    "copy": "copying to the GPU",
    "late": "the GPU waits for the host",
    "guards": "guards",
    "log": "logging",
    "other": "between steps",
    "unknown": "not recorded",
    "evaluation": "evaluating",
    "checkpoint": "saving checkpoints",
}


def _head(figures: Figures, width: int) -> list[str]:
    intervals, steady = figures.evidence.intervals, figures.steady
    steps = sum(each.steps for each in steady)
    left_out = "" if len(steady) == len(intervals) else f", without the first {intervals[0].steps:,}"
    processes = f" on {figures.ranks} ranks" if figures.ranks > 1 else ""
    text = (
        f"{counted(steps, 'step')} up to step {intervals[-1].step:,}{processes}{left_out}: "
        f"{rate(figures.whole.images_per_s, 'img')} at {ms(figures.step_ms)} per step"
    )
    if figures.wall_ms > 1.01 * figures.step_ms:
        text += f", {rate(figures.images_per_s, 'img')} with evaluations and checkpoints"
    if (seconds := sum(each.seconds for each in steady)) < FEW_S:
        text += f". Only {seconds:.1f} s were measured, so chance may dominate"
    return wrapped_lines(text, width, "  ")


def _table(figures: Figures, width: int) -> list[str]:
    """A row for each part, with a bar; a column for each rank if they differ."""
    parts = [time_parts(figures, rank) for rank in range(figures.ranks)]
    walls = [sum(each.values()) for each in parts]
    shares = {
        name: [each[name] / wall if wall else 0.0 for each, wall in zip(parts, walls, strict=True)]
        for name in parts[0]
    }
    shares = {name: row for name, row in shares.items() if max(row) >= SHOWN}
    differing = any(max(row) - min(row) > DIFFERS for row in shares.values())
    if differing and 1 < figures.ranks <= MOST_RANKS:
        header = " " * 26 + "".join(f"{f'rank {rank}':>9}" for rank in range(figures.ranks))
        rows = [
            f"  {MEANINGS[name]:<24}" + "".join(f"{percent(share):>9}" for share in row)
            for name, row in shares.items()
        ]
        return [line[:width] for line in (header, *rows)]
    means = {name: sum(row) / len(row) for name, row in shares.items()}
    longest = max(means.values())
    bar = min(BAR, max(8, width - 50))
    return [
        f"  {MEANINGS[name]:<26} {percent(share):>6} {ms(share * sum(walls) / len(walls)):>9}  "
        + "█" * max(1, round(bar * share / longest))
        for name, share in means.items()
    ]


def _reasons(figures: Figures, found: Sequence[Slowdown], width: int) -> list[str]:
    if not found:
        computes = [
            sum(each for name, each in time_parts(figures, rank).items() if name in ("compute", "teacher"))
            for rank in range(figures.ranks)
        ]
        share = sum(computes) / sum(figures.whole.walls)
        text = f"nothing stands out: {percent(share)} of the time is computation"
        if figures.known("gpu_use"):
            text += f", the GPU is busy for {percent(figures.mean('gpu_use'))}"
        return wrapped_lines(text, width)
    lines = []
    for number, each in enumerate(found, 1):
        lines += wrapped_lines(f"{_capital(each.text)}.", width, "   ", f"{number}. ")
        advice = f"{_capital(each.fix)}." if each.fix else ""
        if each.flag:
            advice = f"Try `{each.flag}`. {advice}".rstrip()
        lines += wrapped_lines(advice, width, "   ", "   ")
        if each.saving:
            speeds = f"{rate(each.images_per_s, 'img')} -> {rate(each.predicted_images_per_s, 'img')}"
            lines.append(f"   Predicted: {speeds}, {percent(each.saving)} of the time saved.")
        lines.append("")
    return lines[:-1]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
