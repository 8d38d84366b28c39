"""Functions of torch that a training loop calls, observed while a guard or a clock is open: backward, clipping, the
loss scaler, collectives, data loaders.

Promises: every call goes to torch unchanged, with the same result; listeners are notified before or after it, never
instead of it. A function is restored when the last listener that needs it leaves, in whatever order they do. Code
that imported a collective, `cross_entropy`, `nan_to_num` or `clip_grad_value_` by name before that is not observed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from drumline.core.account import CHECKPOINT, EXCHANGE

Needs = Literal["mistakes", "times"]
"""What a listener looks for. It decides which functions are tapped."""


class Listener:
    """What is notified of calls. Each method does nothing until it is overridden."""

    needs: ClassVar[Needs] = "mistakes"

    def backward_begins(self, roots: Any) -> None:
        """`torch.autograd.backward` is called on these tensors."""

    def backward_ends(self) -> None:
        """All gradients of that call are complete."""

    def clips(self, parameters: Sequence[Any], limit: float) -> None:
        """Gradients are about to be clipped."""

    def scales(self, scaler: Any) -> None:
        """An enabled GradScaler scales a loss."""

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        """An enabled GradScaler is about to unscale an optimizer's gradients."""

    def updates(self) -> None:
        """The loop begins to clip, to unscale or to step."""

    def reduces(self, tensor: torch.Tensor) -> None:
        """`all_reduce` was called on this tensor."""

    def detaches(self, tensor: torch.Tensor, outputs: Any) -> None:
        """A collective without gradients was called on a tensor that has one."""

    def computes_loss(self, target: Any, settings: dict[str, Any]) -> None:
        """`cross_entropy` is called with this target, and with these further arguments."""

    def replaces_nan(self, tensor: torch.Tensor) -> None:
        """`nan_to_num` is called on a tensor that has a gradient."""

    def opens(self, loader: Any) -> None:
        """A pass over a loader is about to begin."""

    def opened(self, loader: Any, iterator: Any) -> None:
        """It has begun."""

    def draws(self, iterator: Any, indices: Any) -> None:
        """An iterator drew the indices of a next batch."""

    def asks(self, iterator: Any) -> None:
        """The loop asks an iterator for a batch."""

    def receives(self, iterator: Any, batch: Any) -> None:
        """It received one."""

    def exhausted(self, iterator: Any) -> None:
        """It received none: the pass has ended, or the loader failed."""

    def begins(self, part: str) -> None:
        """The loop begins to wait for other ranks (`exchange`) or to save (`checkpoint`)."""

    def ends(self, part: str) -> None:
        """It has done that, or failed."""


_LISTENERS: list[Listener] = []
_ORIGINALS: dict[tuple[Any, str], Any] = {}
"""The functions that are replaced now; None for a method that its class inherits."""
Notify = Callable[..., None]


@dataclass(frozen=True)
class _Tap:
    """A function of torch, and what replaces it while a listener needs that."""

    needed: tuple[Needs, ...]
    owner: Any
    name: str
    build: Callable[[Any], Callable[..., Any]]


def listen(listener: Listener) -> None:
    """Starts notifying a listener, and taps the functions that it needs."""
    _LISTENERS.append(listener)
    _tap_and_restore()


def unlisten(listener: Listener) -> None:
    """Stops notifying a listener, and restores the functions that no other listener needs."""
    _LISTENERS.remove(listener)
    _tap_and_restore()


def _tap_and_restore() -> None:
    needs = {listener.needs for listener in _LISTENERS}
    for tap in _taps():
        key, needed = (tap.owner, tap.name), not needs.isdisjoint(tap.needed)
        if needed and key not in _ORIGINALS:
            original = getattr(tap.owner, tap.name)
            # A method that a class inherits is uncovered again, not copied into it.
            _ORIGINALS[key] = original if tap.name in vars(tap.owner) else None
            setattr(tap.owner, tap.name, functools.wraps(original)(tap.build(original)))
        elif not needed and key in _ORIGINALS:
            original = _ORIGINALS.pop(key)
            if original is None:
                delattr(tap.owner, tap.name)
            else:
                setattr(tap.owner, tap.name, original)


_MISTAKES: tuple[Needs, ...] = ("mistakes",)
_TIMES: tuple[Needs, ...] = ("times",)
_BOTH: tuple[Needs, ...] = ("mistakes", "times")


