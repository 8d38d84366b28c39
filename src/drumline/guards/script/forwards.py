"""The calls of the model since the last optimizer step: which modules, with which inputs, through DDP or around it.

Promises: keeps references, copies nothing, and waits for no device. Compiled modules are watched from outside, so
their graphs stay whole. Hooks on every submodule, which show a part that is called directly, are removed after the
first steps. Calls without gradients (evaluation) are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from drumline.guards.checks.model import roots
from drumline.guards.checks.nonfinite import tensors_in
from drumline.guards.script.source_lines import SourceLine, line_to_change, user_lines

_KEPT_CALLS = 4
"""Calls whose inputs are kept until the step. With more micro-batches, these are the last ones."""
_WATCHED_OUTPUTS = 4


@dataclass
class ModelCall:
    """One call of the model, enough to repeat it."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: dict[str, torch.dtype]
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """The gradients that backward brought to the outputs, by the output's index."""
    largest_gradients: list[torch.Tensor] = field(default_factory=list)
    """The largest value of each of these gradients."""
    largest_outputs: list[torch.Tensor] = field(default_factory=list)
    """The largest value of each output."""


@dataclass(frozen=True)
class DirectCall:
    """A part of the model that was called around the wrapper."""

    name: str
    kind: str
    lines: tuple[SourceLine, ...]

    def __str__(self) -> str:
        name = f"{self.kind} '{self.name}'" if self.name else self.kind
        return f"{self.lines[0]} calls {name} directly" if self.lines else f"{name} is called directly"


