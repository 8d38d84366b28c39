"""Everything a run trains, as one value: the model, how it is called, its optimizer, its average.

Promises: `tensors()` names every tensor that makes up the state (parameters, buffers, optimizer, average), all
of which exist from the start and are only ever written in place. Saving copies them, loading writes into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from drumline.parallel.local import local_part
from drumline.train.ema import Average

if TYPE_CHECKING:
    from drumline.parallel.fsdp import Held

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainState:
    """All that is trained (`module`), the wrapped module that a step calls (`forward`), and what updates them."""

    module: nn.Module
    model: nn.Module
    """What is evaluated, averaged and exported: `module` itself, or the part of it that the rest helps to train."""
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    lr: torch.Tensor
    scaler: torch.amp.GradScaler
    average: Average | None
    held: Held | None = None
    """Where the module is sharded: what the optimizer updates, which is not the module's own parameters then."""

    def tensors(self) -> dict[str, Tensors]:
        """State by file, as far as this process holds it: `model`, `optimizer`; when there is one, `average`; and
        `helpers`, what is trained beside the model."""
        groups = {"model": dict(self.model.state_dict()), "optimizer": self._optimizer_tensors()}
        if helpers := self._helper_tensors():
            groups["helpers"] = helpers
        if self.average is not None:
            groups["average"] = dict(self.average.module.state_dict())
        return {group: _here(tensors) for group, tensors in groups.items()}

    def nonfinite(self) -> list[str]:
        """Tensors of the model that would be exported, as far as they are here, that hold NaN, and parameters that
        hold infinity. (An infinite buffer may be a mask.) Waits for the device."""
        parameters = {name for name, _ in self.model.named_parameters()}
        exported = self.tensors()["average" if self.average else "model"]
        here = {name: local_part(tensor) for name, tensor in exported.items() if tensor.is_floating_point()}
        return [
            name
            for name, tensor in here.items()
            if not (tensor.isfinite() if name in parameters else ~tensor.isnan()).all()
        ]

    def _helper_tensors(self) -> Tensors:
        if self.model is self.module:
            return {}
        inside = next(name for name, part in self.module.named_modules() if part is self.model)
        state = self.module.state_dict()
        return {name: tensor for name, tensor in state.items() if not name.startswith(f"{inside}.")}

    def _optimizer_tensors(self) -> Tensors:
        named = self.module.named_parameters() if self.held is None else self.held.parameters.items()
        names = {id(parameter): name for name, parameter in named}
        return {
            f"{slot}/{names[id(parameter)]}": self._as_held(names[id(parameter)], tensor)
            for parameter, slots in self.optimizer.state.items()
            if id(parameter) in names  # one that a model has dropped is told by a guard
            for slot, tensor in slots.items()
        }

    def _as_held(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.held is None else self.held.slot(name, tensor)


def _here(tensors: Tensors) -> Tensors:
    """Without those that another process of a pipeline holds."""
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
