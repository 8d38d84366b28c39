"""The learning rate is a pure function of the step; a plan says when a run evaluates, saves and ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from drumline.config.fields import value_of, with_values
from drumline.config.recipe import Checkpoint, Data, Optim, Recipe, Train
from drumline.core.errors import UserError
from drumline.training.schedule import Plan, build_schedule, make_plan, scaled_rate


def test_warm_up_rises_in_equal_steps_from_near_zero_to_the_peak() -> None:
    schedule = build_schedule(
        Optim(lr=0.4, warmup_epochs=0.5, schedule="constant"), 128, total=40, per_epoch=10
    )
    rates = [schedule(step) for step in range(40)]
    assert rates[:5] == pytest.approx([0.4 * k / 6 for k in (1, 2, 3, 4, 5)])
    assert rates[5:] == [0.4] * 35


@pytest.mark.parametrize("warmup", [0.0, 2.0])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_starts_at_the_peak_and_ends_at_the_final_share(warmup: float, final: float) -> None:
    total, per_epoch = 1000, 50
    schedule = build_schedule(Optim(lr=0.2, warmup_epochs=warmup, final_lr=final), 128, total, per_epoch)
    first = round(warmup * per_epoch)
    rates = [schedule(step) for step in range(first, total)]
    length = total - first
    expected = [
        0.2 * final + (0.2 - 0.2 * final) * (1 + math.cos(math.pi * i / length)) / 2 for i in range(length)
    ]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert rates[0] == 0.2
    assert rates == sorted(rates, reverse=True)
    assert 0.2 * final < rates[-1] < 0.2 * final + 1e-5


def test_step_multiplies_by_gamma_at_each_milestone() -> None:
    optim = Optim(lr=1.0, schedule="step", milestones=(2.0, 3.5), gamma=0.5, warmup_epochs=0)
    schedule = build_schedule(optim, 128, total=50, per_epoch=10)
    assert [schedule(step) for step in (0, 19, 20, 34, 35, 49)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_step_without_milestones_drops_at_a_half_and_three_quarters() -> None:
    schedule = build_schedule(Optim(lr=1.0, schedule="step", warmup_epochs=0), 128, total=80, per_epoch=7)
    drops = [step for step in range(1, 80) if schedule(step) < schedule(step - 1)]
    assert drops == [40, 60]
    assert schedule(79) == pytest.approx(0.01)


def test_a_warm_up_longer_than_the_run_never_asks_for_the_peak() -> None:
    schedule = build_schedule(Optim(lr=1.0, warmup_epochs=5), 128, total=10, per_epoch=10)
    assert schedule(9) == pytest.approx(10 / 51)


def test_the_rate_scales_with_the_global_batch_as_asked() -> None:
    assert scaled_rate(Optim(lr=0.1), 1024) == 0.1
    assert scaled_rate(Optim(lr=0.1, lr_scaling="linear"), 1024) == pytest.approx(0.4)
    assert scaled_rate(Optim(lr=0.1, lr_scaling="sqrt"), 1024) == pytest.approx(0.2)
    assert scaled_rate(Optim(lr=0.1, lr_scaling="linear", reference_batch=128), 64) == pytest.approx(0.05)
    linear = Optim(lr=0.1, lr_scaling="linear", warmup_epochs=0)
    assert build_schedule(linear, 512, 10, 10)(0) == pytest.approx(0.2)


def test_a_resumed_run_takes_the_same_rate_at_every_step() -> None:
    optim = Optim(lr=0.3, warmup_epochs=1.5, final_lr=0.01)
    whole = build_schedule(optim, 96, 90, 20)
    forward = [whole(step) for step in range(90)]
    resumed = build_schedule(optim, 96, 90, 20)
    assert [resumed(step) for step in range(37, 90)] == forward[37:]
    assert [whole(step) for step in reversed(range(90))] == forward[::-1]


@pytest.mark.parametrize("step", [-1, 10])
def test_a_rate_outside_the_run_is_an_assertion_error(step: int) -> None:
    with pytest.raises(AssertionError):
        build_schedule(Optim(lr=0.1, warmup_epochs=0), 128, 10, 10)(step)


FIXED = {"data.batch": 128, "train.epochs": 10.0, "optim.lr": 0.1, "optim.warmup_epochs": 0.0}


def plan(samples: int = 1000, **sections: Any) -> Plan:
    recipe = Recipe(**sections)
    auto = {name: value for name, value in FIXED.items() if value_of(recipe, name) == "auto"}
    return make_plan(with_values(recipe, auto), samples)


def test_epochs_become_steps_and_steps_win_over_epochs() -> None:
    assert (plan(data=Data(batch=100)).total, plan(data=Data(batch=100)).per_epoch) == (100, 10)
    assert plan(data=Data(batch=300), train=Train(epochs=2.5)).total == 8
    assert plan(data=Data(batch=100), train=Train(epochs=3, steps=7)).total == 7
    assert plan(data=Data(batch=1000), train=Train(epochs=0.1)).total == 1


def test_evaluation_and_saving_come_every_so_many_epochs_and_at_the_end() -> None:
    sections = {"data": Data(batch=100), "train": Train(epochs=2.4, eval_every=0.5)}
    made = plan(**sections, checkpoint=Checkpoint(every_epochs=1))
    assert [step for step in range(1, 25) if made.due(step).evaluation] == [5, 10, 15, 20, 24]
    assert not any(made.due(step, evaluates=False).evaluation for step in range(1, 25))
    assert [step for step in range(1, 25) if made.due(step).save] == [10, 20, 24]
    made = plan(**sections, checkpoint=Checkpoint(every_epochs=1, every_steps=7))
    assert [step for step in range(1, 25) if made.due(step).save] == [7, 10, 14, 20, 21, 24]


def test_a_line_is_logged_every_so_many_steps_and_at_each_evaluation_save_and_epoch() -> None:
    made = plan(
        data=Data(batch=100),
        train=Train(epochs=2.4, eval_every=1.2, log_every=9),
        checkpoint=Checkpoint(every_epochs=0, every_steps=11),
    )
    assert [step for step in range(1, 25) if made.due(step).log] == [9, 10, 11, 12, 18, 20, 22, 24]
    assert [step for step in range(1, 25) if made.due(step).epoch_end] == [10, 20]


def test_zero_means_only_at_the_end() -> None:
    made = plan(
        data=Data(batch=100), train=Train(epochs=2, eval_every=0), checkpoint=Checkpoint(every_epochs=0)
    )
    assert [step for step in range(1, 21) if made.due(step).evaluation] == [20]
    assert [step for step in range(1, 21) if made.due(step).save] == [20]


def test_more_often_than_every_step_means_every_step() -> None:
    made = plan(
        data=Data(batch=100), train=Train(epochs=1, eval_every=0.01), checkpoint=Checkpoint(every_epochs=0.01)
    )
    assert all(made.due(step).evaluation and made.due(step).save for step in range(1, 11))


def test_a_batch_larger_than_the_data_is_rejected() -> None:
    with pytest.raises(UserError, match=r"data.batch = 128: the training set has only 100 samples"):
        plan(samples=100)


def test_the_schedule_is_built_for_the_global_batch() -> None:
    made = plan(data=Data(batch=500), optim=Optim(lr=0.1, lr_scaling="linear", reference_batch=250))
    assert made.schedule(0) == pytest.approx(0.2)
    assert made.schedule.total == made.total == 20
