"""BatchNorm under a layout: over the global batch, over micro-batches, and with few samples.

Promises: over the global batch, forward and backward equal one BatchNorm over all samples, however they are divided,
and the running statistics are the same on every process. Parameters, buffers and their names stay. Nothing waits for
the device. Rejects a layer that is more than a BatchNorm where it would have to be replaced. A run whose BatchNorm
would see one value per channel ends before its first step, naming the field that causes it and a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.core.errors import UserError
from drumline.core.text import counted
from drumline.models.parts import freeze_layer, is_frozen_layer
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
        if is_frozen_layer(norm):
            freeze_layer(made)
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
            _update_running(self, mean, variance * (count / (count - 1)))
        scaled = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            scaled = scaled * self.weight.view(shape) + self.bias.view(shape)
        return scaled.to(input.dtype)


def _update_running(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Moves the running statistics, if there are any, towards those of a step."""
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    norm.num_batches_tracked.add_(1)
    # Without momentum, the mean of all steps so far.
    rate = 1.0 / norm.num_batches_tracked.float() if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), rate)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), rate)


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


Mode = Literal["micro", "deferred", "sync", "frozen"]
MODES: tuple[Mode, ...] = get_args(Mode)


def apply_norm_mode(module: nn.Module, mode: Mode, total: Total | None, micro_batches: int) -> nn.Module:
    """Sets the mode of all BatchNorm layers. Returns the same module, unless it is itself a norm that `sync`
    replaces. `total` sums over the replicas of this stage. Only `sync` needs it, and None means one replica. Tensors
    may be on the meta device: none is read. Trace a model before `sync`."""
    norms = list(_norms(module))
    if mode == "frozen":
        for name, norm in norms:
            _freeze(norm, name)
        return module
    for name, norm in norms:
        _check_norm(norm, name, mode, changes=mode != "micro")
    if mode == "sync":
        # torch's SyncBatchNorm would span every process, including those of other stages.
        return over_all(module, total) if total else over_all(module, Tensor.clone, (nn.SyncBatchNorm,))
    if mode == "deferred" and micro_batches > 1:
        for _, norm in norms:
            if norm.track_running_stats and _deferral(norm) is None:
                _Deferral.of(norm)
    return module


def forget_statistics(module: nn.Module) -> None:
    """At the beginning of a step: drops what a forward outside of a step, or in an aborted one, has left in the
    deferred norms."""
    for norm in module.modules():
        if (deferral := _deferral(norm)) is not None:
            deferral.seen.clear()


@torch.no_grad()
def commit_statistics(module: nn.Module) -> None:
    """After the last forward of a step, on its stream: updates the running statistics of every deferred norm from all
    micro-batches together, as one BatchNorm over the whole batch would. Does nothing in other modes."""
    deferrals = [deferral for norm in module.modules() if (deferral := _deferral(norm)) and deferral.seen]
    if not deferrals:
        return
    means, variances = _joined([deferral.seen for deferral in deferrals])
    for deferral, mean, variance in zip(deferrals, means, variances, strict=True):
        _update_running(deferral.norm, mean, variance)
    forget_statistics(module)


def norm_count(module: nn.Module) -> int:
    """The number of BatchNorm layers."""
    return sum(1 for _ in _norms(module))


def describe_norm(
    mode: Mode, norms: int, micro_batches: int, samples: int, replicas: int = 1, uneven: bool = False
) -> str:
    """Describes the mode and its effect in one line, or '' if there is no choice to make. `samples` is the size of
    the smallest micro-batch of one replica. `uneven` says that others are larger."""
    if not norms:
        return f"parallel.batchnorm = {mode} changes nothing: the model has no BatchNorm" * (mode != "micro")
    if mode == "frozen":
        return (
            "BatchNorm frozen: uses the running statistics, which do not change; weight and bias are trained"
        )
    together = samples * replicas if mode == "sync" else samples
    each = f"each of {micro_batches} micro-batches" if micro_batches > 1 else "the batch"
    least = "at least " if uneven else ""
    of = f"{least}{counted(samples, 'sample')}"
    if mode == "sync" and replicas > 1:
        by = f"{each} is normalised over all {replicas} replicas, {least}{together} samples in total"
    else:
        by = f"{each} of {of} is normalised on its own"
    times = "once a step" if micro_batches == 1 else f"{micro_batches} times a step"
    if mode == "deferred":
        times = "once a step, from all micro-batches together" if micro_batches > 1 else times
    text = f"BatchNorm {mode}: {by}; running statistics are updated {times}"
    if together < FEW:
        text += (
            f". Warning: statistics of {counted(together, 'sample')} are noisy: use fewer "
            "micro-batches, a larger batch, or parallel.batchnorm = frozen"
        )
    return text


