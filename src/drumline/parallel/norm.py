"""BatchNorm over the global batch, on any device and in strict mode; and what BatchNorm does with few samples.

Promises: forward and backward equal one BatchNorm over all samples, however they are divided; the running statistics
are the same on every process. Refuses layers that are more than a BatchNorm: replacing them would change the network.
A run whose BatchNorm would see one value per channel ends before its first step, naming the field that causes it and
a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.core.errors import UserError
from drumline.core.text import counted
from drumline.parallel.world import World

Total = Callable[[Tensor], Tensor]
"""The element-wise sum over all who compute, as a new tensor."""
FEW = 8
"""Fewer samples than this make a noisy mean and variance."""
_ONE_VALUE = "more than 1 value per channel when training"
"""From torch's own message."""
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class WorldNorm(_BatchNorm):
    """torch's SyncBatchNorm needs a GPU and one process per slice of the batch; this layer needs neither."""

    total: Total

    @staticmethod
    def of(norm: _BatchNorm, total: Total) -> WorldNorm:
        """The same layer, with the same parameters and buffers, over all who compute."""
        _never_compile()
        made = WorldNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        made.total, made.training = total, norm.training
        for name, parameter in norm.named_parameters(recurse=False):
            setattr(made, name, parameter)
        for name, buffer in norm.named_buffers(recurse=False):
            setattr(made, name, buffer)
        return made

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim >= 2, input.shape

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            # Without running statistics, those of this batch: evaluation does not communicate.
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=self.running_mean is None,
                eps=self.eps,
            )
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        axes = [axis for axis in range(x.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
        own = torch.full((1,), x.numel() // x.shape[1], dtype=x.dtype, device=x.device)
        sums = _Sum.apply(torch.cat([x.sum(axes), own]), self.total)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(axes), self.total) / count
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
        # Without momentum, the mean of all batches so far.
        rate = 1.0 / self.num_batches_tracked.float() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(variance.to(self.running_var.dtype), rate)


@cache
def _never_compile() -> None:
    """The compiler would see different code where a process has several shards than where it has one, and fuse the
    code around it differently, so bits would depend on the number of processes. Called for the first layer only,
    because importing the compiler takes as long as importing torch."""
    WorldNorm.forward = torch.compiler.disable(WorldNorm.forward)  # type: ignore[method-assign]


class _Sum(torch.autograd.Function):
    """A sum over all processes; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, total: Total) -> Tensor:
        ctx.total = total
        return total(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.total(grads[0]), None


def world_total(world: World) -> Total:
    """The sum over processes, by the backend."""
    return lambda values: world.all_reduce(values.clone())


def over_all(
    module: nn.Module, total: Total, kinds: tuple[type[nn.Module], ...] = PLAIN, name: str = ""
) -> nn.Module:
    """The module with every BatchNorm of these kinds (not their subclasses) over all who compute. In place if
    possible."""
    if type(module) in kinds:
        return WorldNorm.of(module, total)  # type: ignore[arg-type]
    if isinstance(module, _BatchNorm) and not isinstance(module, WorldNorm) and _own_forward(module, kinds):
        raise UserError(
            f"train.sync_bn: {name or 'the model'} is a {type(module).__name__}, which is more than a BatchNorm",
            "use a model with plain BatchNorm layers, or leave train.sync_bn out",
        )
    # named_children() would pass over the second name of a layer that has two.
    for child_name, child in list(module._modules.items()):
        if child is None:
            continue
        replaced = over_all(child, total, kinds, f"{name}.{child_name}".lstrip("."))
        if replaced is not child:
            setattr(module, child_name, replaced)
    return module


def _own_forward(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether it is a layer derived from such a kind, by a user or a library, which would have to be replaced."""
    return isinstance(module, kinds) and type(module) not in PLAIN


@dataclass(frozen=True)
class SmallestBatch:
    """The smallest batch that goes through a model at once, the fields that decide it, and how to enlarge it."""

    samples: int
    why: str
    fix: str

    @staticmethod
    def of_processes(samples: int, batch: int, processes: int) -> SmallestBatch:
        """Of a global batch divided over processes, or not at all."""
        if processes > 1:
            return SmallestBatch(
                samples,
                f"with data.batch = {batch}, one of {processes} processes gets only {counted(samples, 'sample')}",
                "use a larger --data.batch, fewer processes, or --train.sync_bn",
            )
        return SmallestBatch(
            samples,
            f"data.batch = {batch}",
            f"use a larger --data.batch ({FEW} or more), or a model without BatchNorm",
        )


@contextmanager
def explain_one_value(smallest: SmallestBatch) -> Iterator[None]:
    """Explains torch's refusal to train BatchNorm on one value per channel."""
    try:
        yield
    except ValueError as error:
        cause: BaseException | None = error
        while cause is not None and _ONE_VALUE not in str(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        found = re.search(r"Size\(\[([\d, ]+)\]\)", str(cause))
        given = f", {found[1].replace(', ', ' x ')}" if found else ""
        what = f"BatchNorm cannot train on one value per channel (a sample of 1 x 1 pixels{given})"
        if smallest.samples > 1:
            raise UserError(what, "let the model give its BatchNorm layers more than one sample") from error
        raise UserError(f"{smallest.why}: {what}", smallest.fix) from error


def few_samples(module: nn.Module, smallest: SmallestBatch) -> str:
    """A warning where BatchNorm computes its statistics from few samples; else empty."""
    norms = sum(
        layer.training
        and isinstance(layer, _BatchNorm)
        and not isinstance(layer, WorldNorm | nn.SyncBatchNorm)
        for layer in module.modules()
    )
    if not norms or smallest.samples >= FEW:
        return ""
    samples = counted(smallest.samples, "sample")
    return (
        f"WARNING: {smallest.why}: BatchNorm ({counted(norms, 'layer')}) computes its statistics from {samples}, "
        f"which is noisy; {smallest.fix}"
    )
