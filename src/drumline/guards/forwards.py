"""What the script called since its last optimizer step: which modules, with which inputs, through DDP or around it.

Promises: keeps references, copies nothing, waits for no device; compiled modules are watched from outside only, so
their graphs stay whole; the hooks on every submodule, needed to see a part called directly, go after the first steps.
Calls without gradients (evaluation) are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from drumline.guards.place import Place, user_places

_KEPT = 4
"""Calls whose inputs are kept until the step: with more micro-batches, the last ones."""
_WATCHED_OUTPUTS = 4


@dataclass
class Call:
    """One call of the model, enough to make it again."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: dict[str, torch.dtype]
    output_gradients: list[torch.Tensor] = field(default_factory=list)
    """The largest value of the gradient that arrived at each output."""
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)
    """That gradient itself, by the place of the output."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    """The largest value of each output."""


@dataclass(frozen=True)
class Direct:
    """A part of the model that was called around the wrapper."""

    name: str
    kind: str
    places: tuple[Place, ...]


class Forwards:
    """Hooks on the model and, at first, on its parts."""

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        several: bool,
        active: Callable[[], None],
        passed: Callable[[], None],
        backward: Callable[[], None],
    ) -> None:
        self.wrapper = wrapper_of(model)
        self.calls: list[Call] = []
        self.wrapped_calls = 0
        self.synced = True
        self.direct: Direct | None = None
        self.around = 0
        """Steps, since the ranks last agreed, in which the model was called only around its wrapper."""
        self.around_first: Direct | None = None
        self._depth = 0
        self._several = several
        self._active, self._passed, self._backward = active, passed, backward
        self._handles: list[RemovableHandle] = []
        self._part_handles: list[RemovableHandle] = []
        self._names = {module: name for name, module in inner.named_modules()}
        outermost = model if is_compiled(model) else self.wrapper
        self._counted_outside = outermost is not None and is_compiled(model)
        if outermost is not None:
            self._handles.append(outermost.register_forward_pre_hook(self._through_wrapper))
        for name, root in [("", model)] if is_compiled(model) else list(roots(inner)):
            keep = _Keeper(self, name)
            self._handles.append(root.register_forward_pre_hook(keep.before, with_kwargs=True))
            self._handles.append(root.register_forward_hook(keep.after))
        if several:
            for part in _open_parts(model if is_compiled(model) else inner):
                self._part_handles.append(part.register_forward_pre_hook(self._part))

    def stepped(self) -> None:
        """The optimizer has stepped: a new step's calls begin."""
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
        self.calls[:] = [call for call in self.calls if not call.output_gradients]

    def gradient_arrived(self) -> bool:
        """Whether a gradient that is not zero has reached an output since the last step. Waits for a GPU."""
        return any(bool(value != 0) for call in self.calls for value in call.output_gradients)

    def arrived(self, call: Call, place: int) -> Callable[[torch.Tensor], None]:
        """A hook for a gradient that backward brings to an output."""

        def hook(gradient: torch.Tensor) -> None:
            self._backward()
            if gradient.numel() and gradient.layout == torch.strided:
                call.arrived[place] = gradient.detach()
                call.output_gradients.append(torch.linalg.vector_norm(gradient.detach(), float("inf")))

        return hook

    def settle(self) -> None:
        """No more watching of parts."""
        for handle in self._part_handles:
            handle.remove()
        self._part_handles.clear()

    def close(self) -> None:
        """Takes all hooks away."""
        self.settle()
        self.calls.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _through_wrapper(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Here, not only at the inner module: DDP waits for the other ranks' buffers in between.
            self._active()
            self._passed()
            self.wrapped_calls += 1
            if self.wrapper is not None:
                self.synced = bool(self.wrapper.require_backward_grad_sync)

    def _part(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        around = DistributedDataParallel._get_active_ddp_module()
        if around is None and self._depth == 0 and self.direct is None:
            self._note(module)

    def _note(self, module: nn.Module) -> None:
        name = self._names.get(module, "")
        self.direct = Direct(name, type(module).__name__, tuple(user_places()))

    def _enter(self, call: Call) -> None:
        self._active()
        around = DistributedDataParallel._get_active_ddp_module()
        if around is None and self._depth == 0 and not self._counted_outside:
            self._passed()
        if around is None and self._several and self._depth == 0 and self.direct is None:
            self._note(call.module)
        if around is not None and self.wrapper is None:
            # The script handed over the inner model; its wrapper is found when it calls.
            self._passed()
            self.wrapper, self.wrapped_calls = around, self.wrapped_calls + 1
            self._handles.append(around.register_forward_pre_hook(self._through_wrapper))
        self._depth += 1
        self.calls.append(call)
        del self.calls[:-_KEPT]


class _Keeper:
    """The two hooks of one root."""

    def __init__(self, forwards: Forwards, name: str) -> None:
        self.forwards, self.name = forwards, name
        self.call: Call | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self.call = None
        self.forwards._active()
        if torch.is_grad_enabled():
            self.call = Call(self.name, module, args, kwargs, _autocast())
            self.forwards._enter(self.call)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.call is None:
            return
        self.forwards._depth -= 1
        for place, tensor in enumerate(watched_outputs(output)):
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(self.forwards.arrived(self.call, place))
                if tensor.numel() and tensor.layout == torch.strided:
                    self.call.outputs.append(torch.linalg.vector_norm(tensor.detach(), float("inf")))
        self.call = None


def watched_outputs(output: Any) -> list[torch.Tensor]:
    """The first tensors of what a call gives."""
    return list(tensors_in(output))[:_WATCHED_OUTPUTS]


def wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper in what the script handed over, compiled or not."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None


def inner_of(model: nn.Module) -> nn.Module:
    """The module itself, out of compilation, DDP and DataParallel."""
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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def roots(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """What a script calls: the module, or the members of a mere list of modules."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for key, child in module.named_children():
            yield from roots(child, f"{name}.{key}" if name else key)
    else:
        yield name, module


def _open_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its parts, without those that are compiled: hooks inside would break their graphs."""
    if is_compiled(module):
        return
    yield module
    for child in module.children():
        yield from _open_parts(child)


def _autocast() -> dict[str, torch.dtype]:
    kinds = ("cpu", "cuda")
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
