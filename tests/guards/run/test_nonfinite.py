"""A gradient that is not finite changes nothing, and is remembered with its step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drumline.config.recipe import Optim, Train
from drumline.guards.run import nonfinite as nonfinite_module
from drumline.guards.run.nonfinite import NonFiniteGate
from drumline.training.state import TrainState
from drumline.training.step import TrainStep
from tests.training import tiny
from tests.training.test_step import everything, same_bits

OPTIMIZERS = ["sgd", "adamw", "lars", "lamb"]


@pytest.fixture(autouse=True)
def reads_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite_module, "POLL_SECONDS", 0.0)


def watched(
    name: Any = "sgd", action: str = "stop", model: Any = tiny.normed
) -> tuple[TrainState, TrainStep, NonFiniteGate]:
    trained = tiny.state(model(), optim=Optim(name=name, lr=0.1))
    gate = NonFiniteGate(trained.module, trained.optimizer, tiny.CPU, action=action, scaled=False)
    return trained, tiny.step_of(trained, 8, gate=gate), gate


def make_gradients_bad(trained: TrainState, value: float) -> Any:
    """From now on the last layer's gradient has one such value."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    return trained.module[-1].weight.register_hook(hook)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finite_steps_have_the_same_bits_with_and_without_the_gate(name: Any) -> None:
    states = []
    for watching in (False, True):
        trained, step, gate = watched(name)
        if not watching:
            step.gate = None
            del trained.optimizer.found_inf
        for index in range(3):
            step(tiny.make(8, index), index, 0.1)
        states.append(everything(trained))
    assert same_bits(*states)
    assert gate.poll(3) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_from_a_bad_gradient_on_parameters_and_optimizer_do_not_change(name: Any, value: float) -> None:
    trained, step, gate = watched(name)
    for index in range(2):
        step(tiny.make(8, index), index, 0.1)
    before = {key: tensor for key, tensor in everything(trained).items() if "running" not in key}
    handle = make_gradients_bad(trained, value)
    step(tiny.make(8, 2), 2, 0.1)
    handle.remove()
    for index in range(3, 6):
        step(tiny.make(8, index), index, 0.1)
    after = everything(trained)
    assert all(torch.equal(before[key], after[key]) for key in before if "num_batches" not in key)
    assert gate.poll(6) == 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_warn_only_the_bad_step_is_skipped_for_buffers_too(name: Any) -> None:
    trained, step, gate = watched(name, "warn")
    step(tiny.make(8, 0), 0, 0.1)
    before = everything(trained)
    handle = make_gradients_bad(trained, float("nan"))
    step(tiny.make(8, 1), 1, 0.1)
    handle.remove()
    assert same_bits(everything(trained), before)
    assert gate.poll(2) == 2
    step(tiny.make(8, 2), 2, 0.1)
    assert not same_bits(everything(trained), before)
    assert all(tensor.isfinite().all() for tensor in everything(trained).values())
    assert (gate.poll(3), gate.skipped) == (2, 1)


@pytest.mark.parametrize("action", ["stop", "warn"])
def test_a_rehearsal_that_diverges_leaves_no_trace_in_the_gate(action: str) -> None:
    trained, step, gate = watched(action=action)
    handle = make_gradients_bad(trained, float("nan"))
    step.rehearse(tiny.make(8))
    handle.remove()
    gate.begin()
    before = trained.module[-1].weight.detach().clone()
    step(tiny.make(8), 0, 0.1)
    assert (gate.poll(1), gate.skipped) == (0, 0)
    assert not torch.equal(trained.module[-1].weight, before)


def test_a_skipped_step_restores_the_buffers_of_a_loaded_checkpoint() -> None:
    trained, step, gate = watched(action="warn")
    with torch.no_grad():
        trained.module[1].running_mean.fill_(7)
    gate.begin()
    make_gradients_bad(trained, float("nan"))
    step(tiny.make(8), 0, 0.1)
    assert torch.equal(trained.module[1].running_mean, torch.full((6,), 7.0))


def test_under_a_loss_scaler_the_loss_counts_and_gradients_do_not() -> None:
    trained = tiny.state(tiny.plain(), train=Train())
    gate = NonFiniteGate(trained.module, trained.optimizer, tiny.CPU, action="stop", scaled=True)
    step = tiny.step_of(trained, 8, gate=gate)
    assert not hasattr(trained.optimizer, "found_inf")
    handle = make_gradients_bad(trained, float("inf"))
    step(tiny.make(8), 0, 0.1)
    handle.remove()
    assert gate.poll(1) == 0
    with torch.no_grad():
        trained.module[-1].weight.fill_(float("nan"))
    step(tiny.make(8), 1, 0.1)
    assert gate.poll(2) == 2


def test_the_host_reads_the_result_about_every_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite_module, "POLL_SECONDS", 3600.0)
    trained, step, gate = watched()
    assert gate.poll(0) == 0
    make_gradients_bad(trained, float("nan"))
    step(tiny.make(8), 0, 0.1)
    assert gate.poll(1) == 0


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_tensors_in_channels_last_order_do_not_change_either(name: Any) -> None:
    def channels_last() -> torch.nn.Module:
        return tiny.normed().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    trained, step, _ = watched(name, model=channels_last)
    step(tiny.make(8), 0, 0.1)
    before = everything(trained)
    assert before["model/0.weight"].is_contiguous(memory_format=torch.channels_last)
    make_gradients_bad(trained, float("nan"))
    step(tiny.make(8), 1, 0.1)
    after = everything(trained)
    assert all(
        torch.equal(before[key], after[key]) for key in before if "running" not in key and "num" not in key
    )
