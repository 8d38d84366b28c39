"""Functions of torch that a training loop calls, observed while a guard is open: backward, clipping, the loss scaler,
collectives, data loaders. A listener passes what they show on to the monitors of one model.

Promises: every call goes to torch unchanged, with the same result; listeners are called before or after it, never
instead of it. The functions are restored when the last guard closes. Code that imported a collective,
`cross_entropy`, `nan_to_num` or `clip_grad_value_` by name before the guard opened is not observed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from drumline.guards.checks.settings import loss_settings
from drumline.guards.script.comparison import Comparison, Monitors
from drumline.guards.script.nonfinite import IMMEDIATE_STEPS, HiddenNaN
from drumline.guards.script.parameters import Parameters
from drumline.guards.script.probes import capturing

_LABEL_STEPS = 12
"""Steps in which labels are compared."""
_MOST_TARGETS = 8


class Listener:
    """The calls of the script that concern the step in progress."""

    def __init__(
        self,
        monitors: Monitors,
        hidden: HiddenNaN,
        parameters: Parameters,
        optimizers: Sequence[Optimizer],
        comparison: Comparison,
    ) -> None:
        self._comparison = comparison
        sizes = [parameter.numel() for parameter in comparison.model.parameters()]
        self._whole = sum(sizes)
        self._sizes = {*sizes, self._whole} - {0, 1}
        self._hang, self._loaders, self._losses = monitors.hang, monitors.loaders, monitors.losses
        self._probes, self._forwards = monitors.probes, monitors.forwards
        self._hidden, self._parameters, self._optimizers = hidden, parameters, optimizers

    @property
    def _in_step(self) -> bool:
        """After a forward pass of the model and before the update."""
        return self._hang.phase == "step"

    def backward_begins(self, roots: Any) -> None:
        """`torch.autograd.backward` is called on these tensors."""
        if capturing():
            return
        in_step, losses = self._in_step, self._losses
        if in_step and self._probes.cleared():
            for one in (losses, self._hidden, self._forwards):
                one.restart()
        losses.backward_begins(roots, in_step)
        early = losses.step <= IMMEDIATE_STEPS or not torch.cuda.is_initialized()
        if in_step and early and losses.targets and self._loaders.in_order(self._forwards.calls):
            losses.check_labels(self._loaders.labels)

    def backward_ended(self) -> None:
        """All gradients of that call are complete."""
        if capturing():
            return
        in_step = self._in_step
        self._probes.backward_ended(self._first_held())
        self._parameters.backward_ended(in_step)
        if in_step and not self._losses.uses_scaler:
            self._hidden.backward_ended(self._losses.step, self._first_held())

    def _first_held(self) -> Iterator[torch.Tensor]:
        return (p for group in self._optimizers[0].param_groups for p in group["params"])

    def clips(self, parameters: Any, limit: float) -> None:
        """Gradients are about to be clipped."""
        held = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        if any(id(parameter) in held for parameter in parameters):
            self._losses.clipped(limit)

    def scales(self, scaler: Any) -> None:
        """An enabled GradScaler scales a loss."""
        if self._in_step:
            self._losses.scaler = scaler

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        """An enabled GradScaler is about to unscale an optimizer's gradients."""
        if optimizer in self._optimizers:
            self._losses.unscaled(scaler)

    def detaches(self, tensor: Any, outputs: Any) -> None:
        """A collective without gradients was called on a tensor that has one."""
        if self._in_step and not self._hang.backward:
            self._losses.detached(tensor, outputs)

    def reduces(self, tensor: Any) -> None:
        """`all_reduce` was called on this tensor."""
        # Each parameter by itself, or all in one flat copy. The size rules out most other tensors.
        comparison = self._comparison
        if self._hang.phase != "between" or comparison.exchanged or tensor.numel() not in self._sizes:
            return
        comparison.exchanged = tensor.numel() == self._whole or any(
            tensor.data_ptr() == parameter.data_ptr() for parameter in comparison.model.parameters()
        )

    def computes_loss(self, target: Any, settings: dict[str, Any]) -> None:
        """`cross_entropy` is called with this target, and with these further arguments."""
        losses = self._losses
        if losses.step <= _LABEL_STEPS and len(losses.targets) < _MOST_TARGETS:
            losses.targets.append(target)
            if losses.step <= IMMEDIATE_STEPS and not capturing():
                losses.settings.add(loss_settings(settings))

    def replaces_nan(self, tensor: Any) -> None:
        """`nan_to_num` is called on a tensor that has a gradient."""
        if self._in_step and not self._losses.uses_scaler and not capturing():
            self._hidden.replaced(tensor)

    def reads(self, loader: Any, iterator: Any) -> None:
        """A pass over a loader begins."""
        self._loaders.reads(loader, iterator)

    def draws(self, iterator: Any, indices: Any) -> None:
        """The sampler gave the indices of a next batch."""
        self._loaders.draws(iterator, indices)

    def receives(self, iterator: Any, batch: Any) -> None:
        """The loop received a batch."""
        self._loaders.receives(iterator, batch)


