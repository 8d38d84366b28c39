"""A model's forward as a list of operations, each with the shapes of its outputs.

torch.fx keeps torch's own modules, and modules that cannot be traced, as calls: kernels, names and hooks stay the
model's. Every traced value comes with two fake tensors of different batch sizes. Code that reads a shape or a type is
traced. Code that reads the batch size or the values of a tensor is not: the module it is in is kept as a call.

Promises: no kernel runs, and the model's modes, buffers, hooks and random generators stay as they were. Not
thread-safe: while a trace runs, fx changes how modules are called.
Rejects a model whose own forward cannot be traced.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import random
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.proxy import TraceError

from drumline.core.arithmetic import leave_no_trace
from drumline.core.errors import UserError
from drumline.models.tapped import TapHook
from drumline.parallel.pipeline.stage import Fakes, untouched
from drumline.parallel.pipeline.traced import (
    ModuleCall,
    TracedForward,
    TracedValue,
    TraceLog,
    storage,
    tensors,
)

# Both even, for models that halve the batch. Two, so that a dependence on the batch size shows.
_BATCHES = (4, 6)

_NO_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""Raised by a fake tensor when code reads values that only a real one has."""


def trace_forward(
    model: nn.Module, kwargs: Mapping[str, Any], sample: Tensor, leaves: Collection[str], training: bool
) -> TracedForward:
    """Traces `model(sample, **kwargs)` in one mode. If a module cannot be traced, it and all modules of its class are
    kept whole, and the trace starts again."""
    leaves = set(leaves)
    with _mode(model, training), torch.set_grad_enabled(training):
        while True:
            tracer = _Tracer(model, kwargs, sample, leaves)
            try:
                with (
                    tracer.fake_mode,
                    _no_custom_backward(),
                    _no_saved_tensor_hooks(partial(getattr, tracer, "evaluating")),
                    _quiet_torch(),
                    untouched(model),
                ):
                    return TracedForward(tracer.trace(model), tracer.log, tracer.written_tensors())
            except UserError:
                raise
            except Exception as error:
                failed = tracer.failed_in if error is tracer.error else ""
                if not failed:
                    raise _uncuttable(model, error, tracer.blind, sample) from error
                kind = type(model.get_submodule(failed))
                more = {failed} | {name for name, module in model.named_modules() if type(module) is kind}
                leaves |= {failed} if issubclass(kind, nn.Sequential | nn.ModuleList) else more


