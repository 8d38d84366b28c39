"""The learning rate is a pure function of the step, with the shapes the literature gives."""

from __future__ import annotations

import math

import pytest

from drumline.config.recipe import Optim
from drumline.training.schedule import build_schedule, scaled_rate


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
    optim = Optim(lr=1.0, schedule="step", milestones=(2.0, 3.5), gamma=0.5)
    schedule = build_schedule(optim, 128, total=50, per_epoch=10)
    assert [schedule(step) for step in (0, 19, 20, 34, 35, 49)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_step_without_milestones_drops_at_a_half_and_three_quarters() -> None:
    schedule = build_schedule(Optim(lr=1.0, schedule="step"), 128, total=80, per_epoch=7)
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
    assert build_schedule(Optim(lr=0.1, lr_scaling="linear"), 512, 10, 10)(0) == pytest.approx(0.2)


def test_a_resumed_run_takes_the_same_rate_at_every_step() -> None:
    optim = Optim(lr=0.3, warmup_epochs=1.5, final_lr=0.01)
    whole = build_schedule(optim, 96, 90, 20)
    forward = [whole(step) for step in range(90)]
    resumed = build_schedule(optim, 96, 90, 20)
    assert [resumed(step) for step in range(37, 90)] == forward[37:]
    assert [whole(step) for step in reversed(range(90))] == forward[::-1]


@pytest.mark.parametrize("step", [-1, 10])
def test_asking_outside_the_run_is_our_own_mistake(step: int) -> None:
    with pytest.raises(AssertionError):
        build_schedule(Optim(), 128, 10, 10)(step)
