"""Code that torch.fx would trace wrongly without an error. Each case raises a TraceError, and the module is kept
whole.

Promises: leaving a context restores torch and Python. Not thread-safe.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.proxy import TraceError


@contextmanager
def no_draws() -> Iterator[None]:
    """Rejects numbers drawn from Python's random: a trace would freeze them."""
    before = random.getstate()
    yield
    if random.getstate() != before:
        raise TraceError("a number drawn from Python's random")


@contextmanager
def no_counting(module: nn.Module) -> Iterator[None]:
    """Rejects a number that a forward changes from call to call: a trace would freeze it."""
    before = _numbers(module)
    yield
    for name, value in _numbers(module).items():
        if value != before.get(name, value):
            raise TraceError(f"{name}, a number that changes from one call to the next")


@contextmanager
def no_custom_backward() -> Iterator[None]:
    """Rejects an autograd.Function (such as checkpointing): fx would trace its forward and lose its backward."""
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **named: Any) -> Any:
        if any(isinstance(value, fx.Proxy) for value in (*args, *named.values())):
            of_checkpointing = cls.__module__ == "torch.utils.checkpoint"
            raise TraceError(cls.__module__ if of_checkpointing else f"{cls.__name__}, an autograd.Function")
        return original.__func__(cls, *args, **named)

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


@contextmanager
def no_saved_tensor_hooks(evaluating: Callable[[], bool]) -> Iterator[None]:
    """Rejects hooks that control what is kept for the backward, as checkpointing and offloading use: fx would trace
    through them and keep everything. `evaluating` says whether a module that is kept whole runs, not traced code."""
    original = saved_tensors_hooks.__enter__

    def enter(self: saved_tensors_hooks) -> None:
        if not evaluating():
            raise TraceError("hooks on saved tensors, as of torch.utils.checkpoint")
        original(self)

    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = original  # type: ignore[method-assign]


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Stops torch from logging the traceback of an operation that fails on fake tensors: we report the error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _numbers(module: nn.Module) -> dict[str, int | float]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float) and value == value
    }
