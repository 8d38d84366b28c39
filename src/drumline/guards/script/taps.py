"""Functions of torch that a training loop calls, observed while a guard is open: backward, clipping, the loss scaler,
collectives, data loaders.

Promises: every call goes to torch unchanged, with the same result; monitors are notified before or after it, never
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

from drumline.guards.script.monitors import Monitors

_LISTENERS: list[Monitors] = []
_ORIGINALS: list[tuple[Any, str, Any]] = []
Notify = Callable[..., None]


def listen(listener: Monitors) -> None:
    """Starts to notify the monitors of a model; the first ones install the taps."""
    if not _LISTENERS:
        _install()
    _LISTENERS.append(listener)


def unlisten(listener: Monitors) -> None:
    """Stops notifying the monitors of a model; the last ones restore torch's functions."""
    _LISTENERS.remove(listener)
    if not _LISTENERS:
        while _ORIGINALS:
            owner, name, original = _ORIGINALS.pop()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _install() -> None:
    _tap(torch.autograd, "backward", _backward_begins, _backward_ends)
    _replace(clip_grad, "_clip_grads_with_norm_", _clip("max_norm"))
    for owner in (clip_grad, torch.nn.utils):
        _replace(owner, "clip_grad_value_", _clip("clip_value"))
    _tap(torch.amp.GradScaler, "scale", before=_scales)
    _tap(torch.amp.GradScaler, "unscale_", before=_unscales)
    for owner in (dist, dist.distributed_c10d):
        _tap(owner, "all_gather", after=_gathers)
        _tap(owner, "all_gather_into_tensor", after=_gathers)
        _tap(owner, "all_reduce", after=_reduces)
    _tap(torch.nn.functional, "cross_entropy", before=_computes_loss)
    _tap(torch, "nan_to_num", before=_replaces_nan)
    _tap(torch.Tensor, "nan_to_num", before=_replaces_nan)
    _tap(DataLoader, "__iter__", before=_reads, after=_has_iterator)
    _tap(_BaseDataLoaderIter, "_next_index", after=_draws)
    _tap(_BaseDataLoaderIter, "__next__", after=_receives)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return


def _tap(owner: Any, name: str, before: Notify = _nothing, after: Notify = _nothing) -> None:
    """Notifies before a call, with its arguments, or after it, with its result and its arguments."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            for listener in _LISTENERS:
                before(listener, *args, **kwargs)
            result = original(*args, **kwargs)
            for listener in _LISTENERS:
                after(listener, result, *args, **kwargs)
            return result

        return tapped

    _replace(owner, name, build)


def _replace(owner: Any, name: str, build: Callable[[Any], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    # A method that a class inherits is uncovered again, not copied into it.
    _ORIGINALS.append((owner, name, original if name in vars(owner) else None))
    setattr(owner, name, functools.wraps(original)(build(original)))


def _clip(limit: str) -> Callable[[Any], Callable[..., Any]]:
    """A tap that passes on a list of the parameters, which may be a generator. `limit` is the limit's name."""

    def build(original: Any) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            for listener in _LISTENERS:
                listener.clips(parameters, float(kwargs.get(limit, args[0] if args else 0.0)))
            return original(parameters, *args, **kwargs)

        return clip

    return build


def _backward_begins(listener: Monitors, tensors: Any, *args: Any, **kwargs: Any) -> None:
    listener.backward_begins(tensors)


def _backward_ends(listener: Monitors, result: Any, *args: Any, **kwargs: Any) -> None:
    listener.backward_ends()


def _scales(listener: Monitors, scaler: Any, outputs: Any) -> None:
    if scaler.is_enabled():
        listener.scales(scaler)


def _unscales(listener: Monitors, scaler: Any, optimizer: Any) -> None:
    if scaler.is_enabled():
        listener.unscales(scaler, optimizer)


def _reduces(listener: Monitors, result: Any, *args: Any, **kwargs: Any) -> None:
    tensor = args[0] if args else kwargs.get("tensor")
    if isinstance(tensor, torch.Tensor):
        listener.reduces(tensor)
        if torch.is_grad_enabled() and tensor.requires_grad:
            listener.detaches(tensor, None)


def _gathers(listener: Monitors, result: Any, *args: Any, **kwargs: Any) -> None:
    tensor = args[1] if len(args) > 1 else kwargs.get("input_tensor", kwargs.get("tensor"))
    if isinstance(tensor, torch.Tensor) and torch.is_grad_enabled() and tensor.requires_grad:
        listener.detaches(tensor, args[0] if args else None)


def _computes_loss(listener: Monitors, input: Any, target: Any, *args: Any, **kwargs: Any) -> None:
    if torch.is_grad_enabled():
        listener.computes_loss(target, kwargs | ({"weight": args[0]} if args else {}))


def _replaces_nan(listener: Monitors, input: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(input, torch.Tensor) and input.requires_grad:
        listener.replaces_nan(input)


def _reads(listener: Monitors, loader: Any) -> None:
    listener.loaders.reads(loader, None)


def _has_iterator(listener: Monitors, iterator: Any, loader: Any) -> None:
    listener.loaders.reads(loader, iterator)


def _draws(listener: Monitors, indices: Any, iterator: Any) -> None:
    listener.loaders.draws(iterator, indices)


def _receives(listener: Monitors, batch: Any, iterator: Any) -> None:
    listener.loaders.receives(iterator, batch)
