"""Everything a run trains, as one value: the model, how it is called, its optimizer, its average.

Promises: `tensors()` names every tensor that makes up the state (parameters, buffers, optimizer, average), all
of which exist from the start and are only ever written in place. Saving copies them, loading writes into them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from drumline.train.ema import Average

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trainee:
    """All that is trained (`module`), the wrapped module that a step calls (`forward`), and what updates them."""

    module: nn.Module
    model: nn.Module
    """What is evaluated, averaged and exported: `module` itself, or the part of it that the rest helps to train."""
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    lr: torch.Tensor
    scaler: torch.amp.GradScaler
    average: Average | None

    def tensors(self) -> dict[str, Tensors]:
        """State by file: `model`, `optimizer`; when there is one, `average`; and `helpers`, what is trained beside
        the model."""
        groups = {"model": dict(self.model.state_dict()), "optimizer": self._optimizer_tensors()}
        if helpers := self._helper_tensors():
            groups["helpers"] = helpers
        if self.average is not None:
            groups["average"] = dict(self.average.module.state_dict())
        return groups

    def _helper_tensors(self) -> Tensors:
        if self.model is self.module:
            return {}
        inside = next(name for name, part in self.module.named_modules() if part is self.model)
        state = self.module.state_dict()
        return {name: tensor for name, tensor in state.items() if not name.startswith(f"{inside}.")}

    def _optimizer_tensors(self) -> Tensors:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return {
            f"{slot}/{names[id(parameter)]}": tensor
            for parameter, slots in self.optimizer.state.items()
            if id(parameter) in names  # one that a model has dropped is told by a guard
            for slot, tensor in slots.items()
        }
