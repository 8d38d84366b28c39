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

from drumline.guard.beside import Beside
from drumline.guard.finding import Finding
from drumline.guard.forwards import Forwards
from drumline.guard.gradients import outside, strangers, without_gradient

PATIENCE = 20
Found = tuple[Finding, bool]


class Parameters:
    """The parameters of one model and of its optimizers."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], forwards: Forwards, beside: Beside
    ) -> None:
        self._model, self._optimizers, self._forwards, self._beside = model, optimizers, forwards, beside
        self._unreached: list[dict[int, str]] = [{} for _ in optimizers]

    def reached(self, number: int, held: Sequence[torch.Tensor], step: int) -> Found | None:
        """Before one of the first steps of an optimizer: parameters that backward has never reached."""
        if step > PATIENCE:
            return None
        unreached = self._unreached[number]
        if step == 1:
            names = {id(p): name for name, p in self._model.named_parameters()}
            unreached.update({id(p): names[id(p)] for p in held if id(p) in names and p.requires_grad})
        for parameter in held:
            if parameter.grad is not None:
                unreached.pop(id(parameter), None)
        names_left = list(unreached.values())
        if not names_left or all(parameter.grad is None for parameter in held):
            return None  # a gradient that is missing everywhere was removed (probes.py)
        wrapper = self._forwards.wrapper
        strict = wrapper is not None and not wrapper.find_unused_parameters and not wrapper.static_graph
        through = self._forwards.wrapped_calls and self._forwards.synced and self._forwards.direct is None
        if strict and len(self._optimizers) == 1 and through and step == 1:
            return without_gradient(names_left, 1), True
        return (without_gradient(names_left, PATIENCE), False) if step == PATIENCE else None

    def placed(self, optimizer: Optimizer, taught: Sequence[nn.Parameter], step: int) -> list[Found]:
        """At a comparison: parameters that no optimizer holds, and tensors that are in no model."""
        everything = [p for one in self._optimizers for group in one.param_groups for p in group["params"]]
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
