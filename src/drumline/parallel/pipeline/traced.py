"""What a trace records: values, the operations in order, and the values that cross between any two operations.

Rejects, with the reason, a cut that a value other than a tensor would cross, and a cut between tensors that share
memory and are written to later.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.fx.proxy import TraceError
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module: its nodes are `begin` to `end` - 1."""

    module: str
    begin: int
    end: int


@dataclass
class TraceLog:
    """What a trace logs while it runs. A node has two values, for two batch sizes."""

    order: list[fx.Node] = field(default_factory=list)
    values: dict[fx.Node, tuple[Any, Any]] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    """As indices into `order`."""
    writes: list[tuple[fx.Node, set[int]]] = field(default_factory=list)
    """The storages of its inputs that an operation wrote to."""

    def picks_tensor(self, node: fx.Node) -> bool:
        """Whether the node takes a tensor out of a tuple, list or dict."""
        if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
            return False
        taken, source = self.values[node][0], self.values[node.args[0]][0]
        return isinstance(taken, Tensor) and not isinstance(source, Tensor) and len(node.all_input_nodes) == 1


class TracedValue(fx.Proxy):
    """A traced value with two fake values. Answers what depends neither on the batch size nor on values."""

    def _fakes(self) -> tuple[Any, Any]:
        return self.tracer.log.values[self.node]  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if callable(getattr(self._fakes()[0], name)):
            return lambda *args, **named: self.tracer.create_proxy("call_method", name, (self, *args), named)
        return self.tracer.create_proxy("call_function", builtins.getattr, (self, name), {})

    def __iter__(self) -> Iterator[Any]:
        whole: Any = self.unbind(0) if isinstance(self._fakes()[0], Tensor) else self
        return iter([whole[number] for number in range(len(whole))])

    def __len__(self) -> int:
        # A shape has the same number of items for every batch size.
        return self._same(len)

    def __bool__(self) -> bool:
        return self._known(bool)

    def __int__(self) -> int:
        return self._known(int)

    def __index__(self) -> int:
        return self._known(operator.index)

    def __float__(self) -> float:
        return self._known(float)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def _known(self, read: Callable[[Any], Any]) -> Any:
        if self.node in self.tracer.varying:  # type: ignore[attr-defined]
            raise TraceError("code that depends on the batch size")
        return self._same(read)

    def _same(self, read: Callable[[Any], Any]) -> Any:
        first, second = map(read, self._fakes())
        if first != second:
            raise TraceError("code that depends on the batch size")
        return first


def _in_place(name: str) -> Callable[[TracedValue, Any], fx.Proxy]:
    """Keeps `x += y` on a tensor in place. fx would turn it into `x = x + y`, which does not change views of x."""
    writing, plain = getattr(operator, f"__i{name}__"), getattr(operator, f"__{name}__")

    def method(self: TracedValue, other: Any) -> fx.Proxy:
        target = writing if isinstance(self._fakes()[0], Tensor) else plain
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
    setattr(TracedValue, f"__i{_name}__", _in_place(_name))


class TracedForward:
    """The result of one trace."""

    def __init__(self, graph: fx.Graph, log: TraceLog, written: Iterable[str]) -> None:
        nodes = _in_order(graph, log)
        self.graph = graph
        self.input = next(node for node in graph.nodes if node.op == "placeholder")
        self.output = next(node for node in graph.nodes if node.op == "output")
        self.nodes: list[fx.Node] = nodes
        """The operations in order, without reads of parameters and buffers."""
        self.position = {node: position for position, node in enumerate(nodes)} | {
            self.input: -1,
            self.output: len(nodes),
        }
        self.last_use = {
            node: max((self.position[user] for user in node.users), default=-1)
            for node in (self.input, *nodes)
        }
        given = self.output.args[0]
        value = log.values[given][0] if isinstance(given, fx.Node) else given
        kind = "Tensor" if isinstance(value, Tensor) else type(value).__name__  # fakes are tensors too
        self.returns = kind.removeprefix("immutable_")
        """The type of the model's output: Tensor, tuple, dict, ..."""
        self.calls = tuple(_module_calls(log, self.position))
        self.written_buffers = frozenset(written)
        self._kinds = {node: _kind(log.values[node][0]) for node in (self.input, *nodes)}
        self._storages = {node: storages(log.values[node][0]) for node in (self.input, *nodes)}
        self._writes = [
            (self.position[node], storages) for node, storages in log.writes if node in self.position
        ]

    def begins(self, position: int) -> bool:
        """Whether no operation before this position makes a tensor: only sizes are read there."""
        return not any("tensor" in self._kinds[node] for node in self.nodes[:position])

    def crossing(self, position: int) -> list[fx.Node]:
        """The values made before this position and used from there on, in the order in which they are made."""
        return [node for node in (self.input, *self.nodes[:position]) if self.last_use[node] >= position]

    def targets(self, position: int) -> tuple[set[str], set[str]]:
        """The modules, parameters and buffers used before this position, and those used from there on."""
        sides: tuple[set[str], set[str]] = set(), set()
        for node in self.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                for user in (node,) if node.op == "call_module" else node.users:
                    sides[self.position[user] >= position].add(str(node.target))
        return sides

    def problem(self, position: int) -> str:
        """Why no stage can begin here, or '' if one can."""
        crossing = self.crossing(position)
        for node in crossing:
            if self._kinds[node] != "tensor":
                return (
                    f"{_describe(node)}, which is {self._kinds[node]} and not a tensor, is used on both sides"
                )
        for number, node in enumerate(crossing):
            for other in crossing[number + 1 :]:
                shared = self._storages[node] & self._storages[other]
                if shared and any(position <= at and shared & written for at, written in self._writes):
                    return (
                        f"{_describe(node)} and {_describe(other)} share memory that is written later; "
                        "copies of them would miss that write"
                    )
        return ""


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a nested value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storage(tensor: Tensor) -> int:
    """A number that identifies its storage. Views have the same number."""
    return tensor.untyped_storage()._cdata


def storages(value: Any) -> set[int]:
    """The storages of all tensors in a value."""
    return {storage(tensor) for tensor in tensors(value)}


def _in_order(graph: fx.Graph, log: TraceLog) -> list[fx.Node]:
    """Drops nodes that only conditions read (sizes, asserts). Moves the unpacking of a tuple right behind its
    making."""
    writers = {node for node, _ in log.writes}
    for node in reversed(log.order):
        idle = not node.users and node.op not in ("placeholder", "call_module") and node not in writers
        if idle and not tensors(log.values[node][0]):
            graph.erase_node(node)
    nodes: list[fx.Node] = []
    for node in (node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")):
        if log.picks_tensor(node):
            after = nodes.index(node.args[0]) + 1
            while after < len(nodes) and log.picks_tensor(nodes[after]):
                after += 1
            nodes.insert(after, node)
        else:
            nodes.append(node)
    return nodes


def _module_calls(log: TraceLog, position: Mapping[fx.Node, int]) -> Iterator[ModuleCall]:
    """The calls as positions of the kept nodes, without calls that have none."""
    for call in log.calls:
        kept = [
            position[node]
            for node in log.order[call.begin : call.end]
            if node in position and not log.picks_tensor(node)
        ]
        if kept:
            yield ModuleCall(call.module, min(kept), max(kept) + 1)


def _kind(value: Any) -> str:
    return "tensor" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def _describe(node: fx.Node) -> str:
    return f"the output of {node.target}" if node.op == "call_module" else f"the value {node.name}"
