"""Functions of torch that a training loop calls, observed while a guard is open: backward, clipping, the loss scaler,
collectives, data loaders.

Promises: every call goes to torch unchanged, with the same result; listeners are called before or after it, never
instead of it. The functions are restored when the last guard closes. Code that imported a collective,
`cross_entropy`, `nan_to_num` or `clip_grad_value_` by name before the guard opened is not observed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter


class Listener:
    """What a guard hears; by default it ignores everything."""

    def backward_begins(self, roots: Any) -> None:
        """`torch.autograd.backward` is called on these tensors."""

    def backward_ended(self) -> None:
        """All gradients of that call are complete."""

    def clips(self, parameters: Any, limit: float) -> None:
        """Gradients are about to be clipped."""

    def scales(self, scaler: Any) -> None:
        """An enabled GradScaler scales a loss."""

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        """An enabled GradScaler is about to unscale an optimizer's gradients."""

    def reduces(self, tensor: Any) -> None:
        """`all_reduce` was called on this tensor."""

    def computes_loss(self, target: Any, settings: dict[str, Any]) -> None:
        """`cross_entropy` is called with this target, and with these further arguments."""

    def replaces_nan(self, tensor: Any) -> None:
        """`nan_to_num` is called on a tensor that has a gradient."""

    def detaches(self, tensor: Any, outputs: Any) -> None:
        """A collective without gradients was called on a tensor that has one."""

    def reads(self, loader: Any, iterator: Any) -> None:
        """A pass over a loader begins."""

    def draws(self, iterator: Any, indices: Any) -> None:
        """The sampler gave the indices of a next batch."""

    def receives(self, iterator: Any, batch: Any) -> None:
        """The loop received a batch."""


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
