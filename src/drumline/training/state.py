"""Everything a run trains, as one value: the model, how it is called, its optimizer, and the average of its weights.

Promises: `tensors()` names every tensor that makes up the state (parameters, buffers, optimizer, average). All exist
from the start and are only ever written in place: saving copies them, loading writes into them.
Gradient checkpointing gives the same losses, gradients and buffers as training without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from drumline.config.learning import Optim
from drumline.config.recipe import Recipe
from drumline.config.sources import names_code
from drumline.core.errors import UserError
from drumline.core.text import counted
from drumline.models.base import repeated_blocks
from drumline.models.parts import freeze, is_frozen_layer, rate_factors
from drumline.parallel.sharded import local_shard
from drumline.parallel.strategy import SetupContext, Strategy
from drumline.training.optim import build_optimizer
from drumline.training.own_optimizer import OwnOptimizer
from drumline.training.schedule import Plan

Tensors = dict[str, torch.Tensor]


class Average:
    """`module` is a frozen copy of `model`, laid out as it is, whose state follows it with the given decay."""

    def __init__(self, module: nn.Module, model: nn.Module, decay: float) -> None:
        self.module, self.decay = module, decay
        pairs = [
            (local_shard(mine), local_shard(theirs))
            for mine, theirs in zip(module.state_dict().values(), model.state_dict().values(), strict=True)
            if not mine.is_meta  # belongs to another process
        ]
        assert all(mine.shape == theirs.shape for mine, theirs in pairs)
        self._floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """average += (1 - decay) · (model - average)."""
        mine, theirs = [a for a, _ in self._floats], [b for _, b in self._floats]
        torch._foreach_lerp_(mine, theirs, 1.0 - self.decay)
        for average, counter in self._counters:
            average.copy_(counter)


@dataclass(frozen=True)
class TrainState:
    """The trained module, the forward that a step calls, the optimizer, and the average."""

    module: nn.Module
    model: nn.Module
    """The model that is evaluated, averaged and exported: `module` itself, or a submodule of it, which the rest helps
    to train."""
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    lr: torch.Tensor
    scaler: torch.amp.GradScaler
    average: Average | None
    strategy: Strategy
    frozen: tuple[str, ...] = ()
    """The parameters of the module that `train.freeze` freezes at present."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """The factor on the learning rate of each trained parameter of the model."""

    def tensors(self) -> dict[str, Tensors]:
        """The state that this process holds, by file: `model` and `optimizer`; `average`, if there is one; and
        `helpers`, what is trained besides the model."""
        groups = {"model": dict(self.model.state_dict()), "optimizer": self._optimizer_tensors()}
        if helpers := self._helper_tensors():
            groups["helpers"] = helpers
        if self.average is not None:
            groups["average"] = dict(self.average.module.state_dict())
        return {group: _here(tensors) for group, tensors in groups.items()}

    @property
    def exported(self) -> str:
        """The group of `tensors` that is exported: the average, if there is one."""
        return "average" if self.average else "model"

    def nonfinite(self) -> list[str]:
        """Tensors of the model to export that contain NaN, and parameters that contain infinity, as far as this
        process holds them. (An infinite buffer may be a mask.) Waits for the device."""
        parameters = {name for name, _ in self.model.named_parameters()}
        exported = self.tensors()[self.exported]
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
        if isinstance(self.optimizer, OwnOptimizer):
            self.optimizer.undo_skipped()
        return {
            f"{slot}/{names[id(parameter)]}": self.strategy.optimizer_tensor(names[id(parameter)], tensor)
            for parameter, slots in self.optimizer.state.items()
            if id(parameter) in names  # a guard reports a parameter that the model has dropped
            for slot, tensor in slots.items()
        }


def _here(tensors: Tensors) -> Tensors:
    """Without those that other processes of a pipeline hold."""
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}


def build_state(
    strategy: Strategy,
    module: nn.Module,
    model: nn.Module | None = None,
    context: SetupContext = SetupContext(),  # noqa: B008
    frozen: Sequence[str] = (),
) -> TrainState:
    """Sets up `module` under its layout, with optimizer, loss scaler and average. `frozen` names modules of the model
    that are not trained at present; the other arguments are those of `Strategy.setup`."""
    recipe, part = strategy.recipe, module if model is None else model
    # Before the layout is applied, because a process may not hold the whole model afterwards.
    frozen_parameters, factors = freeze_and_rates(module, part, recipe.optim, frozen)
    if recipe.train.gradient_checkpointing:
        recompute_blocks(part)
    module.train()
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(
            f"model.name = {recipe.model.name}: the model has no trainable parameters",
            "give a model with parameters that require gradients",
        )
    forward = strategy.setup(module, model, context)
    # After setup, so that it starts from rank 0's weights: a user's factory may ignore torch's seed.
    average = Average(strategy.copy_model(), strategy.model, recipe.train.ema) if recipe.train.ema else None
    if recipe.train.compile:
        forward.compile()
    lr = torch.tensor(0.0, device=strategy.world.device)
    named = dict(strategy.named_parameters())
    optimizer = build_optimizer(
        recipe.optim,
        named.values(),
        lr,
        strategy.tensor_norms,
        [factors.get(name, 1.0) for name in named],
    )
    scaler = torch.amp.GradScaler("cuda", enabled=strategy.precision.scales_loss)
    return TrainState(
        module,
        strategy.model,
        forward,
        optimizer,
        lr,
        scaler,
        average,
        strategy,
        frozen_parameters,
        factors,
    )


def freeze_and_rates(
    module: nn.Module, model: nn.Module, optim: Optim, frozen: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, float]]:
    """Freezes these modules of the model. Returns the frozen parameters, and the factor on the learning rate of each
    other parameter of the model, by their names in `module`."""
    names = {id(each): name for name, each in module.named_parameters()}
    inside = {name: names[id(each)] for name, each in model.named_parameters()}
    factors = rate_factors(model, optim.head_lr, optim.layer_decay)
    parameters = freeze(model, frozen).parameters
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    if parameters and not trained:
        raise UserError(
            f"train.freeze = {','.join(frozen)}: freezes the whole model", "leave out the modules to train"
        )
    return tuple(inside[name] for name in parameters), {inside[name]: factors[name] for name in trained}


def describe_trained(
    module: nn.Module, recipe: Recipe, plan: Plan, frozen: Collection[str], factors: Mapping[str, float]
) -> list[str]:
    """Lines for the log: what is frozen, and the learning rates of the rest. Empty if everything trains at one rate.
    `frozen` and `factors` are those of a `TrainState`."""
    lines = []
    sizes = {name: each.numel() for name, each in module.named_parameters()}
    if frozen:
        count = sum(sizes[name] for name in frozen)
        names = ", ".join(recipe.train.freeze)
        until = f"until step {plan.unfreeze:,}" if plan.unfreeze else "for the whole run"
        norms = sum(is_frozen_layer(layer) for layer in module.modules())
        still = f"; {counted(norms, 'layer')} with running statistics in evaluation mode" if norms else ""
        lines.append(
            f"frozen {until}: {names}: {count:,} of {sum(sizes.values()):,} parameters{still}; "
            f"{sum(sizes[name] for name, each in module.named_parameters() if each.requires_grad):,} are trained"
        )
        if recipe.train.unfreeze_epoch and not plan.unfreeze:
            lines.append(
                f"WARNING: train.unfreeze_epoch={recipe.train.unfreeze_epoch:g} has no effect because the run ends "
                f"after {plan.total / plan.per_epoch:.4g} epochs: give a smaller one"
            )
        if not recipe.model.weights and not names_code(recipe.model.name):
            lines.append("WARNING: the frozen modules keep random weights because model.weights is empty")
    if set(factors.values()) - {1.0}:
        lines.append(f"learning rates: {describe_rates(plan.schedule.peak, factors)}")
    return lines


def describe_rates(peak: float, factors: Mapping[str, float]) -> str:
    """The peak rate of each group of parameters, lowest first."""
    counts = Counter(factors.values())
    rates = [f"{peak * factor:.3g} ({counted(count, 'tensor')})" for factor, count in sorted(counts.items())]
    return ", ".join(rates if len(rates) <= 4 else [*rates[:2], "...", *rates[-2:]])


def recompute_blocks(model: nn.Module) -> int:
    """Makes every repeated block of the model recompute its activations; returns how many there are."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise UserError(
            f"train.gradient_checkpointing = true: {type(model).__name__} has no repeated blocks to recompute",
            "leave the option off, or give a model of your own a method blocks() that lists them",
        )
    for block in blocks:
        block.forward = partial(_recomputed, block, block.forward)
    return len(blocks)


def _recomputed(block: nn.Module, forward: Any, *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    if torch.compiler.is_compiling():
        # Compiled code recomputes tensors, not Python: BatchNorm's buffers are written once anyway.
        return checkpoint(forward, *args, use_reentrant=False, **named)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=partial(_contexts, block),
        determinism_check="default",
        **named,
    )


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_untouched(block)


@contextmanager
def _statistics_untouched(block: nn.Module) -> Iterator[None]:
    """In training, BatchNorm normalises by the batch whatever its statistics: the second run writes to other buffers,
    which are never read. (Turning tracking off would save other tensors for backward.) Only buffers are changed:
    strict mode keeps these apart for shards that take turns in the middle of this."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm) and module.training]
    before = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        for name in ("running_mean", "running_var"):
            if (statistics := norm._buffers[name]) is not None:
                norm._buffers[name] = torch.empty_like(statistics)
        norm._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)
