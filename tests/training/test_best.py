"""Any metric can decide which evaluation is the best, and patience counts the evaluations since."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from drumline.core.errors import UserError
from drumline.state.manifest import Position
from drumline.training.best import after_evaluation, best_metric, early_stop, is_better
from drumline.training.metrics import METRICS, Metric

TOP1, LOSS = (next(metric for metric in METRICS if metric.name == name) for name in ("top1", "loss"))


def follow(metric: Metric, values: list[float], patience: int = 0) -> tuple[Position, str]:
    """The position after these evaluations, one in each epoch of ten steps, and why the run stops there."""
    position, why = Position(0, 10), ""
    for value in values:
        position = replace(position, step=position.step + 10)
        position = after_evaluation(position, value, is_better(metric, value, position))
        if why := early_stop(position, patience, 1000, metric):
            break
    return position, why


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        (TOP1, [0.5, 0.7, 0.6], 20),
        (TOP1, [0.0, 0.0], 10),
        (TOP1, [0.5, 0.5], 10),
        (LOSS, [2.0, 0.5, 0.6], 20),
        (LOSS, [2.0, 3.0], 10),
        (LOSS, [math.nan, 3.0, math.nan], 20),
        (LOSS, [math.inf, -math.inf], -1),
        (replace(TOP1, name="own"), [math.nan, -5.0, -4.0], 30),
    ],
)
def test_the_best_evaluation_is_the_first_with_the_best_finite_value(
    metric: Metric, values: list[float], best: int
) -> None:
    position, _ = follow(metric, values)
    assert position.best_step == best
    assert best < 0 or position.best_value == values[best // 10 - 1]


@pytest.mark.parametrize(
    ("patience", "values", "stops"),
    [
        (0, [0.5] * 9, 0),
        (1, [0.5, 0.6, 0.6], 3),
        (2, [0.5, 0.4, 0.6, 0.5, 0.5, 0.9], 5),
        (3, [0.1, 0.2, 0.3, 0.4], 0),
        (2, [math.nan, math.nan, 0.5], 2),
    ],
)
def test_a_run_stops_after_as_many_evaluations_without_a_better_one(
    patience: int, values: list[float], stops: int
) -> None:
    position, why = follow(TOP1, values, patience)
    assert bool(why) is bool(stops)
    assert position.step == 10 * (stops or len(values))


def test_the_reason_names_the_metric_and_the_best_epoch() -> None:
    _, why = follow(LOSS, [0.5, 0.6, 0.7], 2)
    assert why == "loss has not improved since epoch 1 (2 evaluations)"
    assert follow(LOSS, [math.nan], 1)[1] == "loss was not finite in 1 evaluation"


def test_a_run_at_its_last_step_finishes_and_does_not_stop_early() -> None:
    position = Position(40, 10, best_step=10, best_value=0.5, evaluations_since_best=3)
    assert early_stop(position, 3, 50, TOP1)
    assert not early_stop(position, 3, 40, TOP1)


def test_a_metric_that_the_run_does_not_have_or_that_means_nothing_is_rejected() -> None:
    assert best_metric("loss", METRICS, 2) is LOSS
    with pytest.raises(UserError, match=r"no such metric\n.*did you mean top1\? \(top1, loss\)"):
        best_metric("top-1", METRICS, 2)
    for name, meant in (
        ("val_loss", "loss"),
        ("val_acc", "top1"),
        ("accuracy", "top1"),
        ("eval/top1", "top1"),
    ):
        with pytest.raises(UserError, match=rf"did you mean {meant}\? "):
            best_metric(name, METRICS, 2)
    with pytest.raises(UserError, match=r"is not meaningful for 6 classes\n.*use one of top1, loss"):
        best_metric("top5", METRICS, 6)
    assert best_metric("top5", METRICS, 37).name == "top5"