class Forwards:
    """Hooks on the model and, in the first steps, on its parts.

    `on_forward` is called when a forward pass begins, `on_pass` for each pass of a step, and `on_backward` when a
    gradient reaches an output.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        several_ranks: bool,
        on_forward: Callable[[], None],
        on_pass: Callable[[], None],
        on_backward: Callable[[], None],
    ) -> None:
        self.wrapper = wrapper_of(model)
        self.calls: list[ModelCall] = []
        self.wrapped_calls = 0
        self.synced = True
        self.direct: DirectCall | None = None
        self.around = 0
        """Steps, since the ranks last agreed, in which the model was called only around its wrapper."""
        self.around_first: DirectCall | None = None
        self._depth = 0
        self._several_ranks = several_ranks
        self._on_forward, self._on_pass, self._on_backward = on_forward, on_pass, on_backward
        self._handles: list[RemovableHandle] = []
        self._part_handles: list[RemovableHandle] = []
        self._names = {module: name for name, module in inner.named_modules()}
        outermost = model if is_compiled(model) else self.wrapper
        self._counted_outside = outermost is not None and is_compiled(model)
        if outermost is not None:
            self._handles.append(outermost.register_forward_pre_hook(self._through_wrapper))
        for name, root in [("", model)] if is_compiled(model) else list(roots(inner)):
            hooks = _RootHooks(self, name)
            self._handles.append(root.register_forward_pre_hook(hooks.before, with_kwargs=True))
            self._handles.append(root.register_forward_hook(hooks.after))
        if several_ranks:
            for part in _uncompiled_parts(model if is_compiled(model) else inner):
                self._part_handles.append(part.register_forward_pre_hook(self._part))

    def stepped(self) -> None:
        """The optimizer has stepped: the calls of a new step begin."""
        if self.wrapper is not None and self.direct is not None and not self.wrapped_calls:
            self.around += 1
            self.around_first = self.around_first or self.direct
        self.calls.clear()
        self.wrapped_calls, self._depth, self.synced, self.direct = 0, 0, True, None

    def agreed(self) -> None:
        """All ranks have the same weights: steps around the wrapper have done no harm so far."""
        self.around, self.around_first = 0, None

    def restart(self) -> None:
        """The gradients were cleared: the calls that produced them belong to no step."""
        self.calls[:] = [call for call in self.calls if not call.largest_gradients]

    def has_gradient(self) -> bool:
        """Whether a gradient that is not zero has reached an output since the last step. Waits for a GPU."""
        return any(bool(value != 0) for call in self.calls for value in call.largest_gradients)

    def evidence(self, in_step: bool = True) -> dict[str, Any]:
        """What this rank saw of calls through and around the wrapper, as JSON. Searches the source for the line to
        change if a step in progress has not called the wrapper."""
        line = ""
        if in_step and self.wrapped_calls == 0:
            lines = (*(self.direct.lines if self.direct else ()), *user_lines())
            first = self.direct.lines[0] if self.direct and self.direct.lines else None
            found = line_to_change(first, (each.file for each in lines))
            # Without a known wrapper, only a line that removes one explains anything.
            if found and (self.wrapper is not None or ".module" in found.text):
                line = str(found)
        return {
            "wrapped": self.wrapper is not None,
            "through": self.wrapped_calls,
            "synced": self.synced,
            "called": str(self.direct or ""),
            "line": line,
            "around": self.around,
            "around_first": str(self.around_first or ""),
        }

    def unwatch_parts(self) -> None:
        """Removes the hooks on parts."""
        for handle in self._part_handles:
            handle.remove()
        self._part_handles.clear()

    def close(self) -> None:
        """Removes all hooks."""
        self.unwatch_parts()
        self.calls.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _gradient_hook(self, call: ModelCall, index: int) -> Callable[[torch.Tensor], None]:
        """A hook for the gradient that backward brings to an output."""

        def hook(gradient: torch.Tensor) -> None:
            self._on_backward()
            if gradient.numel() and gradient.layout == torch.strided:
                call.gradients[index] = gradient.detach()
                call.largest_gradients.append(torch.linalg.vector_norm(gradient.detach(), float("inf")))

        return hook

    def _through_wrapper(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Here, not only at the inner module: DDP waits for the other ranks' buffers in between.
            self._on_forward()
            self._on_pass()
            self.wrapped_calls += 1
            if self.wrapper is not None:
                self.synced = bool(self.wrapper.require_backward_grad_sync)

    def _part(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        active = DistributedDataParallel._get_active_ddp_module()
        if active is None and self._depth == 0 and self.direct is None:
            self._record_direct(module)

    def _record_direct(self, module: nn.Module) -> None:
        name = self._names.get(module, "")
        self.direct = DirectCall(name, type(module).__name__, tuple(user_lines()))

    def _enter(self, call: ModelCall) -> None:
        self._on_forward()
        active = DistributedDataParallel._get_active_ddp_module()
        if active is None and self._depth == 0 and not self._counted_outside:
            self._on_pass()
        if active is None and self._several_ranks and self._depth == 0 and self.direct is None:
            self._record_direct(call.module)
        if active is not None and self.wrapper is None:
            # The script passed the inner model; its wrapper is found when it calls.
            self._on_pass()
            self.wrapper, self.wrapped_calls = active, self.wrapped_calls + 1
            self._handles.append(active.register_forward_pre_hook(self._through_wrapper))
        self._depth += 1
        self.calls.append(call)
        del self.calls[:-_KEPT_CALLS]


class _RootHooks:
    """The two hooks of one root."""

    def __init__(self, forwards: Forwards, name: str) -> None:
        self.forwards, self.name = forwards, name
        self.call: ModelCall | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self.call = None
        self.forwards._on_forward()
        if torch.is_grad_enabled():
            self.call = ModelCall(self.name, module, args, kwargs, _autocast())
            self.forwards._enter(self.call)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.call is None:
            return
        self.forwards._depth -= 1
        for index, tensor in enumerate(outputs_of(output)):
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(self.forwards._gradient_hook(self.call, index))
                if tensor.numel() and tensor.layout == torch.strided:
                    self.call.largest_outputs.append(torch.linalg.vector_norm(tensor.detach(), float("inf")))
        self.call = None


def outputs_of(output: Any) -> list[torch.Tensor]:
    """The first tensors of a call's result, which are watched."""
    return list(tensors_in(output))[:_WATCHED_OUTPUTS]


def wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper that the script passed, compiled or not."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None


def inner_of(model: nn.Module) -> nn.Module:
    """The module inside compilation, DDP and DataParallel."""
    while True:
        if hasattr(model, "_orig_mod"):
            compiled = model._orig_mod
            assert isinstance(compiled, nn.Module)
            model = compiled
        elif isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def is_compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)` or `module.compile()`."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _uncompiled_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its parts, without those that are compiled: hooks inside would break their graphs."""
    if is_compiled(module):
        return
    yield module
    for child in module.children():
        yield from _uncompiled_parts(child)


def _autocast() -> dict[str, torch.dtype]:
    kinds = ("cpu", "cuda")
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
