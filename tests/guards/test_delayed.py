"""Gradients that were not finite, told one step later: named, with the parameters put back."""

from __future__ import annotations

import torch
from torch import nn

from drumline.guards.delayed import AT_ONCE, Delayed, Finiteness


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def filled(net: nn.Module, value: float = 1.0) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_finite_gradients_however_large_are_nobodys_business() -> None:
    net = model()
    delayed = Delayed(dict(net.named_parameters()))
    for value in (0.0, 3e38, -3e38, 1e-45):
        filled(net, value)
        delayed.look(1, [], [])
        assert delayed.verdict() is None
    assert delayed.verdict() is None, "nothing is told twice"


def test_the_first_bad_gradient_in_the_order_of_backward_is_named_and_the_update_taken_back() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        net = model()
        delayed = Delayed(dict(net.named_parameters()))
        filled(net)
        net[0].weight.grad[2, 1] = bad  # type: ignore[index,union-attr]
        net[1].bias.grad[0] = bad  # type: ignore[index,union-attr]
        before = [parameter.detach().clone() for parameter in net.parameters()]
        delayed.look(7, [], [4, 5])
        torch.optim.SGD(net.parameters(), lr=1.0).step()
        found = delayed.verdict()
        assert found is not None
        assert (found.step, found.ids, found.parameter) == (7, [4, 5], "1.bias")
        delayed.put_back()
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        assert delayed.verdict() is None


def test_parameters_without_gradient_and_of_several_types_are_passed_over() -> None:
    net = model()
    net[1] = net[1].to(torch.bfloat16)
    delayed = Delayed(dict(net.named_parameters()))
    delayed.look(1, [], [])
    assert delayed.verdict() is None
    net[1].weight.grad = torch.full_like(net[1].weight, torch.inf)  # type: ignore[arg-type,assignment]
    delayed.look(2, [], [])
    found = delayed.verdict()
    assert found is not None
    assert found.parameter == "1.weight"


def test_on_a_cpu_every_step_is_looked_at_before_it_is_taken() -> None:
    net = model()
    finite = Finiteness(net)
    held = list(net.parameters())
    filled(net)
    assert list(finite.look(0, held, AT_ONCE + 1, [], [])) == []
    filled(net, torch.nan)
    (found,) = finite.look(0, held, AT_ONCE + 2, [], [9])
    assert (found.step, found.ids, found.parameter) == (AT_ONCE + 2, [9], None)
    assert list(finite.left()) == []
