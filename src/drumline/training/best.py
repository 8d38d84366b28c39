"""Decides which evaluation is the best, and whether a run that no longer improves stops early.

Promises: pure functions of the evaluations so far, which checkpoints record. Every rank therefore decides the same,
and a run that is killed and resumed stops after the same step. A value that is not finite is never the best.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from drumline.core.errors import UserError
from drumline.core.text import counted, did_you_mean
from drumline.state.manifest import Position
from drumline.training.metrics import Metric

ELSEWHERE = dict.fromkeys(("acc", "acc1", "accuracy"), "top1")
"""Metrics by their names in other programs, which also put `val_` in front."""


def best_metric(name: str, metrics: Sequence[Metric], classes: int) -> Metric:
    """The metric that `checkpoint.best` names. Rejects one that this run does not have, or that is not meaningful for
    so few classes."""
    metric = next((metric for metric in metrics if metric.name == name), None)
    names = [metric.name for metric in metrics if classes >= metric.min_classes]
    if metric is None:
        bare = re.sub("^(val|valid|eval|test)[_/]", "", name)
        raise UserError(
            f"checkpoint.best = {name!r}: there is no such metric",
            f"{did_you_mean(ELSEWHERE.get(bare, bare), names, 'use one of these')} ({', '.join(names)})",
        )
    if classes < metric.min_classes:
        raise UserError(
            f"checkpoint.best = {name!r}: is not meaningful for {counted(classes, 'class', 'classes')}",
            f"use one of {', '.join(names)}",
        )
    return metric


def is_better(metric: Metric, value: float, position: Position) -> bool:
    """Whether a value is better than the best one so far."""
    if not math.isfinite(value) or position.best_step < 0:
        return math.isfinite(value)
    return value > position.best_value if metric.higher else value < position.best_value


def after_evaluation(position: Position, value: float, best: bool) -> Position:
    """The position after an evaluation; `best`: whether that evaluation is the best so far."""
    if best:
        return replace(position, best_step=position.step, best_value=value, evaluations_since_best=0)
    return replace(position, evaluations_since_best=position.evaluations_since_best + 1)


def early_stop(position: Position, patience: int, total: int, metric: Metric) -> str:
    """The reason for stopping at a position before the last step; empty if the run continues."""
    if not patience or position.evaluations_since_best < patience or position.step >= total:
        return ""
    since, name = counted(position.evaluations_since_best, "evaluation"), metric.label or metric.name
    if position.best_step < 0:
        return f"{name} was not finite in {since}"
    return f"{name} has not improved since epoch {position.best_step / position.per_epoch:.4g} ({since})"
