"""How long a run is, and when it evaluates and saves."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.config.recipe import Checkpoint, Data, Optim, Recipe, Train
from drumline.core.errors import UserError
from drumline.training.plan import Plan, make_plan


def plan(samples: int = 1000, **sections: Any) -> Plan:
    return make_plan(Recipe(**sections), samples)


def test_epochs_become_steps_and_steps_win_over_epochs() -> None:
    assert (plan(data=Data(batch=100)).total, plan(data=Data(batch=100)).per_epoch) == (100, 10)
    assert plan(data=Data(batch=300), train=Train(epochs=2.5)).total == 8
    assert plan(data=Data(batch=100), train=Train(epochs=3, steps=7)).total == 7
    assert plan(data=Data(batch=1000), train=Train(epochs=0.1)).total == 1


def test_evaluation_and_saving_come_every_so_many_epochs_and_at_the_end() -> None:
    made = plan(
        data=Data(batch=100), train=Train(epochs=2.4, eval_every=0.5), checkpoint=Checkpoint(every_epochs=1)
    )
    assert [step for step in range(1, 25) if made.evaluates_after(step)] == [5, 10, 15, 20, 24]
    assert [step for step in range(1, 25) if made.saves_after(step, 0)] == [10, 20, 24]
    assert [step for step in range(1, 25) if made.saves_after(step, 7)] == [7, 10, 14, 20, 21, 24]


def test_zero_means_only_at_the_end() -> None:
    made = plan(
        data=Data(batch=100), train=Train(epochs=2, eval_every=0), checkpoint=Checkpoint(every_epochs=0)
    )
    assert [step for step in range(1, 21) if made.evaluates_after(step)] == [20]
    assert [step for step in range(1, 21) if made.saves_after(step, 0)] == [20]


def test_asking_for_more_often_than_every_step_means_every_step_not_never() -> None:
    made = plan(
        data=Data(batch=100), train=Train(epochs=1, eval_every=0.01), checkpoint=Checkpoint(every_epochs=0.01)
    )
    assert all(made.evaluates_after(step) and made.saves_after(step, 0) for step in range(1, 11))


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.batch = 128: the training set has only 100 samples"):
        plan(samples=100)


def test_the_schedule_is_built_for_the_global_batch() -> None:
    made = plan(data=Data(batch=500), optim=Optim(lr=0.1, lr_scaling="linear", reference_batch=250))
    assert made.schedule(0) == pytest.approx(0.2)
    assert made.schedule.total == made.total == 20
