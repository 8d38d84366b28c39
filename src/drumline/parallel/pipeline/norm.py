"""BatchNorm where a batch is computed in micro-batches: what each is normalised by, and what the running statistics
follow.

Promises: parameters, buffers and their names stay; a norm is changed where it stands, except for `sync`, which puts
another in its place. Nothing waits for the device. Other norms are left alone. Refuses layers that are more than a
BatchNorm where a mode would have to change what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.core.errors import UserError
from drumline.parallel.norm import PLAIN, Total, WorldNorm, over_everybody

Mode = Literal["micro", "deferred", "sync", "frozen"]
MODES: tuple[Mode, ...] = get_args(Mode)
FEW = 8
"""Fewer samples than this make a noisy mean and variance."""


def apply_norm_mode(module: nn.Module, mode: Mode, total: Total | None, micro_batches: int) -> nn.Module:
    """The module with its BatchNorm layers in this mode; the same object, unless it is itself a norm that `sync`
    replaces. `total` sums over the replicas of this stage (`sync` alone asks for it; None: there is one replica).
    Parts on the meta device are welcome: no tensor is read. A model is traced before `sync`."""
    norms = list(_norms(module))
    if mode == "frozen":
        for name, norm in norms:
            _freeze(norm, name)
        return module
    for name, norm in norms:
        _refuse_other(norm, name, mode, changes=mode != "micro")
    if mode == "sync":
        # torch's own would span every process, the other stages too.
        return (
            over_everybody(module, total)
            if total
            else over_everybody(module, Tensor.clone, (nn.SyncBatchNorm,))
        )
    if mode == "deferred" and micro_batches > 1:
        for _, norm in norms:
            if norm.track_running_stats and _deferral(norm) is None:
                _Deferral.of(norm)
    return module


def forget_statistics(module: nn.Module) -> None:
    """At the beginning of a step: drops what a forward outside of any step (a look at shapes, a step that broke off)
    has left in the deferred norms."""
    for norm in module.modules():
        if (deferral := _deferral(norm)) is not None:
            deferral.seen.clear()


@torch.no_grad()
def commit_statistics(module: nn.Module) -> None:
    """After the last forward of a step, on its stream: the running statistics of every deferred norm follow those of
    all its micro-batches together, as one BatchNorm over the whole batch would. Does nothing in other modes."""
    deferrals = [deferral for part in module.modules() if (deferral := _deferral(part)) and deferral.seen]
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
        share = 1.0 / counter.float() if norm.momentum is None else norm.momentum
        running_mean.lerp_(mean, share)
        running_var.lerp_(variance, share)
    forget_statistics(module)


def norm_count(module: nn.Module) -> int:
    """How many BatchNorm layers there are."""
    return sum(1 for _ in _norms(module))


def describe_norm(
    mode: Mode, norms: int, micro_batches: int, samples: int, replicas: int = 1, uneven: bool = False
) -> str:
    """The choice and what it means, in one line; empty where there is none to make. `samples` are those of the
    smallest micro-batch of one replica; `uneven` says that others have more."""
    if not norms:
        return f"parallel.batchnorm = {mode} changes nothing: the model has no BatchNorm" * (mode != "micro")
    if mode == "frozen":
        return "BatchNorm frozen: the running statistics normalise and stay as they are; weight and bias are trained"
    together = samples * replicas if mode == "sync" else samples
    each = f"each of {micro_batches} micro-batches" if micro_batches > 1 else "the batch"
    least = "at least " if uneven else ""
    of = f"{least}{samples} sample{'s' if samples != 1 else ''}"
    if mode == "sync" and replicas > 1:
        by = f"{each} is normalised over all {replicas} replicas, {least}{together} samples together"
    else:
        by = f"{each} of {of} is normalised by itself"
    times = "once a step" if micro_batches == 1 else f"{micro_batches} times a step"
    if mode == "deferred":
        times = "once a step, by all micro-batches together" if micro_batches > 1 else times
    text = f"BatchNorm {mode}: {by}; running statistics move {times}"
    if together < FEW:
        text += (
            f". Warning: statistics of {together} sample{'s' if together != 1 else ''} are noisy: take fewer "
            "micro-batches, a larger batch, or parallel.batchnorm = frozen"
        )
    return text


class _Deferral:
    """Stands in for the forward of a norm: in training, the statistics of each call are put aside in `seen`."""

    def __init__(self, norm: _BatchNorm, forward: Callable[[Tensor], Tensor]) -> None:
        self.norm, self.forward = norm, forward
        self.seen: list[_Seen] = []

    @staticmethod
    def of(norm: _BatchNorm) -> None:
        deferral = _Deferral(norm, norm.forward)
        # Kept by a name of its own too: recomputation may put itself before the forward.
        norm.deferral = deferral  # type: ignore[assignment]
        norm.forward = deferral  # type: ignore[method-assign]

    def __call__(self, input: Tensor) -> Tensor:
        norm = self.norm
        # Recomputation in backward takes the counter away: these statistics have been seen.
        if not norm.training or norm.num_batches_tracked is None:
            return self.forward(input)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        own, momentum = dict(norm._buffers), norm.momentum
        # With momentum 1 torch's own kernel writes the batch's mean and unbiased variance: no second pass.
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
"""Values per channel, their mean, their unbiased variance."""


def _joined(seen: list[list[_Seen]]) -> tuple[list[Tensor], list[Tensor]]:
    """Mean and unbiased variance of everything that each norm has seen. Differences from the joint mean are squared,
    not the values, so nothing cancels in fp32. All norms at once: a few launches per micro-batch."""
    counts = [[count for count, _, _ in calls] for calls in seen]
    totals = [sum(row) for row in counts]
    means = [torch.zeros_like(calls[0][1]) for calls in seen]
    variances = [torch.zeros_like(mean) for mean in means]
    rounds = [
        [norm for norm, calls in enumerate(seen) if len(calls) > call] for call in range(max(map(len, seen)))
    ]
    for call, norms in enumerate(rounds):
        shares = [counts[norm][call] / totals[norm] for norm in norms]
        parts = torch._foreach_mul([seen[norm][call][1] for norm in norms], shares)
        torch._foreach_add_([means[norm] for norm in norms], parts)
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
    """`train()` of a frozen norm: what a layer derived from BatchNorm holds besides follows the call."""
    for child in norm.children():
        child.train(mode)
    norm.training = False
    return norm


def _refuse_other(norm: _BatchNorm, name: str, mode: Mode, changes: bool) -> None:
    kind = type(norm).__name__
    if isinstance(norm, nn.SyncBatchNorm) and mode != "sync":
        raise UserError(
            f"parallel.batchnorm = {mode}: {name} is a {kind}, which would wait for the other stages of the pipeline",
            "use parallel.batchnorm = sync, which spans the replicas of a stage, or frozen",
        )
    if changes and type(norm) not in PLAIN and not (mode == "sync" and isinstance(norm, WorldNorm)):
        raise UserError(
            f"parallel.batchnorm = {mode}: {name} is a {kind}, which is more than a BatchNorm",
            "use a model with plain BatchNorm layers, or parallel.batchnorm = micro or frozen",
        )


def _norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            yield name or "the model", part