class _Tracer(fx.Tracer):
    def __init__(
        self, root: nn.Module, kwargs: Mapping[str, Any], sample: Tensor, leaves: Collection[str]
    ) -> None:
        super().__init__()
        self.kwargs, self.leaves = kwargs, leaves
        self.failed_in = ""
        """The deepest module being traced when the last error was raised. '' is the root."""
        self.log = TraceLog()
        self.varying: set[fx.Node] = set()
        """Values that depend on the batch size."""
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.fake_mode:
            self.fakes = tuple(Fakes(root, sample.device) for _ in _BATCHES)
            self.inputs = tuple(
                torch.empty((size, *sample.shape[1:]), dtype=sample.dtype, device=sample.device)
                for size in _BATCHES
            )
        self.names = {id(tensor): name for name, tensor in (*root.named_buffers(), *root.named_parameters())}
        self.read: dict[str, fx.Proxy] = {}
        self.evaluating = False
        self.error: Exception | None = None
        self.blind = ""
        """A module kept whole whose output shape could not be found."""

    def written_tensors(self) -> list[str]:
        return [name for name, fake in self.fakes[0].tensors.items() if fake._version]

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """One placeholder. Every other argument is a constant or its default."""
        inner = self.root.__dict__.get("forward")
        first = next(name for name in list(signature(root_fn).parameters)[1:])
        kwargs = dict(self.kwargs)

        def forward(root: nn.Module, x: Any) -> Any:
            with _no_draws(), _no_counting(root):
                return inner(x, **kwargs) if inner is not None else root_fn(root, x, **kwargs)

        return forward, [self.root, self.create_proxy("placeholder", first, (), {})]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return TracedValue(node, self)

    def create_arg(self, a: Any) -> Any:
        if type(a) is TracedValue:
            return a.node
        if isinstance(a, Tensor) and id(a) not in self.names:
            raise TraceError("a tensor made inside forward, or kept on a module as a plain attribute")
        return super().create_arg(a)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, name, None)
        if kind == "output":
            return node
        self.log.order.append(node)
        before = [
            (tensor, tensor._version)
            for source in node.all_input_nodes
            for tensor in tensors(self.log.values[source][0])
        ]
        first, second = (self._evaluate(node, number) for number in range(len(_BATCHES)))
        self.log.values[node] = (first, second)
        written = {storage(tensor) for tensor, version in before if tensor._version != version}
        if written:
            self.log.writes.append((node, written))
        if not isinstance(first, Tensor) and self._varies(node, first, second):
            self.varying.add(node)
        return node

    def _varies(self, node: fx.Node, first: Any, second: Any) -> bool:
        if not tensors((first, second)) and first != second:
            return True
        # Sizes that are equal for both batch sizes are the same size.
        if (node.target is operator.eq and first is True) or (node.target is operator.ne and first is False):
            return False
        sources = node.all_input_nodes[1:] if node.target is operator.getitem else node.all_input_nodes
        return any(source in self.varying for source in sources)

    def _evaluate(self, node: fx.Node, number: int) -> Any:
        args = fx.map_arg(node.args, lambda source: self.log.values[source][number])
        named = fx.map_arg(node.kwargs, lambda source: self.log.values[source][number])
        args, named = _thawed(args), _thawed(named)
        if node.op == "placeholder":
            return self.inputs[number]
        if node.op == "get_attr":
            assert isinstance(node.target, str)
            return self.fakes[number].tensors[node.target]
        outside, self.evaluating = self.evaluating, True
        # A module that is kept whole may draw random numbers.
        draws = random.getstate()
        try:
            if node.op == "call_function":
                return node.target(*args, **named)  # type: ignore[operator]
            assert isinstance(node.target, str)
            if node.op == "call_method":
                return getattr(args[0], node.target)(*args[1:], **named)
            module = self.root.get_submodule(node.target)
            return self.fakes[number].call(module, f"{node.target}.", args, named)
        finally:
            self.evaluating = outside
            random.setstate(draws)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        """Makes the traced code read parameters and buffers, not the trace."""
        name = None if self.evaluating else self.names.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in self.read:
            self.read[name] = self.create_proxy("get_attr", name, (), {})
        return self.read[name]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Also a module with a forward of its own on the instance (recomputation), or with hooks: both must run every
        time."""
        return (
            module_qualified_name in self.leaves
            or "forward" in m.__dict__
            or isinstance(m, torch.jit.ScriptModule)
            or (type(m).__module__.startswith("torch.") and not isinstance(m, nn.Sequential))
            or any(not _is_tap(hook) for hook in _hooks(m))
        )

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.evaluating:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        begin = len(self.log.order)
        try:
            if self.is_leaf_module(m, name):
                output = self._leaf(m, name, args, kwargs)
            else:
                output = self._inside(m, name, forward, args, kwargs)
        finally:
            self.log.calls.append(ModuleCall(name, begin, len(self.log.order)))
        return output

    def _leaf(self, m: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        for hook in m._forward_pre_hooks.values():
            if _is_tap(hook):
                hook(m, args, kwargs)
        try:
            output = self.create_proxy("call_module", name, args, kwargs)
        except Exception:
            self.blind = name
            raise
        for after in m._forward_hooks.values():
            if _is_tap(after):
                after(
                    m, args, output if isinstance(self.log.values[output.node][0], Tensor) else tuple(output)
                )
        return output

    def _inside(self, m: nn.Module, name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            with _no_draws(), _no_counting(m):
                return forward(*args, **kwargs)
        except Exception as error:
            if error is not self.error:
                self.error, self.failed_in = error, name
            raise


@contextmanager
def _no_draws() -> Iterator[None]:
    """Rejects numbers drawn from Python's random: a trace would freeze them."""
    before = random.getstate()
    yield
    if random.getstate() != before:
        raise TraceError("a number drawn from Python's random")


@contextmanager
def _no_counting(module: nn.Module) -> Iterator[None]:
    """Rejects a number that a forward changes from call to call: a trace would freeze it."""
    before = _numbers(module)
    yield
    for name, value in _numbers(module).items():
        if value != before.get(name, value):
            raise TraceError(f"{name}, a number that changes from one call to the next")


@contextmanager
def _no_custom_backward() -> Iterator[None]:
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
def _no_saved_tensor_hooks(evaluating: Callable[[], bool]) -> Iterator[None]:
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
def _quiet_torch() -> Iterator[None]:
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


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Sets the mode of every module. A model that is already in training keeps the modes of its modules."""
    with leave_no_trace(model):
        if model.training != training or not training:
            for module in model.modules():
                module.training = training
        yield


def _uncuttable(model: nn.Module, error: Exception, blind: str, sample: Tensor) -> UserError:
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent), contextlib.__file__)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if blind:
        module = model.get_submodule(blind)
        if not isinstance(error, _NO_NUMBERS):
            shape = " x ".join(str(length) for length in sample.shape[1:])
            return UserError(
                f"model.name: {type(model).__name__} cannot take images of {shape}: its module {blind!r} "
                f"({type(module).__name__}) fails{where}: {reason}",
                "set --data.size to a size the model takes, or change the model",
            )
        return UserError(
            f"parallel.split: {type(model).__name__} cannot be cut: its module {blind!r} ({type(module).__name__}) "
            f"has no output shape until it runs{where}: {reason}",
            "do not read the values of a tensor in its forward (.item(), float(x), if x), or use a different "
            "parallel.layout",
        )
    return UserError(
        f"parallel.split: {type(model).__name__} cannot be cut: its own forward cannot be traced{where}: {reason}",
        "move that code into a module of its own, which is then kept whole, or use a different parallel.layout",
    )


def _hooks(module: nn.Module) -> Iterable[Any]:
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        yield from module.__dict__[name].values()


def _is_tap(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), TapHook)


def _thawed(value: Any) -> Any:
    """Replaces fx's immutable containers with plain ones: some torch functions reject the former."""
    if isinstance(value, tuple):
        items = [_thawed(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_thawed(item) for item in value]
    if isinstance(value, dict):
        return {key: _thawed(item) for key, item in value.items()}
    return value
