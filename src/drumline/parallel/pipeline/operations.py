"""The operations of a traced forward in order, and what crosses between any two of them.

Refuses, by saying why, the places that other values than tensors cross, and those where tensors that share memory
would be parted before they are written to.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Entry:
    """A call of a module: its nodes are those from `begin` to before `end`."""

    module: str
    begin: int
    end: int


@dataclass
class Seen:
    """What a trace keeps while it runs. A node's value is a pair, of one batch size and of another."""

    order: list[fx.Node] = field(default_factory=list)
    values: dict[fx.Node, tuple[Any, Any]] = field(default_factory=dict)
    calls: list[Entry] = field(default_factory=list)
    """As indices into `order`."""
    writes: list[tuple[fx.Node, set[int]]] = field(default_factory=list)
    """Which memory an operation wrote into, among that of its inputs."""

    def picks_tensor(self, node: fx.Node) -> bool:
        """Whether the node takes a tensor out of a tuple, list or dict."""
        if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
            return False
        taken, source = self.values[node][0], self.values[node.args[0]][0]
        return isinstance(taken, Tensor) and not isinstance(source, Tensor) and len(node.all_input_nodes) == 1


class Record:
    """What one trace found."""

    def __init__(self, graph: fx.Graph, seen: Seen, written: Iterable[str]) -> None:
        nodes = _in_order(graph, seen)
        self.graph = graph
        self.input = next(node for node in graph.nodes if node.op == "placeholder")
        self.output = next(node for node in graph.nodes if node.op == "output")
        self.nodes: list[fx.Node] = nodes
        """The operations in order, without the reading of parameters and buffers."""
        self.place = {node: place for place, node in enumerate(nodes)} | {
            self.input: -1,
            self.output: len(nodes),
        }
        self.last_use = {
            node: max((self.place[user] for user in node.users), default=-1) for node in (self.input, *nodes)
        }
        given = self.output.args[0]
        value = seen.values[given][0] if isinstance(given, fx.Node) else given
        kind = "Tensor" if isinstance(value, Tensor) else type(value).__name__  # fakes are tensors too
        self.returns = kind.removeprefix("immutable_")
        """What the model gives: Tensor, tuple, dict, ..."""
        self.entries = tuple(_entries(seen, self.place))
        self.written_buffers = frozenset(written)
        self._kinds = {node: _kind(seen.values[node][0]) for node in (self.input, *nodes)}
        self._storages = {node: storages(seen.values[node][0]) for node in (self.input, *nodes)}
        self._writes = [(self.place[node], storages) for node, storages in seen.writes if node in self.place]

    def begins(self, place: int) -> bool:
        """Whether no tensor is made before this place: only sizes are read there."""
        return not any("tensor" in self._kinds[node] for node in self.nodes[:place])

    def crossing(self, place: int) -> list[fx.Node]:
        """What is made before this place and used there or later, in the order in which it is made."""
        return [node for node in (self.input, *self.nodes[:place]) if self.last_use[node] >= place]

    def targets(self, place: int) -> tuple[set[str], set[str]]:
        """Modules, parameters and buffers that are used before this place, and there or later."""
        sides: tuple[set[str], set[str]] = set(), set()
        for node in self.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                for user in (node,) if node.op == "call_module" else node.users:
                    sides[self.place[user] >= place].add(str(node.target))
        return sides

    def problem(self, place: int) -> str:
        """Why no stage can begin here; '' where one can."""
        crossing = self.crossing(place)
        for node in crossing:
            if self._kinds[node] != "tensor":
                return f"{_told(node)}, which is {self._kinds[node]} and no tensor, is used on both sides"
        for number, node in enumerate(crossing):
            for other in crossing[number + 1 :]:
                shared = self._storages[node] & self._storages[other]
                if shared and any(place <= at and shared & written for at, written in self._writes):
                    return (
                        f"{_told(node)} and {_told(other)} share memory that is written later, which copies of them "
                        "would not see"
                    )
        return ""


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a value of any nesting."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storage(tensor: Tensor) -> int:
    """A number for the memory that it lies in; views share it."""
    return tensor.untyped_storage()._cdata


def storages(value: Any) -> set[int]:
    """Of all tensors in a value."""
    return {storage(tensor) for tensor in tensors(value)}


def _in_order(graph: fx.Graph, seen: Seen) -> list[fx.Node]:
    """Drops what only branches asked for (sizes, asserts); picks the tensors of a tuple right where it is made."""
    writers = {node for node, _ in seen.writes}
    for node in reversed(seen.order):
        idle = not node.users and node.op not in ("placeholder", "call_module") and node not in writers
        if idle and not tensors(seen.values[node][0]):
            graph.erase_node(node)
    nodes: list[fx.Node] = []
    for node in (node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")):
        if seen.picks_tensor(node):
            after = nodes.index(node.args[0]) + 1
            while after < len(nodes) and seen.picks_tensor(nodes[after]):
                after += 1
            nodes.insert(after, node)
        else:
            nodes.append(node)
    return nodes


def _entries(seen: Seen, place: Mapping[fx.Node, int]) -> Iterator[Entry]:
    """The calls by places of kept nodes; a call that leaves none is left out."""
    for call in seen.calls:
        places = [
            place[node]
            for node in seen.order[call.begin : call.end]
            if node in place and not seen.picks_tensor(node)
        ]
        if places:
            yield Entry(call.module, min(places), max(places) + 1)


def _kind(value: Any) -> str:
    return "tensor" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def _told(node: fx.Node) -> str:
    return f"the output of {node.target}" if node.op == "call_module" else f"the value {node.name}"
