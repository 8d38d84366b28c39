"""Which parameters are trained: without a gradient, outside every optimizer, or in an optimizer and not in the model.

Promises: reads which gradients are there, no values. Only what DDP itself demands, and a part of the model that was
replaced after the optimizer was made, is certain; the rest (heads trained in turn, layers thawed later, optimizers
made later) may be meant and is a warning.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from drumline.guards.beside import Beside
from drumline.guards.finding import Finding
from drumline.guards.forwards import Forwards
from drumline.guards.gradients import never_stepped, outside, strangers, unconnected, without_gradient

PATIENCE = 20
_SHORT = 8
"""A run that ends before `PATIENCE` warns about parameters without gradient if it has at least this many steps."""
_UNCONNECTED = 3
_NEVER_STEPPED = 4
"""Backward passes that reach the parameters of an optimizer by when it should have stepped."""
_MOST_CALLS = 256
"""Maximum number of backward calls that are examined before any optimizer has stepped."""
Found = tuple[Finding, bool]


class Parameters:
    """The parameters of one model and of its optimizers."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], forwards: Forwards, beside: Beside
    ) -> None:
        self._model, self._optimizers, self._forwards, self._beside = model, optimizers, forwards, beside
        self._unreached: list[dict[str, torch.Tensor]] | None = None
        """For each optimizer, the parameters that no backward has reached yet."""
        self._reached: list[torch.Tensor | None] = [None] * len(optimizers)
        """For each optimizer, a parameter that has had a gradient."""
        self._arrivals = [0] * len(optimizers)
        """Backward passes that reached an optimizer before its first step."""
        self._steps = [0] * len(optimizers)
        self._backwards = self._calls = 0

    def backward_ended(self, in_step: bool) -> None:
        """Gradients are in place. A gradient that the script removes before the step counts as arrived."""
        self._backwards += in_step
        self._calls += 1
        if max(self._steps) > PATIENCE or (self._calls > _MOST_CALLS and not any(self._steps)):
            return
        for number, steps in enumerate(self._steps):
            self._look(number)
            one = self._reached[number]
            if not steps and one is not None and one.grad is not None:
                self._arrivals[number] += 1

    def reached(self, number: int, held: Sequence[torch.Tensor], step: int) -> Found | None:
        """Before one of the first steps of an optimizer: parameters that backward has never reached."""
        self._steps[number] = step
        if step > PATIENCE:
            return None
        left = list(self._look(number))
        if not left:
            return None
        if all(one is None for one in self._reached):
            return self._unconnected(number, step)
        if all(parameter.grad is None for parameter in held):
            return None  # a gradient that is missing everywhere was removed (probes.py)
        wrapper = self._forwards.wrapper
        strict = wrapper is not None and not wrapper.find_unused_parameters and not wrapper.static_graph
        through = self._forwards.wrapped_calls and self._forwards.synced and self._forwards.direct is None
        if strict and len(self._optimizers) == 1 and through and step == 1:
            return without_gradient(left, 1), True
        return (without_gradient(left, PATIENCE), False) if step == PATIENCE else None

    def at_close(self, done: Sequence[int]) -> list[Finding]:
        """After the last step: an optimizer that never stepped, and parameters without gradient in a short run."""
        found = []
        for number, steps in enumerate(done):
            if not steps and self._arrivals[number] >= _NEVER_STEPPED:
                kind = type(self._optimizers[number]).__name__
                found.append(never_stepped(number, kind, self._arrivals[number]))
            left = list(self._unreached[number]) if self._unreached is not None else []
            if left and self._reached[number] is not None and _SHORT <= steps < PATIENCE:
                found.append(without_gradient(left, steps))
        return found

    def _look(self, number: int) -> dict[str, torch.Tensor]:
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
        if step != _UNCONNECTED or number or self._backwards < step:
            return None
        if any(p.grad is not None for p in self._model.parameters()):
            return None  # the optimizer holds other tensors: `placed` reports it
        return unconnected(step), not self._beside.others_train()

    def placed(self, optimizer: Optimizer, taught: Sequence[nn.Parameter], step: int) -> list[Found]:
        """At a comparison: parameters that no optimizer holds, and tensors that are in no model."""
        everything = [p for one in self._optimizers for p in _held(one)]
        model = dict(self._model.named_parameters())
        known = {id(p) for p in (*model.values(), *taught)}
        elsewhere = [p for p in model.values() if id(p) in self._beside.held_elsewhere]
        missing = outside(model, everything, (*taught, *elsewhere), step)
        found: list[Found] = []
        shapes_missing = {
            tuple(p.shape)
            for p in model.values()
            if p.requires_grad and not any(p is one for one in everything)
        }
        for place, group in enumerate(optimizer.param_groups):
            strange = [at for at, p in enumerate(group["params"]) if id(p) not in known and p.grad is None]
            # Alone they may be a loss's own, used later; beside a parameter that nobody trains they were its place.
            if strange and (missing is not None or step == PATIENCE):
                shapes = [tuple(group["params"][at].shape) for at in strange]
                replaced = missing is not None and all(shape in shapes_missing for shape in shapes)
                found.append((strangers(place, strange, shapes, step), replaced))
        if missing is not None:
            found.append((missing, False))
        return found


def _held(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
