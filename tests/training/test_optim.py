"""SGD and AdamW are torch's; LARS and LAMB follow their formulas; the state is there from the start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from drumline.config.learning import OF_TORCH
from drumline.config.recipe import Optim
from drumline.training.optim import build_optimizer, by_device, parameter_groups, set_rate

NAMES = ("sgd", "adamw", "lars", "lamb")
RATES = [0.1, 0.05, 0.2, 0.01, 0.1]


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5)).to(dtype)


def gradients(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(parameter.shape, generator=draw) for parameter in model().parameters()]


def give(module: nn.Module, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(module.parameters(), values, strict=True):
        parameter.grad = value.clone().to(parameter.dtype)


def train(optim: Optim, steps: int = len(RATES)) -> list[list[torch.Tensor]]:
    """The parameters after each step, by our optimizer."""
    module, lr = model(), torch.tensor(0.0)
    optimizer = build_optimizer(optim, module.parameters(), lr)
    history = []
    for step in range(steps):
        lr.fill_(RATES[step])
        give(module, gradients(step))
        optimizer.step()
        history.append([parameter.detach().clone() for parameter in module.parameters()])
    return history


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=tolerance, atol=tolerance / 10)


PLAIN = [
    Optim(name="sgd", momentum=0.0, weight_decay=0.0),
    Optim(name="sgd", momentum=0.9, weight_decay=0.01),
    Optim(name="sgd", momentum=0.9, nesterov=True, weight_decay=0.01),
    Optim(name="sgd", momentum=0.9, weight_decay=0.01, decay_all=False),
    Optim(name="adamw", weight_decay=0.05, betas=(0.8, 0.99), eps=1e-6),
    Optim(name="adamw", weight_decay=0.05, decay_all=False),
]


@pytest.mark.parametrize("optim", PLAIN, ids=lambda optim: f"{optim.name}-{optim.momentum}-{optim.decay_all}")
def test_sgd_and_adamw_move_as_torchs_plain_ones_at_every_step(optim: Optim) -> None:
    module = model()
    weights = [p for p in module.parameters() if p.ndim > 1 or optim.decay_all]
    spared = [p for p in module.parameters() if p.ndim <= 1 and not optim.decay_all]
    groups = [{"params": weights, "weight_decay": optim.weight_decay}]
    groups += [{"params": spared, "weight_decay": 0.0}] if spared else []
    plain: torch.optim.Optimizer
    if optim.name == "sgd":
        plain = torch.optim.SGD(
            groups, 0.1, optim.momentum, nesterov=optim.nesterov, foreach=False, fused=False
        )
    else:
        plain = torch.optim.AdamW(groups, 0.1, optim.betas, optim.eps, foreach=False, fused=False)
    for step, ours in enumerate(train(optim)):
        for group in plain.param_groups:
            group["lr"] = RATES[step]
        give(module, gradients(step))
        plain.step()
        close(ours, [parameter.detach() for parameter in module.parameters()], 1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_sgd_and_adamw_have_the_bits_of_torchs_fused_ones(name: Any) -> None:
    optim, module, lr = Optim(name=name, weight_decay=0.01), model(), torch.tensor(0.0)
    fused: torch.optim.Optimizer = (
        torch.optim.SGD(module.parameters(), lr, optim.momentum, weight_decay=0.01, fused=True)
        if name == "sgd"
        else torch.optim.AdamW(module.parameters(), lr, optim.betas, optim.eps, 0.01, fused=True)
    )
    for step, ours in enumerate(train(optim)):
        lr.fill_(RATES[step])
        give(module, gradients(step))
        fused.step()
        assert all(map(torch.equal, ours, module.parameters()))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("decay_all", [True, False])
def test_lars_follows_its_formula(decay_all: bool) -> None:
    optim = Optim(name="lars", momentum=0.8, weight_decay=0.02, trust=0.01, decay_all=decay_all)
    weights = [parameter.detach().double() for parameter in model().parameters()]
    moments = [torch.zeros_like(weight) for weight in weights]
    for step, ours in enumerate(train(optim)):
        for i, gradient in enumerate(gradients(step)):
            weight, matrix = weights[i], weights[i].ndim > 1
            decay = optim.weight_decay if matrix or decay_all else 0.0
            ratio = optim.trust * weight.norm() / (gradient.norm().double() + decay * weight.norm())
            direction = (gradient.double() + decay * weight) * (ratio if matrix else 1.0)
            moments[i] = optim.momentum * moments[i] + direction
            weights[i] = weight - RATES[step] * moments[i]
        close(ours, weights, 1e-5)


@pytest.mark.parametrize("decay_all", [True, False])
def test_lamb_follows_its_formula(decay_all: bool) -> None:
    optim = Optim(name="lamb", weight_decay=0.02, betas=(0.8, 0.99), eps=1e-6, decay_all=decay_all)
    weights = [parameter.detach().double() for parameter in model().parameters()]
    means = [torch.zeros_like(weight) for weight in weights]
    squares = [torch.zeros_like(weight) for weight in weights]
    for step, ours in enumerate(train(optim)):
        for i, gradient in enumerate(gradients(step)):
            weight, g, matrix = weights[i], gradient.double(), weights[i].ndim > 1
            decay = optim.weight_decay if matrix or decay_all else 0.0
            means[i] = 0.8 * means[i] + 0.2 * g
            squares[i] = 0.99 * squares[i] + 0.01 * g * g
            mean, square = means[i] / (1 - 0.8 ** (step + 1)), squares[i] / (1 - 0.99 ** (step + 1))
            direction = mean / (square.sqrt() + 1e-6) + decay * weight
            ratio = weight.norm() / direction.norm() if matrix else 1.0
            weights[i] = weight - RATES[step] * ratio * direction
        close(ours, weights, 1e-5)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_layer_of_zeros_still_moves(name: Any) -> None:
    module, lr = nn.Linear(3, 2), torch.tensor(0.1)
    nn.init.zeros_(module.weight)
    optimizer = build_optimizer(Optim(name=name, weight_decay=0.01), module.parameters(), lr)
    give(module, [torch.ones(2, 3), torch.ones(2)])
    optimizer.step()
    assert torch.isfinite(module.weight).all()
    assert (module.weight < 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_state_exists_before_the_first_step_and_keeps_its_place(name: Any) -> None:
    module, lr = model(), torch.tensor(0.1)
    optimizer = build_optimizer(Optim(name=name), module.parameters(), lr)

    def places() -> dict[tuple[str, str], tuple[int, torch.Size]]:
        names = {parameter: key for key, parameter in module.named_parameters()}
        return {
            (names[parameter], slot): (tensor.data_ptr(), tensor.shape)
            for parameter, slots in optimizer.state.items()
            for slot, tensor in slots.items()
        }

    before = places()
    slots = {"sgd": 1, "lars": 1, "adamw": 3, "lamb": 3}[name]
    assert len(before) == slots * len(list(module.parameters()))
    give(module, gradients(0))
    optimizer.step()
    assert places() == before


def test_sgd_without_momentum_has_no_state() -> None:
    module = model()
    optimizer = build_optimizer(Optim(momentum=0.0), module.parameters(), torch.tensor(0.1))
    assert not any(optimizer.state[parameter] for parameter in module.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_an_infinite_gradient_changes_nothing(name: Any) -> None:
    """Through torch's own loss scaler: a step with a good gradient, one with a bad one, a good one again."""
    module, lr = model(), torch.tensor(0.1)
    optimizer = build_optimizer(Optim(name=name), module.parameters(), lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def state() -> list[torch.Tensor]:
        slots = [tensor for slots in optimizer.state.values() for tensor in slots.values()]
        return [tensor.detach().clone() for tensor in [*module.parameters(), *slots]]

    def take(values: list[torch.Tensor]) -> None:
        scaler.scale(torch.zeros(1))
        give(module, values)
        scaler.step(optimizer)
        scaler.update()

    take(gradients(0))
    before = state()
    bad = gradients(1)
    bad[2][1] = math.inf
    take(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    take(gradients(2))
    assert not any(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_scaled_gradient_moves_as_the_plain_one(name: Any) -> None:
    plain = train(Optim(name=name), steps=1)[0]
    module, lr = model(), torch.tensor(RATES[0])
    optimizer = build_optimizer(Optim(name=name), module.parameters(), lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(1))
    give(module, [1024 * gradient for gradient in gradients(0)])
    scaler.step(optimizer)
    for mine, other in zip(module.parameters(), plain, strict=True):
        assert torch.equal(mine, other)


def test_decay_all_false_spares_vectors_and_nothing_else() -> None:
    module = model()
    groups = parameter_groups(Optim(weight_decay=0.1, decay_all=False), module.parameters())
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {name: decay[id(parameter)] for name, parameter in module.named_parameters()} == {
        "0.weight": 0.1,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "3.weight": 0.1,
        "3.bias": 0.0,
    }


@pytest.mark.parametrize("name", NAMES)
def test_frozen_parameters_are_left_out(name: Any) -> None:
    module = model()
    module[0].requires_grad_(False)
    optimizer = build_optimizer(Optim(name=name), module.parameters(), torch.tensor(0.1))
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    assert not any(parameter in optimizer.state for parameter in module[0].parameters())


def test_one_rate_tensor_drives_every_group() -> None:
    lr = torch.tensor(0.1)
    optimizer = build_optimizer(Optim(decay_all=False), model().parameters(), lr)
    assert [group["lr"] is lr for group in optimizer.param_groups] == [True, True]


def test_stages_on_several_devices_read_a_rate_of_their_own() -> None:
    """torch's fused kernels want it where the parameters are. The meta device stands for a second GPU."""
    here, there = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2, device="meta"))
    lr = torch.tensor(0.1)
    groups = by_device([{"params": [here, there, here], "weight_decay": 0.5}], lr)
    assert [group["params"] for group in groups] == [[here, here], [there]]
    assert [group["lr"].device.type for group in groups] == ["cpu", "meta"]
    assert groups[0]["lr"] is lr
    assert [group["weight_decay"] for group in groups] == [0.5, 0.5]


def test_the_rate_reaches_every_group() -> None:
    rates = [torch.tensor(0.1), torch.tensor(0.1)]
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in rates]
    optimizer = torch.optim.SGD(
        [{"params": [each], "lr": rate} for each, rate in zip(parameters, rates, strict=True)], lr=rates[0]
    )
    set_rate(optimizer, 0.5)
    assert [float(rate) for rate in rates] == [0.5, 0.5]


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_a_factor_trains_as_that_rate_does(name: str) -> None:
    def trained(factor: float, rate: float) -> list[torch.Tensor]:
        module, lr = model(), torch.tensor(0.0)
        parameters = list(module.parameters())
        factors = [factor] * len(parameters)
        optimizer = build_optimizer(Optim(name=name, weight_decay=0.01), parameters, lr, None, factors)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        set_rate(optimizer, rate)
        optimizer.step()
        return parameters

    for ours, theirs in zip(trained(4.0, 0.125), trained(1.0, 0.5), strict=True):
        assert torch.equal(ours, theirs)


def test_each_factor_has_a_rate_of_its_own_and_the_others_keep_their_groups() -> None:
    parameters, lr = list(model().parameters()), torch.tensor(0.0)
    factors = [10.0] + [1.0] * (len(parameters) - 1)
    optimizer = build_optimizer(Optim(), parameters, lr, None, factors)
    set_rate(optimizer, 0.5)
    rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(each)] for each in parameters] == [5.0] + [0.5] * (len(parameters) - 1)
    assert lr.item() == 0.5
    assert len(build_optimizer(Optim(), model().parameters(), lr).param_groups) == 1


def test_every_optimizer_of_torch_that_is_suggested_exists() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 3))]
    for name in OF_TORCH:
        build_optimizer(Optim(name=name, lr=0.1), parameters, torch.zeros(()))
