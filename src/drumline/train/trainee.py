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
    """The model (`module`), the wrapped model that a step calls (`forward`), and what updates them."""

    module: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    lr: torch.Tensor
    scaler: torch.amp.GradScaler
    average: Average | None

    def tensors(self) -> dict[str, Tensors]:
        """State by file: `model`, `optimizer` and, when there is one, `average`."""
        groups = {"model": dict(self.module.state_dict()), "optimizer": self._optimizer_tensors()}
        if self.average is not None:
            groups["average"] = dict(self.average.module.state_dict())
        return groups

    def _optimizer_tensors(self) -> Tensors:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return {
            f"{slot}/{names[id(parameter)]}": tensor
            for parameter, slots in self.optimizer.state.items()
            for slot, tensor in slots.items()
        }
