"""Which parameters a script trains: those without a gradient, outside every optimizer, or in an optimizer and not in
the model.

Promises: reads which gradients exist, never their values. Only two mistakes are certain: a parameter that strict DDP
requires and that has no gradient, and a layer that was replaced after the optimizer was created. The rest (heads
trained in turn, layers unfrozen later, optimizers created later) may be intended and only warns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from drumline.guards.checks.parameters import (
    never_stepped,
    not_in_model,
    not_in_optimizer,
    unconnected,
    without_gradient,
)
from drumline.guards.finding import Finding, Found
from drumline.guards.script.discovery import Discovery
from drumline.guards.script.forwards import Forwards

UNREACHED_STEPS = 20
"""Steps without a gradient after which a parameter is reported."""
_SHORT_RUN = 8
"""A run that ends before `UNREACHED_STEPS` reports parameters without a gradient if it has this many steps."""
_UNCONNECTED_STEPS = 3
"""Steps in which no parameter has a gradient."""
_NEVER_STEPPED = 4
"""Backward passes that reach the parameters of an optimizer before it is reported as never stepped."""
_MOST_CALLS = 256
"""Maximum number of backward calls that are examined before any optimizer has stepped."""


class Parameters:
    """The parameters of one model and of its optimizers."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], forwards: Forwards, discovery: Discovery
    ) -> None:
        self._model, self._optimizers, self._forwards, self._discovery = (
            model,
            optimizers,
            forwards,
            discovery,
        )
        self._unreached: list[dict[str, torch.Tensor]] | None = None
        """For each optimizer, the parameters that no backward has reached yet."""
        self._reached: list[torch.Tensor | None] = [None] * len(optimizers)
        """For each optimizer, a parameter that has had a gradient."""
        self._arrivals = [0] * len(optimizers)
        """Backward passes that reached an optimizer before its first step."""
        self._steps = [0] * len(optimizers)
        self._backwards = self._calls = 0

    def backward_ended(self, in_step: bool) -> None:
        """Gradients are complete. A gradient that the script removes before the step counts too."""
        self._backwards += in_step
        self._calls += 1
        if max(self._steps) > UNREACHED_STEPS or (self._calls > _MOST_CALLS and not any(self._steps)):
            return
        for number, steps in enumerate(self._steps):
            self._unreached_of(number)
            one = self._reached[number]
            if not steps and one is not None and one.grad is not None:
                self._arrivals[number] += 1

    def reached(self, number: int, held: Sequence[torch.Tensor], step: int) -> Found | None:
        """Before one of the first steps of an optimizer: parameters that backward has never reached."""
        self._steps[number] = step
        if step > UNREACHED_STEPS:
            return None
        left = list(self._unreached_of(number))
        if not left:
            return None
        if all(one is None for one in self._reached):
            return self._unconnected(number, step)
        if all(parameter.grad is None for parameter in held):
            return None  # gradients that are missing everywhere were removed (probes.py)
        wrapper = self._forwards.wrapper
        strict = wrapper is not None and not wrapper.find_unused_parameters and not wrapper.static_graph
        through = self._forwards.wrapped_calls and self._forwards.synced and self._forwards.direct is None
        if strict and len(self._optimizers) == 1 and through and step == 1:
            return without_gradient(left, 1), True
        return (without_gradient(left, UNREACHED_STEPS), False) if step == UNREACHED_STEPS else None

    def at_close(self, done: Sequence[int]) -> list[Finding]:
        """After the last step: an optimizer that never stepped, and parameters without gradient in a short run."""
        found = []
        for number, steps in enumerate(done):
            if not steps and self._arrivals[number] >= _NEVER_STEPPED:
                kind = type(self._optimizers[number]).__name__
                found.append(never_stepped(number, kind, self._arrivals[number]))
            left = list(self._unreached[number]) if self._unreached is not None else []
            if left and self._reached[number] is not None and _SHORT_RUN <= steps < UNREACHED_STEPS:
                found.append(without_gradient(left, steps))
        return found

    def _unreached_of(self, number: int) -> dict[str, torch.Tensor]:
        """The parameters of an optimizer that have had no gradient so far."""
        if self._unreached is None:
            names = {id(p): name for name, p in self._model.named_parameters()}
            self._unreached = [
                {names[id(p)]: p for p in _held(one) if id(p) in names and p.requires_grad}
                for one in self._optimizers
            ]
        unreached = self._unreached[number]
        for name in [name for name, p in unreached.items() if p.grad is not None]:
            self._reached[number] = unreached.pop(name)
        return unreached

    def _unconnected(self, number: int, step: int) -> Found | None:
        """Backward was called in each of the first steps, and has reached no parameter at all."""
        if step != _UNCONNECTED_STEPS or number or self._backwards < step:
            return None
        if any(p.grad is not None for p in self._model.parameters()):
            return None  # the optimizer holds other tensors: `held` reports it
        return unconnected(step), not self._discovery.others_train()

    def held(self, optimizer: Optimizer, step: int) -> list[Found]:
        """At a comparison: parameters that no optimizer holds, and tensors that are in no model."""
        everything = [p for one in self._optimizers for p in _held(one)]
        model, of_teachers = dict(self._model.named_parameters()), self._discovery.teacher_parameters.values()
        known = {id(p) for p in (*model.values(), *of_teachers)}
        elsewhere = [p for p in model.values() if id(p) in self._discovery.held_elsewhere]
        missing = not_in_optimizer(model, (*everything, *of_teachers, *elsewhere), f"step {step}")
        held = {id(p) for p in everything}
        missing_shapes = {tuple(p.shape) for p in model.values() if p.requires_grad and id(p) not in held}
        found: list[Found] = []
        for number, group in enumerate(optimizer.param_groups):
            unknown = {
                f"param_groups[{number}]['params'][{index}]": p
                for index, p in enumerate(group["params"])
                if id(p) not in known and p.grad is None
            }
            # Alone they may belong to a loss and be used later. Next to a parameter that no optimizer holds, they are
            # what it replaced.
            if unknown and (missing is not None or step == UNREACHED_STEPS):
                replaced = all(tuple(p.shape) in missing_shapes for p in unknown.values())
                finding = not_in_model("parameters", unknown, f"step {step}")
                found.append((finding, missing is not None and replaced))
        if missing is not None:
            found.append((missing, False))
        return found


def _held(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