def _taps() -> list[_Tap]:
    functional, scaler, iterator = torch.nn.functional, torch.amp.GradScaler, _BaseDataLoaderIter
    taps = [
        _Tap(_BOTH, torch.autograd, "backward", _backward),
        _Tap(_MISTAKES, clip_grad, "_clip_grads_with_norm_", _clip("max_norm")),
        _Tap(_MISTAKES, clip_grad, "clip_grad_value_", _clip("clip_value")),
        _Tap(_MISTAKES, torch.nn.utils, "clip_grad_value_", _clip("clip_value")),
        _Tap(_TIMES, clip_grad, "_get_total_norm", _around(_updates)),
        _Tap(_MISTAKES, scaler, "scale", _around(_scales)),
        _Tap(_BOTH, scaler, "unscale_", _around(_unscales)),
        _Tap(_TIMES, scaler, "step", _around(_updates)),
        _Tap(_MISTAKES, functional, "cross_entropy", _around(_computes_loss)),
        _Tap(_MISTAKES, torch, "nan_to_num", _around(_replaces_nan)),
        _Tap(_MISTAKES, torch.Tensor, "nan_to_num", _around(_replaces_nan)),
        _Tap(_TIMES, torch, "save", _within(CHECKPOINT)),
        _Tap(_BOTH, DataLoader, "__iter__", _around(_opens, _opened)),
        _Tap(_MISTAKES, iterator, "_next_index", _around(after=_draws)),
        _Tap(_BOTH, iterator, "__next__", _next),
    ]
    for owner in (dist, dist.distributed_c10d):
        taps += [
            _Tap(_BOTH, owner, "all_gather", _within(EXCHANGE, _gathers)),
            _Tap(_BOTH, owner, "all_gather_into_tensor", _within(EXCHANGE, _gathers)),
            _Tap(_BOTH, owner, "all_reduce", _within(EXCHANGE, _reduces)),
            _Tap(_TIMES, owner, "broadcast", _within(EXCHANGE)),
            _Tap(_TIMES, owner, "barrier", _within(EXCHANGE)),
        ]
    return taps


def _nothing(*args: Any, **kwargs: Any) -> None:
    return


def _around(
    before: Notify = _nothing, after: Notify = _nothing, failed: Notify = _nothing
) -> Callable[[Any], Callable[..., Any]]:
    """Notifies before a call, with its arguments, and after it, with its result and its arguments; or, if it raises,
    with its arguments."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            for listener in _LISTENERS:
                before(listener, *args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                for listener in _LISTENERS:
                    failed(listener, *args, **kwargs)
                raise
            for listener in _LISTENERS:
                after(listener, result, *args, **kwargs)
            return result

        return tapped

    return build


def _within(part: str, after: Notify = _nothing) -> Callable[[Any], Callable[..., Any]]:
    """Notifies that the loop does what a call does, from its start to its end."""

    def begins(listener: Listener, *args: Any, **kwargs: Any) -> None:
        listener.begins(part)

    def ended(listener: Listener, result: Any, *args: Any, **kwargs: Any) -> None:
        listener.ends(part)
        after(listener, result, *args, **kwargs)

    def failed(listener: Listener, *args: Any, **kwargs: Any) -> None:
        listener.ends(part)

    return _around(begins, ended, failed)


# The two below are called in every step: written out, each costs half as much.


def _backward(original: Any) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            original(tensors, *args, **kwargs)
            return
        for listener in _LISTENERS:
            listener.backward_begins(tensors)
        original(tensors, *args, **kwargs)
        for listener in _LISTENERS:
            listener.backward_ends()

    return backward


def _next(original: Any) -> Callable[[Any], Any]:
    def __next__(iterator: Any) -> Any:
        for listener in _LISTENERS:
            listener.asks(iterator)
        try:
            batch = original(iterator)
        except BaseException:
            for listener in _LISTENERS:
                listener.exhausted(iterator)
            raise
        for listener in _LISTENERS:
            listener.receives(iterator, batch)
        return batch

    return __next__


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


def _scales(listener: Listener, scaler: Any, outputs: Any) -> None:
    if scaler.is_enabled():
        listener.scales(scaler)


def _updates(listener: Listener, *args: Any, **kwargs: Any) -> None:
    listener.updates()


def _unscales(listener: Listener, scaler: Any, optimizer: Any) -> None:
    listener.updates()
    if scaler.is_enabled():
        listener.unscales(scaler, optimizer)


def _reduces(listener: Listener, result: Any, *args: Any, **kwargs: Any) -> None:
    tensor = args[0] if args else kwargs.get("tensor")
    if isinstance(tensor, torch.Tensor):
        listener.reduces(tensor)
        if torch.is_grad_enabled() and tensor.requires_grad:
            listener.detaches(tensor, None)


def _gathers(listener: Listener, result: Any, *args: Any, **kwargs: Any) -> None:
    tensor = args[1] if len(args) > 1 else kwargs.get("input_tensor", kwargs.get("tensor"))
    if isinstance(tensor, torch.Tensor) and torch.is_grad_enabled() and tensor.requires_grad:
        listener.detaches(tensor, args[0] if args else None)


def _computes_loss(listener: Listener, input: Any, target: Any, *args: Any, **kwargs: Any) -> None:
    if torch.is_grad_enabled():
        listener.computes_loss(target, kwargs | ({"weight": args[0]} if args else {}))


def _replaces_nan(listener: Listener, input: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(input, torch.Tensor) and input.requires_grad:
        listener.replaces_nan(input)


def _opens(listener: Listener, loader: Any) -> None:
    listener.opens(loader)


def _opened(listener: Listener, iterator: Any, loader: Any) -> None:
    listener.opened(loader, iterator)


def _draws(listener: Listener, indices: Any, iterator: Any) -> None:
    listener.draws(iterator, indices)
