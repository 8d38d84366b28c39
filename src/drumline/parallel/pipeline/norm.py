"""BatchNorm where a batch is computed in micro-batches: what normalises each of them, and what the running statistics
follow.

Promises: parameters, buffers and their names stay. A norm is changed in place, except by `sync`, which replaces it.
Nothing waits for the device. Other norms are left alone.
Rejects a layer that is more than a BatchNorm if a mode would have to change what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.core.errors import UserError
from drumline.parallel.norm import FEW, PLAIN, Total, WorldNorm, over_all

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
        norm = deferral.norm
        running_mean, running_var, counter = norm.running_mean, norm.running_var, norm.num_batches_tracked
        assert running_mean is not None
        assert running_var is not None
        assert counter is not None
        counter.add_(1)
        # Without momentum, the mean of all steps so far.
        weight = 1.0 / counter.float() if norm.momentum is None else norm.momentum
        running_mean.lerp_(mean, weight)
        running_var.lerp_(variance, weight)
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
    of = f"{least}{samples} sample{'s' if samples != 1 else ''}"
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
            f". Warning: statistics of {together} sample{'s' if together != 1 else ''} are noisy: use fewer "
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
    norm.train = partial(_stay_in_eval, norm)  # type: ignore[method-assign]
    norm.eval()


def _stay_in_eval(norm: _BatchNorm, mode: bool = True) -> _BatchNorm:
    """`train()` of a frozen norm: it stays in evaluation mode, but its children follow the call."""
    for child in norm.children():
        child.train(mode)
    norm.training = False
    return norm


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
