"""Gradients that were not finite, found one step later, with the parameters put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drumline.guards.checks.nonfinite import Origin
from drumline.guards.script.forwards import Forwards
from drumline.guards.script.nonfinite import IMMEDIATE_STEPS, DelayedCheck, GradientCheck, locate


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def filled(net: nn.Module, value: float = 1.0) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_large_finite_gradients_are_not_reported() -> None:
    net = model()
    delayed = DelayedCheck(net.parameters())
    for value in (0.0, 3e38, -3e38, 1e-45):
        filled(net, value)
        delayed.check(1, [], [])
        assert delayed.result() is None
    assert delayed.result() is None, "nothing is reported twice"


def test_a_bad_gradient_is_found_and_the_update_undone() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        net = model()
        delayed = DelayedCheck(net.parameters())
        filled(net)
        net[0].weight.grad[2, 1] = bad  # type: ignore[index,union-attr]
        net[1].bias.grad[0] = bad  # type: ignore[index,union-attr]
        before = [parameter.detach().clone() for parameter in net.parameters()]
        delayed.check(7, [], [4, 5])
        torch.optim.SGD(net.parameters(), lr=1.0).step()
        found = delayed.result()
        assert found is not None
        assert (found.step, found.ids, found.gradients_gone) == (7, [4, 5], True)
        delayed.undo()
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        assert delayed.result() is None


def test_parameters_without_gradient_and_of_several_types_are_accepted() -> None:
    net = model()
    net[1] = net[1].to(torch.bfloat16)
    delayed = DelayedCheck(net.parameters())
    delayed.check(1, [], [])
    assert delayed.result() is None
    net[1].weight.grad = torch.full_like(net[1].weight, torch.inf)  # type: ignore[arg-type,assignment]
    delayed.check(2, [], [])
    found = delayed.result()
    assert found is not None


def test_on_a_cpu_every_step_is_checked_before_the_update() -> None:
    net = model()
    finite = GradientCheck()
    held = list(net.parameters())
    filled(net)
    assert list(finite.check(0, held, IMMEDIATE_STEPS + 1, [], [])) == []
    filled(net, torch.nan)
    (found,) = finite.check(0, held, IMMEDIATE_STEPS + 2, [], [9])
    assert (found.step, found.ids, found.gradients_gone) == (IMMEDIATE_STEPS + 2, [9], False)
    assert list(finite.remaining()) == []


class BadBackward(torch.autograd.Function):
    """Passes values on; the gradient of the first one becomes NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        bad = gradients[0].clone()
        bad[0, 0] = torch.nan
        return bad


class Middle(nn.Module):
    on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return BadBackward.apply(x) if self.on else x


def test_the_first_bad_gradient_in_the_order_of_backward_is_named_after_it_is_gone() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), Middle(), nn.Linear(4, 2))
    forwards = Forwards(net, net, False, lambda: None, lambda: None, lambda: None)
    net(torch.randn(5, 3)).sum().backward()
    (call,) = forwards.calls
    named = dict(net.named_parameters())
    assert locate([call], named) == Origin("gradient", "1.bias")
    net.zero_grad()
    assert locate([call], named, gradients_gone=True) == Origin("gradient", "1.bias")
    assert all(p.grad is None for p in net.parameters())
