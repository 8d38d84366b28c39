"""What batch-relational losses and normalisation need of other processes, with gradients that are right.

Promises: `Gathered` gives every process the rows of the whole global batch. A loss computed from them is the same
number on each, so each needs only the gradient of its own rows: backward exchanges nothing. The weights are such
that a loss counted once per own sample (as the step counts all losses) has the gradient of that loss, whatever the
number of processes. Refuses nothing; that every process computes the same loss from the rows is the caller's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.launch.world import World


class Gathered:
    """Calls as `gathered(rows)`: the rows of all processes in the order of the global batch."""

    def __init__(self, world: World, counts: Sequence[int]) -> None:
        self.world, self.counts = world, tuple(counts)

    def __call__(self, rows: Tensor) -> Tensor:
        if self.world.size == 1:
            return rows
        return _Rows.apply(rows, self.world, self.counts)


class _Rows(torch.autograd.Function):
    """The step weighs a loss L by own/global · processes and DDP divides by processes: of L(rows) this process would
    get own/global of the gradient of its rows, and no other process has the rest. Hence the factor global/own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World, counts: tuple[int, ...]) -> Tensor:
        first = sum(counts[: world.rank])
        ctx.own = slice(first, first + counts[world.rank])
        ctx.factor = sum(counts) / counts[world.rank]
        return world.gather_rows(rows, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.own] * ctx.factor, None, None


class WorldNorm(_BatchNorm):
    """BatchNorm whose statistics in training are those of the global batch. torch's own needs a GPU."""

    world: World

    @staticmethod
    def of(norm: _BatchNorm, world: World) -> WorldNorm:
        """The same layer, with the same parameters and buffers, over the whole world."""
        made = WorldNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        made.world, made.training = world, norm.training
        for name, parameter in norm.named_parameters(recurse=False):
            setattr(made, name, parameter)
        for name, buffer in norm.named_buffers(recurse=False):
            setattr(made, name, buffer)
        return made

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim >= 2, input.shape

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        axes = [axis for axis in range(x.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
        own = torch.full((1,), x.numel() // x.shape[1], dtype=x.dtype, device=x.device)
        sums = _Sum.apply(torch.cat([x.sum(axes), own]), self.world)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(axes), self.world) / count
        with torch.no_grad():
            self._follow(mean, variance * (count / (count - 1)))
        scaled = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            scaled = scaled * self.weight.view(shape) + self.bias.view(shape)
        return scaled.to(input.dtype)

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        assert self.momentum is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)


class _Sum(torch.autograd.Function):
    """Element-wise sum over the world; its gradient is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.sum(values.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.world.sum(grads[0].clone()), None


def over_the_world(module: nn.Module, world: World) -> nn.Module:
    """The module with every BatchNorm's statistics spanning all processes. Changed in place where it can be."""
    if world.size == 1:
        return module
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return WorldNorm.of(module, world)
    for name, child in module.named_children():
        replaced = over_the_world(child, world)
        if replaced is not child:
            setattr(module, name, replaced)
    return module
