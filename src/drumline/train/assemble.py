"""All that a run trains, put together: the module laid out over the world, its optimizer, loss scaler and average.

Promises: every process starts from rank 0's weights; the state that training changes exists from here on.
"""

from __future__ import annotations

import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.parallel.layout import lay_out, resolve_layout
from drumline.parallel.world import World
from drumline.train.ema import Average
from drumline.train.optim import build_optimizer
from drumline.train.prepare import precision
from drumline.train.recompute import recompute_blocks
from drumline.train.state import TrainState


def prepare_state(
    recipe: Recipe,
    module: nn.Module,
    world: World,
    model: nn.Module | None = None,
    tail: nn.Module | None = None,
) -> TrainState:
    """The module laid out over the world, with optimizer, loss scaler and average. `model` is the part of it that the
    run is for, if not all of it; `tail` is what a step calls in its place where it is laid in stages already."""
    model = module if model is None else model
    if recipe.train.gradient_checkpointing and tail is None:
        recompute_blocks(model)
    module.train()
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(
            f"model.name = {recipe.model.name}: the model has no trainable parameters",
            "give a model with parameters that require gradients",
        )
    if tail is not None:
        forward = tail
    elif recipe.run.strict:
        forward = module
        for tensor in (*module.parameters(), *module.buffers()):
            world.broadcast(tensor.detach())
    elif recipe.parallel.layout == "fsdp":
        return _sharded(recipe, module, model, world)
    else:
        forward = lay_out(module, resolve_layout(recipe.parallel.layout, world), world)
    # After every rank was given rank 0's weights: a user's factory may not keep to torch's seed.
    average = Average(model, recipe.train.ema) if recipe.train.ema else None
    if recipe.train.compile:
        forward.compile()
    lr = torch.tensor(0.0, device=world.device)
    scaler = torch.amp.GradScaler("cuda", enabled=precision(recipe, world) is torch.float16)
    return TrainState(module, model, forward, build_optimizer(recipe.optim, module, lr), lr, scaler, average)


def _sharded(recipe: Recipe, module: nn.Module, model: nn.Module, world: World) -> TrainState:
    """Each process with its part of everything."""
    # torch's sharding takes half a second to import, which no other layout should pay.
    from drumline.parallel.fsdp import Held, shard

    kind = precision(recipe, world)
    # Before: a sharded module cannot be copied.
    average = Average(model, recipe.train.ema) if recipe.train.ema else None
    shard(module, world, kind)
    if average is not None:
        shard(average.module, world, kind)
        average.follow(model)
    held, lr = Held(module), torch.tensor(0.0, device=world.device)
    optimizer = build_optimizer(recipe.optim, module, lr, held.parameters.values())
    scaler = torch.amp.GradScaler("cuda", enabled=kind is torch.float16)
    return TrainState(module, model, module, optimizer, lr, scaler, average, held)
