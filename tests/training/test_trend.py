"""Warnings about a run that does not learn."""

from __future__ import annotations

import math

import pytest

from drumline.training.trend import Trend


def trend(**changes: object) -> Trend:
    return Trend(**({"classes": 6, "guess": 1 / 6, "total": 1000, "per_epoch": 16} | changes))  # type: ignore[arg-type]


def test_a_loss_that_explodes_is_reported_once() -> None:
    course = trend()
    assert course.loss(50, 1.9) == ""
    assert course.loss(100, 3.4) == ""
    warning = course.loss(150, 8.2)
    assert "8.2" in warning
    assert "step 150" in warning
    assert "optim.lr" in warning
    assert course.loss(200, 9.0) == ""


@pytest.mark.parametrize("losses", [(9.0, 7.0, 2.0), (1.9, 2.0, 1.5), (17.0, 18.0, 5.0)])
def test_a_loss_that_starts_high_or_wobbles_is_not_reported(losses: tuple[float, ...]) -> None:
    course = trend()
    assert not any(course.loss(50 * number, loss) for number, loss in enumerate(losses, 1))


def test_a_first_loss_far_beyond_a_guess_is_an_explosion() -> None:
    assert "the loss is exploding" in trend().loss(50, 56.6)


def test_a_loss_that_is_infinite_is_an_explosion_and_one_that_is_nan_is_left_to_the_guard() -> None:
    course = trend()
    course.loss(50, 1.8)
    assert course.loss(100, math.nan) == ""
    assert "the loss is exploding" in course.loss(150, math.inf)


def test_a_loss_of_several_terms_has_no_known_guess() -> None:
    course = trend(is_cross_entropy=False)
    course.loss(50, 1.8)
    assert course.loss(100, 900.0) == ""


def test_accuracy_at_chance_is_reported_after_a_while_and_again_at_the_end() -> None:
    course = trend()
    assert course.accuracy(160, 100, 600) == ""
    assert "16.67%" in course.accuracy(240, 100, 600)
    assert course.accuracy(320, 100, 600) == ""
    assert "after 1,000 steps" in course.accuracy(1000, 120, 600)


def test_a_score_within_the_noise_of_a_guess_is_chance_and_one_above_is_not() -> None:
    margin = 3 * math.sqrt(1 / 6 * 5 / 6 * 600)
    assert trend().accuracy(999, int(100 + margin), 600)
    assert not trend().accuracy(999, int(100 + margin) + 1, 600)


def test_the_most_frequent_class_is_the_guess_of_uneven_sets() -> None:
    assert trend(guess=0.9).accuracy(999, 545, 600)
    assert not trend().accuracy(999, 545, 600)


def test_a_short_run_is_not_said_not_to_learn() -> None:
    line = (
        "WARNING: after only 199 steps, top-1 (16.67%) is no better than always predicting the most frequent class "
        "(16.67%): train longer"
    )
    assert trend(total=199).accuracy(199, 100, 600) == line
    assert "the model is not learning" in trend(total=200).accuracy(200, 100, 600)
    assert not trend(total=199).accuracy(198, 100, 600)
    assert not trend(total=20).accuracy(20, 100, 600)
    assert not trend(total=400, per_epoch=300).accuracy(400, 100, 600)
