"""Everything a run trains, as one value: the model, how it is called, its optimizer, its average.

Promises: `tensors()` names every tensor that makes up the state (parameters, buffers, optimizer, average). All exist
from the start and are only ever written in place: saving copies them, loading writes into them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drumline.core.errors import UserError
from drumline.parallel.local import local_shard
from drumline.parallel.strategy import Cut, Strategy
from drumline.training.ema import Average
from drumline.training.optim import build_optimizer
from drumline.training.recompute import recompute_blocks

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainState:
    """What is trained (`module`), what a step calls (`forward`), and what updates it."""

    module: nn.Module
    model: nn.Module
    """What is evaluated, averaged and exported: `module` itself, or a submodule that the rest helps to train."""
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    lr: torch.Tensor
    scaler: torch.amp.GradScaler
    average: Average | None
    strategy: Strategy

    def tensors(self) -> dict[str, Tensors]:
        """The state that this process holds, by file: `model` and `optimizer`; `average`, if there is one; and
        `helpers`, what is trained besides the model."""
        groups = {"model": dict(self.model.state_dict()), "optimizer": self._optimizer_tensors()}
        if helpers := self._helper_tensors():
            groups["helpers"] = helpers
        if self.average is not None:
            groups["average"] = dict(self.average.module.state_dict())
        return {group: _here(tensors) for group, tensors in groups.items()}

    def nonfinite(self) -> list[str]:
        """Tensors of the model to export that contain NaN, and parameters that contain infinity, as far as this
        process holds them. (An infinite buffer may be a mask.) Waits for the device."""
        parameters = {name for name, _ in self.model.named_parameters()}
        exported = self.tensors()["average" if self.average else "model"]
        here = {name: local_shard(tensor) for name, tensor in exported.items() if tensor.is_floating_point()}
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
        names = {id(parameter): name for name, parameter in self.strategy.named_parameters()}
        return {
            f"{slot}/{names[id(parameter)]}": self.strategy.optimizer_tensor(names[id(parameter)], tensor)
            for parameter, slots in self.optimizer.state.items()
            if id(parameter) in names  # a guard reports a parameter that the model has dropped
            for slot, tensor in slots.items()
        }


def build_state(
    strategy: Strategy,
    module: nn.Module,
    model: nn.Module | None = None,
    *,
    cut: Cut = Cut(),  # noqa: B008
    image_size: int = 0,
    saved: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> TrainState:
    """Lays `module` out and makes its optimizer, loss scaler and average. The arguments are those of
    `Strategy.setup`."""
    recipe = strategy.recipe
    if recipe.train.gradient_checkpointing:
        recompute_blocks(module if model is None else model)
    module.train()
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(
            f"model.name = {recipe.model.name}: the model has no trainable parameters",
            "give a model with parameters that require gradients",
        )
    forward = strategy.setup(module, model, cut=cut, image_size=image_size, saved=saved, log=log)
    # After setup, so that it starts from rank 0's weights: a user's factory may ignore torch's seed.
    average = Average(strategy.copy_model(), strategy.model, recipe.train.ema) if recipe.train.ema else None
    if recipe.train.compile:
        forward.compile()
    lr = torch.tensor(0.0, device=strategy.world.device)
    parameters = [parameter for _, parameter in strategy.named_parameters()]
    optimizer = build_optimizer(recipe.optim, parameters, lr, strategy.tensor_norms)
    scaler = torch.amp.GradScaler("cuda", enabled=strategy.autocast is torch.float16)
    return TrainState(module, strategy.model, forward, optimizer, lr, scaler, average, strategy)


def _here(tensors: Tensors) -> Tensors:
    """Without those that other processes of a pipeline hold."""
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
