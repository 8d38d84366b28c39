"""The average is a whole model that follows another."""

from __future__ import annotations

import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import single_process
from drumline.training.ema import Average
from tests.training import tiny


def average_of(model: nn.Module, decay: float) -> Average:
    strategy = create_strategy(Recipe(), single_process(tiny.CPU))
    strategy.setup(model)
    return Average(strategy.copy_model(), model, decay)


def test_floats_are_averaged_and_counters_copied() -> None:
    model = tiny.normed()
    average = average_of(model, 0.9)
    expected = {name: tensor.double().clone() for name, tensor in model.state_dict().items()}
    for _ in range(20):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(torch.rand(tensor.shape) if tensor.is_floating_point() else 1)
        average.update()
        for name, tensor in model.state_dict().items():
            expected[name] += (1 - 0.9) * (tensor.double() - expected[name])
    for name, tensor in average.module.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(tensor, model.state_dict()[name])


def test_the_average_starts_as_a_copy_and_shares_no_memory() -> None:
    model = tiny.normed()
    average = average_of(model, 0.9)
    pairs = [(a, average.module.state_dict()[name]) for name, a in model.state_dict().items()]
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not {a.data_ptr() for a, _ in pairs} & {b.data_ptr() for _, b in pairs}


def test_the_average_is_not_trained_and_scores_in_eval_mode() -> None:
    average = average_of(tiny.normed().train(), 0.9)
    assert not any(parameter.requires_grad for parameter in average.module.parameters())
    assert not any(module.training for module in average.module.modules())


def test_updates_stay_in_place() -> None:
    model = tiny.normed()
    average = average_of(model, 0.5)
    before = [tensor.data_ptr() for tensor in average.module.state_dict().values()]
    average.update()
    assert [tensor.data_ptr() for tensor in average.module.state_dict().values()] == before


def test_an_average_follows_a_model_whose_state_was_loaded_into_it() -> None:
    model = tiny.normed(0)
    average = average_of(model, 0.0)
    model.load_state_dict(tiny.normed(1).state_dict())
    average.update()
    for name, tensor in tiny.normed(1).state_dict().items():
        torch.testing.assert_close(average.module.state_dict()[name], tensor)
