"""Rules about what happens between steps: evaluations and checkpoints that take a large part of the time."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.text import percent
from drumline.diagnosis.figures import Figures, ms
from drumline.diagnosis.slowdown import Slowdown

EVALUATION_WORTH = 0.25
"""Fraction of the time. A set for evaluation a fifth of the training set's size, evaluated each epoch, is usual."""
CHECKPOINT_WORTH = 0.08
EVALUATION_AIM, CHECKPOINT_AIM = 0.1, 0.02
"""What the advice aims at."""


def evaluation_heavy(figures: Figures) -> Iterator[Slowdown]:
    measured = max(figures.get("host_evaluation_ms"))
    taken = measured * _usual(figures)
    share = taken / figures.wall_ms
    if share < EVALUATION_WORTH:
        return
    now = figures.setting("train.eval_every") or 0
    factor = _rarer(share, EVALUATION_AIM)
    flag = figures.flag("train.eval_every", f"{now * factor:g}") if now else ""
    cost = f"{ms(measured)} per step of {ms(figures.step_ms)}"
    text = f"evaluations take {percent(measured / figures.wall_ms)} of the time ({cost})"
    yield figures.slowdown(
        "evaluation", text, taken * (1 - 1 / factor), flag, "evaluate less often, or on fewer images"
    )


def checkpoint_heavy(figures: Figures) -> Iterator[Slowdown]:
    taken = max(figures.get("host_checkpoint_ms"))
    share = taken / figures.wall_ms
    if share < CHECKPOINT_WORTH:
        return
    factor = _rarer(share, CHECKPOINT_AIM)
    steps, epochs = figures.setting("checkpoint.every_steps"), figures.setting("checkpoint.every_epochs")
    if steps:
        flag = figures.flag("checkpoint.every_steps", steps * factor)
    else:
        flag = figures.flag("checkpoint.every_epochs", f"{epochs * factor:g}") if epochs else ""
    often = f", every {f'{steps} steps' if steps > 1 else 'step'}" if steps else ""
    cost = f"{ms(taken)} per step of {ms(figures.step_ms)}{often}"
    text = f"saving checkpoints takes {percent(share)} of the time ({cost})"
    saved = (taken + _guards_of_saves(figures, steps)) * (1 - 1 / factor)
    yield figures.slowdown(
        "checkpoint", text, saved, flag, "save checkpoints less often, or to a faster disk"
    )


def _guards_of_saves(figures: Figures, steps: int) -> float:
    """Milliseconds of a step: the fingerprints of saves, which come with each, besides those of every so many
    steps."""
    every = figures.setting("guard.every")
    if not steps or not every:
        return 0.0
    return max(figures.get("host_guards_ms")) * (1 / steps) / (1 / steps + 1 / every)


RULES = (evaluation_heavy, checkpoint_heavy)


def _usual(figures: Figures) -> float:
    """The evaluations that these epochs usually have, as a fraction of those that happened: a run that stops soon
    after one shows too many."""
    every, intervals = figures.setting("train.eval_every"), figures.evidence.intervals
    seen = sum(max(each.get("host_evaluation_ms")) > 0 for each in figures.steady)
    if not every or not seen or len(intervals) < 2:
        return 1.0
    return min(1.0, (intervals[-1].epoch - intervals[0].epoch) / every / seen)


def _rarer(share: float, aim: float) -> int:
    """How many times rarer something must be to take the fraction `aim` instead of `share` of the time."""
    factor, wanted = 1, (share / (1 - share)) / (aim / (1 - aim))
    while factor < wanted:
        factor *= 2
    return factor