class _Deferral:
    """Replaces the forward of a norm. In training, it collects the statistics of each call in `seen`."""

    def __init__(self, norm: _BatchNorm, forward: Callable[[Tensor], Tensor]) -> None:
        self.norm, self.forward = norm, forward
        self.seen: list[_Seen] = []

    @staticmethod
    def of(norm: _BatchNorm) -> None:
        deferral = _Deferral(norm, norm.forward)
        # Also under a name of its own: recomputation may replace the forward again.
        norm.deferral = deferral  # type: ignore[assignment]
        norm.forward = deferral  # type: ignore[method-assign]

    def __call__(self, input: Tensor) -> Tensor:
        norm = self.norm
        # Recomputation in backward removes the counter: these statistics are already collected.
        if not norm.training or norm.num_batches_tracked is None:
            return self.forward(input)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        own, momentum = dict(norm._buffers), norm.momentum
        # With momentum 1, torch's kernel writes the mean and the unbiased variance of the batch: no second pass.
        mean, variance = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
        norm._buffers.update(running_mean=mean, running_var=variance, num_batches_tracked=None)
        norm.momentum = 1.0
        try:
            output = self.forward(input)
        finally:
            norm._buffers.update(own)
            norm.momentum = momentum
        self.seen.append((input.numel() // input.shape[1], mean, variance))
        return output


_Seen = tuple[int, Tensor, Tensor]
"""The number of values per channel, their mean and their unbiased variance."""


def _joined(seen: list[list[_Seen]]) -> tuple[list[Tensor], list[Tensor]]:
    """The mean and unbiased variance of everything that each norm has seen. Squares differences from the joint mean,
    not values, so nothing cancels in fp32. Works on all norms at once: a few launches per micro-batch."""
    counts = [[count for count, _, _ in calls] for calls in seen]
    totals = [sum(row) for row in counts]
    means = [torch.zeros_like(calls[0][1]) for calls in seen]
    variances = [torch.zeros_like(mean) for mean in means]
    rounds = [
        [norm for norm, calls in enumerate(seen) if len(calls) > call] for call in range(max(map(len, seen)))
    ]
    for call, norms in enumerate(rounds):
        weights = [counts[norm][call] / totals[norm] for norm in norms]
        weighted = torch._foreach_mul([seen[norm][call][1] for norm in norms], weights)
        torch._foreach_add_([means[norm] for norm in norms], weighted)
    for call, norms in enumerate(rounds):
        into = [variances[norm] for norm in norms]
        within = [(counts[norm][call] - 1) / (totals[norm] - 1) for norm in norms]
        torch._foreach_add_(into, torch._foreach_mul([seen[norm][call][2] for norm in norms], within))
        apart = torch._foreach_sub([seen[norm][call][1] for norm in norms], [means[norm] for norm in norms])
        between = [counts[norm][call] / (totals[norm] - 1) for norm in norms]
        torch._foreach_add_(into, torch._foreach_mul(torch._foreach_mul(apart, apart), between))
    return means, variances


def _deferral(norm: nn.Module) -> _Deferral | None:
    return vars(norm).get("deferral")


def _freeze(norm: _BatchNorm, name: str) -> None:
    if norm.running_mean is None:
        raise UserError(
            f"parallel.batchnorm = frozen: {name} has no running statistics (track_running_stats is off)",
            "use micro, or a model whose BatchNorm layers track statistics",
        )
    freeze_layer(norm)


def _check_norm(norm: _BatchNorm, name: str, mode: Mode, changes: bool) -> None:
    kind = type(norm).__name__
    if isinstance(norm, nn.SyncBatchNorm) and mode != "sync":
        raise UserError(
            f"parallel.batchnorm = {mode}: {name} is a {kind}, which would wait for other stages of the pipeline",
            "use parallel.batchnorm = sync, which spans the replicas of a stage, or frozen",
        )
    if changes and type(norm) not in PLAIN and not (mode == "sync" and isinstance(norm, WorldNorm)):
        raise UserError(
            f"parallel.batchnorm = {mode}: {name} is a {kind}, which is more than a BatchNorm",
            "use a model with plain BatchNorm layers, or parallel.batchnorm = micro or frozen",
        )


def _norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    for name, norm in module.named_modules():
        if isinstance(norm, _BatchNorm):
            yield name or "the model", norm
