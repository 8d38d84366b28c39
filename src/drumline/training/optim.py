"""Optimizers whose whole state exists from the start, and whose learning rate is a tensor on the device.

Promises: `step` does not sync with the host, so it can be captured as a CUDA graph. State tensors are created at the
start and only written in place, so checkpoints load into them and graphs keep their addresses. SGD and AdamW are
torch's fused kernels; torch has no LARS and LAMB, so they are written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from drumline.config.learning import Optim
from drumline.config.sources import names_code
from drumline.core.arithmetic import EagerOptimizer, eager_step, undone_if
from drumline.training.own_optimizer import own_optimizer

Norms = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]
"""The norms of whole tensors, given what this process holds of them and the parameters they belong to."""


def build_optimizer(
    optim: Optim,
    parameters: Iterable[nn.Parameter],
    lr: torch.Tensor,
    norms: Norms | None = None,
    factors: Sequence[float] = (),
) -> torch.optim.Optimizer:
    """The recipe's optimizer of the trainable parameters. The loop writes learning rates into the tensor `lr`.
    `norms` computes the norms for LARS and LAMB if parameters are sharded. `factors` multiply the rate of each
    parameter."""
    if names_code(optim.name):
        return own_optimizer(optim, parameter_groups(optim, parameters, factors))
    groups = by_device(parameter_groups(optim, parameters, factors), lr)
    slots = optimizer_slots(optim)
    optimizer = _BUILDERS[optim.name](optim, groups, lr)
    if isinstance(optimizer, DeviceRate) and norms is not None:
        optimizer.norms = norms
    for parameter in _parameters(optimizer):
        optimizer.state[parameter] = {slot: _slot(slot, parameter) for slot in slots}
    return optimizer


def optimizer_slots(optim: Optim) -> tuple[str, ...]:
    """The state tensors of each parameter. All start at zero."""
    if optim.name in ("adamw", "lamb"):
        return ("step", "exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if optim.momentum or optim.name == "lars" else ()


def parameter_groups(
    optim: Optim, parameters: Iterable[nn.Parameter], factors: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """Trainable parameters with their weight decay; vectors and scalars (biases, norms) have their own group, and so
    does each factor on the rate."""
    # Parameters on the meta device belong to a different process.
    pairs = [
        (parameter, factor)
        for parameter, factor in zip_longest(parameters, factors, fillvalue=1.0)
        if isinstance(parameter, torch.Tensor) and parameter.requires_grad and not parameter.is_meta
    ]
    by_factor: dict[float, list[torch.Tensor]] = {}
    for parameter, factor in pairs:
        by_factor.setdefault(factor, []).append(parameter)
    return [
        {**group, "factor": factor}
        for factor, trainable in (by_factor or {1.0: []}).items()
        for group in _decay_groups(optim, trainable)
    ]


def _decay_groups(optim: Optim, trainable: list[torch.Tensor]) -> list[dict[str, Any]]:
    if optim.decay_all and optim.name not in ("lars", "lamb"):
        return [{"params": trainable, "weight_decay": optim.weight_decay, "adapt": True}]
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    vectors = [parameter for parameter in trainable if parameter.ndim <= 1]
    vector_decay = optim.weight_decay if optim.decay_all else 0.0
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay, "adapt": True},
        {"params": vectors, "weight_decay": vector_decay, "adapt": False},
    ]
    return [group for group in groups if group["params"]]


def by_device(groups: list[dict[str, Any]], lr: torch.Tensor) -> list[dict[str, Any]]:
    """Splits the groups by device if stages of one process are on several, with a rate on each: torch 2.13's fused
    kernels read the rate on the device of the parameters and do not copy it there. Groups with a factor have a tensor
    of their own."""
    found: dict[tuple[int, torch.device], dict[str, Any]] = {}
    rates: dict[tuple[torch.device, float], torch.Tensor] = {}
    for number, group in enumerate(groups):
        factor = group.get("factor", 1.0)
        for parameter in group["params"]:
            device = parameter.device
            shared = device == lr.device and factor == 1
            rate = rates.setdefault((device, factor), lr if shared else lr.to(device, copy=True))
            found.setdefault((number, device), {**group, "params": [], "lr": rate})["params"].append(
                parameter
            )
    return list(found.values())


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Writes the learning rate times each factor to where the optimizer reads it: a tensor for each device and
    factor, or a number in each group."""
    tensors = {id(group["lr"]): (group["lr"], group.get("factor", 1.0)) for group in optimizer.param_groups}
    for tensor, factor in tensors.values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(rate * factor)
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = rate * group.get("factor", 1.0)


