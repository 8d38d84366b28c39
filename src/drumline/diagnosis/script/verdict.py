"""The verdict on a user's own loop, in terms of its DataLoader and its lines of code.

Promises: pure. Uses the rules of `drumline why`, except for data, which has rules of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drumline.core.account import BETWEEN_STEPS, COMPUTE, DATA, OTHER, PARTS
from drumline.core.text import percent, rate
from drumline.diagnosis.evidence import Evidence
from drumline.diagnosis.figures import Figures, ms
from drumline.diagnosis.rules import RULES, data, diagnose
from drumline.diagnosis.script import rules
from drumline.diagnosis.script.ranks import evidence_of
from drumline.diagnosis.slowdown import Slowdown
from drumline.diagnosis.verdict import verdict_lines

_RULES = (*rules.RULES, *(rule for rule in RULES if rule not in data.RULES))
_NAMES = {DATA: "waiting for data", COMPUTE: "copying the batch", OTHER: "the script's other lines"}
_SHOWN = 0.005
"""Fraction of a step from which a part is listed."""


def diagnose_script(evidence: Evidence) -> list[Slowdown]:
    """Why a loop is slow; empty if nothing stands out."""
    found = [_in_script_words(each) for each in diagnose(evidence, _RULES)]
    named = any(each.code == rules.LINE for each in found)
    return [each for each in found if not (named and each.code in _WITHOUT_LINE)]


def lines(
    evidence: Evidence, found: Sequence[Slowdown], width: int, missing: Sequence[int] = ()
) -> list[str]:
    """What a clock prints at the end."""
    if not evidence.intervals:
        return ["drumline.clock: no step was timed"]
    text = "drumline.clock:"
    if missing:
        text += f" (without rank {', '.join(map(str, missing))}, which reported nothing)"
    return [text, *verdict_lines(evidence, found, width)]


def progress_line(message: Mapping[str, Any]) -> str:
    """One line on one rank, up to now."""
    evidence = evidence_of([message])
    if not evidence.intervals:
        return "drumline.clock: no step has been timed yet"
    found = diagnose_script(evidence)
    step = f"drumline.clock, step {evidence.intervals[-1].step:,}: {_summary(Figures(evidence))}"
    return f"{step}; {found[0].code}: {found[0].flag or found[0].fix}" if found else step


def _summary(figures: Figures) -> str:
    """The speed, and the parts of a step on the host."""
    step = figures.mean("step_ms")
    parts = {part: figures.mean(f"host_{part}_ms") for part in PARTS if part not in BETWEEN_STEPS}
    shown = [
        f"{_NAMES.get(part, part)} {percent(taken / step)}"
        for part, taken in sorted(parts.items(), key=lambda item: -item[1])
        if taken > _SHOWN * step
    ]
    text = f"{rate(figures.batch / figures.step_ms * 1e3, 'img')}, {ms(step)} per step: {', '.join(shown)}"
    for part in BETWEEN_STEPS:
        taken = max(figures.get(f"host_{part}_ms")) / figures.wall_ms
        text += f"; {part} {percent(taken)} of the time" if taken > _SHOWN else ""
    return text


def _in_script_words(found: Slowdown) -> Slowdown:
    """The same with the change as a script makes it."""
    flag, fix = _ADVICE.get(found.code, (found.flag, found.fix))
    return replace(found, flag=flag, fix=fix)


_ADVICE = {
    "small-batch": ("", "use a larger batch, and adapt the learning rate"),
    "threads": ("", "call torch.set_num_threads with the number of cores per process"),
    "cold-start": ("", "keep the data in a few large files, or on a local disk"),
    "launch": ("", "torch.compile the model, capture the step in a CUDA graph, or use a larger batch"),
    "late-host": ("", "look for .item(), print or file access between two steps"),
}
"""The change and what to do, for findings whose own advice is a setting or a command of Drumline's."""
_WITHOUT_LINE = ("stall", "late-host", "small-batch")
"""Findings that say the same as a line that is named."""