_LISTENERS: list[Listener] = []
_ORIGINALS: list[tuple[Any, str, Any]] = []


def listen(listener: Listener) -> None:
    """Starts to notify a listener; the first one installs the taps."""
    if not _LISTENERS:
        _install()
    _LISTENERS.append(listener)


def unlisten(listener: Listener) -> None:
    """Stops notifying a listener; the last one restores torch's functions."""
    _LISTENERS.remove(listener)
    if not _LISTENERS:
        while _ORIGINALS:
            owner, name, original = _ORIGINALS.pop()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _replace(owner: Any, name: str, build: Callable[[Any], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    # A method that a class inherits is uncovered again, not copied into it.
    _ORIGINALS.append((owner, name, original if name in vars(owner) else None))
    setattr(owner, name, functools.wraps(original)(build(original)))


def _install() -> None:
    _replace(torch.autograd, "backward", _backward)
    _replace(clip_grad, "_clip_grads_with_norm_", lambda original: _clip(original, "max_norm"))
    for owner in (clip_grad, torch.nn.utils):
        _replace(owner, "clip_grad_value_", lambda original: _clip(original, "clip_value"))
    _replace(torch.amp.GradScaler, "scale", _scale)
    _replace(torch.amp.GradScaler, "unscale_", _unscale)
    for owner in (dist, dist.distributed_c10d):
        _replace(owner, "all_gather", lambda original: _collective(original, 1))
        _replace(owner, "all_gather_into_tensor", lambda original: _collective(original, 1))
        _replace(owner, "all_reduce", lambda original: _collective(original, 0))
    _replace(torch.nn.functional, "cross_entropy", _cross_entropy)
    _replace(torch, "nan_to_num", _nan_to_num)
    _replace(torch.Tensor, "nan_to_num", _nan_to_num)
    _replace(DataLoader, "__iter__", _iterate)
    _replace(_BaseDataLoaderIter, "_next_index", _next_index)
    _replace(_BaseDataLoaderIter, "__next__", _next)


def _backward(original: Any) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        for listener in _LISTENERS:
            listener.backward_begins(tensors)
        result = original(tensors, *args, **kwargs)
        for listener in _LISTENERS:
            listener.backward_ended()
        return result

    return backward


def _clip(original: Any, name: str) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for listener in _LISTENERS:
            listener.clips(parameters, float(kwargs.get(name, args[0] if args else 0.0)))
        return original(parameters, *args, **kwargs)

    return clip


def _scale(original: Any) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            for listener in _LISTENERS:
                listener.scales(self)
        return original(self, outputs)

    return scale


def _unscale(original: Any) -> Callable[..., Any]:
    def unscale_(self: Any, optimizer: Any) -> Any:
        if self.is_enabled():
            for listener in _LISTENERS:
                listener.unscales(self, optimizer)
        return original(self, optimizer)

    return unscale_


def _collective(original: Any, position: int) -> Callable[..., Any]:
    """`position`: of the tensor among the arguments."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        tensor = args[position] if len(args) > position else next(iter(kwargs.values()), None)
        tensor = kwargs.get("input_tensor", kwargs.get("tensor", tensor))
        if not isinstance(tensor, torch.Tensor):
            return result
        for listener in _LISTENERS:
            if position == 0:
                listener.reduces(tensor)
            if torch.is_grad_enabled() and tensor.requires_grad:
                listener.detaches(tensor, args[0] if args and position else None)
        return result

    return collective


def _cross_entropy(original: Any) -> Callable[..., Any]:
    def cross_entropy(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            settings = kwargs | ({"weight": args[0]} if args else {})
            for listener in _LISTENERS:
                listener.computes_loss(target, settings)
        return original(input, target, *args, **kwargs)

    return cross_entropy


def _nan_to_num(original: Any) -> Callable[..., Any]:
    def nan_to_num(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and isinstance(input, torch.Tensor) and input.requires_grad:
            for listener in _LISTENERS:
                listener.replaces_nan(input)
        return original(input, *args, **kwargs)

    return nan_to_num


def _iterate(original: Any) -> Callable[..., Any]:
    def iterate(self: Any) -> Any:
        for listener in _LISTENERS:
            listener.reads(self, None)
        iterator = original(self)
        for listener in _LISTENERS:
            listener.reads(self, iterator)
        return iterator

    return iterate


def _next_index(original: Any) -> Callable[..., Any]:
    def next_index(self: Any) -> Any:
        indices = original(self)
        for listener in _LISTENERS:
            listener.draws(self, indices)
        return indices

    return next_index


def _next(original: Any) -> Callable[..., Any]:
    def next_batch(self: Any) -> Any:
        batch = original(self)
        for listener in _LISTENERS:
            listener.receives(self, batch)
        return batch

    return next_batch