def whole_norms(tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of each tensor."""
    return torch.stack(torch._foreach_norm(list(tensors)))


class SGD(EagerOptimizer, torch.optim.SGD):
    """torch's SGD, without importing the compiler."""

    step = eager_step(torch.optim.SGD)


class AdamW(EagerOptimizer, torch.optim.AdamW):
    """torch's AdamW, without importing the compiler."""

    step = eager_step(torch.optim.AdamW)


class DeviceRate(EagerOptimizer):
    """The base of LARS and LAMB: multi-tensor steps, and torch's protocol for loss scaling without a sync
    (`GradScaler` sets `grad_scale` and `found_inf`; a step with an infinite gradient must change nothing)."""

    _step_supports_amp_scaling = True
    norms: Norms = staticmethod(whole_norms)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        # `GradScaler` sets both for the duration of the call, and fails if they exist before it.
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            device = parameters[0].device  # of all: see `by_device`
            gradients = [parameter.grad.float() for parameter in parameters]
            if scale is not None:
                gradients = list(torch._foreach_div(gradients, scale.to(device)))
            if found_inf is None:
                self.update(group, parameters, gradients)
                continue
            with undone_if(found_inf, [t for p in parameters for t in (p, *self.state[p].values())]):
                self.update(group, parameters, gradients)

    def update(
        self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        raise NotImplementedError


class LARS(DeviceRate):
    """Layer-wise adaptive rate scaling (You et al., 2017): each matrix moves by trust·‖w‖/(‖g‖ + λ‖w‖) times
    its momentum step; vectors (`adapt=False`) move as in plain SGD."""

    def __init__(
        self, params: Iterable[Any], lr: torch.Tensor, momentum: float = 0.9, trust: float = 0.001
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": 0.0, "adapt": True}
        )

    def update(
        self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        decay = group["weight_decay"]
        directions = list(torch._foreach_add(gradients, parameters, alpha=decay))
        if group["adapt"]:
            weights = self.norms(parameters, parameters)
            slopes = self.norms(gradients, parameters) + decay * weights
            ratios = torch.where((weights > 0) & (slopes > 0), group["trust"] * weights / slopes, 1.0)
            directions = list(torch._foreach_mul(directions, list(ratios.unbind())))
        moments = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_mul_(moments, group["momentum"])
        torch._foreach_add_(moments, directions)
        torch._foreach_sub_(parameters, torch._foreach_mul(moments, group["lr"]))


class LAMB(DeviceRate):
    """Layer-wise adaptive moments (You et al., 2020): AdamW's direction, rescaled per matrix to the norm of
    its weights; vectors (`adapt=False`) are not rescaled."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: torch.Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "adapt": True})

    def update(
        self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        beta1, beta2 = group["betas"]
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        # Every parameter takes each step, so one counter serves the whole group.
        mean_bias, square_bias = 1 - beta1 ** steps[0], 1 - beta2 ** steps[0]
        roots = torch._foreach_sqrt(torch._foreach_div(squares, square_bias))
        torch._foreach_add_(roots, group["eps"])
        directions = torch._foreach_div(torch._foreach_div(means, mean_bias), roots)
        torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        if group["adapt"]:
            weights = self.norms(parameters, parameters)
            lengths = self.norms(directions, parameters)
            ratios = torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
            directions = torch._foreach_mul(directions, list(ratios.unbind()))
        torch._foreach_sub_(parameters, torch._foreach_mul(directions, group["lr"]))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _slot(name: str, parameter: torch.Tensor) -> torch.Tensor:
    if name == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


_BUILDERS: dict[str, Callable[[Optim, list[dict[str, Any]], torch.Tensor], torch.optim.Optimizer]] = {
    "sgd": lambda optim, groups, lr: SGD(
        groups, lr=lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True
    ),
    "adamw": lambda optim, groups, lr: AdamW(
        groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=True, capturable=lr.is_cuda
    ),
    "lars": lambda optim, groups, lr: LARS(groups, lr=lr, momentum=optim.momentum, trust=optim.trust),
    "lamb": lambda optim, groups, lr: LAMB(groups, lr=lr, betas=optim.betas, eps=optim.eps),
}
