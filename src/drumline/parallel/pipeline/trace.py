"""A model's forward as a list of operations, each with the shapes of what it makes.

torch.fx keeps torch's own modules, and what cannot be traced, as calls of the model's modules: kernels, names and
hooks stay the model's. Beside every traced value go two fake tensors of different batch sizes: code that asks for a
shape or a type is followed, code that asks for the batch size or for numbers is not traced but kept as a call of the
module it stands in.

Promises: no kernel runs; modes, buffers, hooks and random generators of the model are as before. Not for several
threads: while a trace runs, fx changes how modules are called.
Refuses a model whose own forward cannot be traced.
"""

from __future__ import annotations

import builtins
import contextlib
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
from torch.fx.proxy import TraceError

from drumline.core.errors import UserError
from drumline.models.tapped import TapHook
from drumline.parallel.pipeline.boundary import Fakes, untouched
from drumline.parallel.pipeline.operations import Entry, Record, Seen, storage, tensors
from drumline.parallel.pipeline.untraceable import (
    kept_tensors_refused,
    no_counting,
    no_draws,
    own_backward_refused,
    torch_quiet,
)

# Both even, for models that halve the batch; two, so that what depends on the batch size shows.
_BATCHES = (4, 6)

_NO_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""What a fake tensor says to code that a real one would answer."""


def record(
    model: nn.Module, kwargs: Mapping[str, Any], sample: Tensor, leaves: Collection[str], training: bool
) -> Record:
    """Traces `model(sample, **kwargs)` in one mode. A module that cannot be traced becomes a leaf, with those of its
    class, and the trace begins anew."""
    leaves = set(leaves)
    with _mode(model, training), torch.set_grad_enabled(training):
        while True:
            tracer = _Tracer(model, kwargs, sample, leaves)
            try:
                with (
                    tracer.fake_mode,
                    own_backward_refused(),
                    kept_tensors_refused(partial(getattr, tracer, "evaluating")),
                    torch_quiet(),
                    untouched(model),
                ):
                    return Record(tracer.trace(model), tracer.seen, tracer.written_tensors())
            except UserError:
                raise
            except Exception as error:
                failed = tracer.failed_in if error is tracer.error else ""
                if not failed:
                    raise _uncuttable(model, error, tracer.blind, sample) from error
                kind = type(model.get_submodule(failed))
                more = {failed} | {name for name, module in model.named_modules() if type(module) is kind}
                leaves |= {failed} if issubclass(kind, nn.Sequential | nn.ModuleList) else more


class _Value(fx.Proxy):
    """A traced value that knows its fake twins, and answers what does not depend on the batch size or on numbers."""

    def _twins(self) -> tuple[Any, Any]:
        return self.tracer.seen.values[self.node]  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if callable(getattr(self._twins()[0], name)):
            return lambda *args, **named: self.tracer.create_proxy("call_method", name, (self, *args), named)
        return self.tracer.create_proxy("call_function", builtins.getattr, (self, name), {})

    def __iter__(self) -> Iterator[Any]:
        whole: Any = self.unbind(0) if isinstance(self._twins()[0], Tensor) else self
        return iter([whole[number] for number in range(len(whole))])

    def __len__(self) -> int:
        # A shape has as many items for every batch size, though they differ.
        return self._same(len)

    def __bool__(self) -> bool:
        return self._known(bool)

    def __int__(self) -> int:
        return self._known(int)

    def __index__(self) -> int:
        return self._known(operator.index)

    def __float__(self) -> float:
        return self._known(float)

    def __setitem__(self, place: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, place, value), {})

    def _known(self, read: Callable[[Any], Any]) -> Any:
        if self.node in self.tracer.varying:  # type: ignore[attr-defined]
            raise TraceError("code that depends on the batch size")
        return self._same(read)

    def _same(self, read: Callable[[Any], Any]) -> Any:
        first, second = map(read, self._twins())
        if first != second:
            raise TraceError("code that depends on the batch size")
        return first


def _in_place(name: str) -> Callable[[_Value, Any], fx.Proxy]:
    """`x += y` on a tensor writes into it. fx alone would turn it into `x = x + y`, which views of x do not see."""
    writing, plain = getattr(operator, f"__i{name}__"), getattr(operator, f"__{name}__")

    def method(self: _Value, other: Any) -> fx.Proxy:
        target = writing if isinstance(self._twins()[0], Tensor) else plain
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):
    setattr(_Value, f"__i{_name}__", _in_place(_name))


class _Tracer(fx.Tracer):
    def __init__(
        self, root: nn.Module, kwargs: Mapping[str, Any], sample: Tensor, leaves: Collection[str]
    ) -> None:
        super().__init__()
        self.kwargs, self.leaves = kwargs, leaves
        self.failed_in = ""
        """Where the last error arose: the deepest module being traced; '' is the root."""
        self.seen = Seen()
        self.varying: set[fx.Node] = set()
        """Sizes and the like that depend on the batch size."""
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
        """A module kept whole whose output's shape could not be found."""

    def written_tensors(self) -> list[str]:
        return [name for name, fake in self.fakes[0].tensors.items() if fake._version]

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """One placeholder; everything else is a constant or the default."""
        inner = self.root.__dict__.get("forward")
        first = next(name for name in list(signature(root_fn).parameters)[1:])
        kwargs = dict(self.kwargs)

        def forward(root: nn.Module, x: Any) -> Any:
            with no_draws(), no_counting(root):
                return inner(x, **kwargs) if inner is not None else root_fn(root, x, **kwargs)

        return forward, [self.root, self.create_proxy("placeholder", first, (), {})]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_arg(self, a: Any) -> Any:
        if type(a) is _Value:
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
        self.seen.order.append(node)
        before = [
            (tensor, tensor._version)
            for source in node.all_input_nodes
            for tensor in tensors(self.seen.values[source][0])
        ]
        first, second = (self._evaluate(node, number) for number in range(len(_BATCHES)))
        self.seen.values[node] = (first, second)
        written = {storage(tensor) for tensor, version in before if tensor._version != version}
        if written:
            self.seen.writes.append((node, written))
        if not isinstance(first, Tensor) and self._varies(node, first, second):
            self.varying.add(node)
        return node

    def _varies(self, node: fx.Node, first: Any, second: Any) -> bool:
        if not tensors((first, second)) and first != second:
            return True
        # Two sizes that are equal for two batch sizes are the same size.
        if (node.target is operator.eq and first is True) or (node.target is operator.ne and first is False):
            return False
        sources = node.all_input_nodes[1:] if node.target is operator.getitem else node.all_input_nodes
        return any(source in self.varying for source in sources)

    def _evaluate(self, node: fx.Node, number: int) -> Any:
        args = fx.map_arg(node.args, lambda source: self.seen.values[source][number])
        named = fx.map_arg(node.kwargs, lambda source: self.seen.values[source][number])
        args, named = _thawed(args), _thawed(named)
        if node.op == "placeholder":
            return self.inputs[number]
        if node.op == "get_attr":
            assert isinstance(node.target, str)
            return self.fakes[number].tensors[node.target]
        outside, self.evaluating = self.evaluating, True
        # What a module that is kept whole draws is its own affair.
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
        """Parameters and buffers are read by the traced code, not by the trace."""
        name = None if self.evaluating else self.names.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in self.read:
            self.read[name] = self.create_proxy("get_attr", name, (), {})
        return self.read[name]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Also what has a forward of its own on the instance (recomputing), or hooks: both must run each time."""
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
        begin = len(self.seen.order)
        try:
            if self.is_leaf_module(m, name):
                output = self._leaf(m, name, args, kwargs)
            else:
                output = self._inside(m, name, forward, args, kwargs)
        finally:
            self.seen.calls.append(Entry(name, begin, len(self.seen.order)))
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
                    m, args, output if isinstance(self.seen.values[output.node][0], Tensor) else tuple(output)
                )
        return output

    def _inside(self, m: nn.Module, name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            with no_draws(), no_counting(m):
                return forward(*args, **kwargs)
        except Exception as error:
            if error is not self.error:
                self.error, self.failed_in = error, name
            raise


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in this mode: its own modes if that is the one it is in, else every part in it."""
    before = [(part, part.training) for part in model.modules()]
    if model.training != training or not training:
        for part, _ in before:
            part.training = training
    draws = random.getstate()
    try:
        yield
    finally:
        random.setstate(draws)
        for part, mode in before:
            part.training = mode


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
                f"model.name: {type(model).__name__} does not take images of {shape}: its module {blind!r} "
                f"({type(module).__name__}) fails{where}: {reason}",
                "make the model fit the images, or set --data.size",
            )
        return UserError(
            f"parallel.split: {type(model).__name__} cannot be cut: its module {blind!r} ({type(module).__name__}) "
            f"gives no shape without being computed{where}: {reason}",
            "do not read a tensor's numbers in its forward (.item(), float(x), if x), or use another parallel.layout",
        )
    return UserError(
        f"parallel.split: {type(model).__name__} cannot be cut: its own forward cannot be traced{where}: {reason}",
        "move that code into a module of its own, which is then kept whole, or use another parallel.layout",
    )


def _hooks(module: nn.Module) -> Iterable[Any]:
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        yield from module.__dict__[name].values()


def _is_tap(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), TapHook)


def _thawed(value: Any) -> Any:
    """Plain containers for fx's immutable ones, which some functions of torch do not take."""
    if isinstance(value, tuple):
        parts = [_thawed(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [_thawed(part) for part in value]
    if isinstance(value, dict):
        return {key: _thawed(part) for key, part in value.items()}
    return value
