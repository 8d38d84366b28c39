"""The fixed order in which strict mode adds: a binary tree over the shards of the global batch. Pure.

Promises: the tree depends on the number of shards alone. A process with consecutive shards adds those that the tree
adds anyway; the rest is added later, elsewhere, in the same order. So the bits do not depend on which process
computes which shard. A node of n shards splits after the largest power of two below n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from drumline.data.feed.sampler import bounds

Node = tuple[int, int]
"""The shards from the first number up to the second, excluded."""
Value = TypeVar("Value")


def split(node: Node) -> int:
    """The shard that begins the second half of a node of at least two."""
    first, last = node
    assert last - first > 1, node
    return first + (1 << (last - first - 1).bit_length() - 1)


def owned(shards: int, processes: int) -> list[Node]:
    """Which shards each process computes: consecutive ones, at most one more than any other process."""
    assert 1 <= processes <= shards, (processes, shards)
    cuts = bounds(shards, processes)
    return [(cuts[rank], cuts[rank + 1]) for rank in range(processes)]


def whole_nodes(held: Node, shards: int) -> list[Node]:
    """The largest nodes of the tree that lie within the shards held by one process, in their order."""

    def within(node: Node) -> list[Node]:
        if held[0] <= node[0] and node[1] <= held[1]:
            return [node]
        if node[1] <= held[0] or held[1] <= node[0]:
            return []
        middle = split(node)
        return [*within((node[0], middle)), *within((middle, node[1]))]

    return within((0, shards))


def is_node(node: Node, shards: int) -> bool:
    """Whether the tree adds exactly these shards to each other before any other."""
    return whole_nodes(node, shards) == [node]


def relative_traffic(shards: int, processes: int) -> float:
    """What the busiest process sends, as a multiple of what it would send in a ring all-reduce: 1 where each process
    holds one node (as for powers of two); a process with two nodes sends two vectors in the first half."""
    most = max(len(whole_nodes(held, shards)) for held in owned(shards, processes))
    return (most + 1) / 2


class Fold(Generic[Value]):
    """Joins values in tree order as they arrive, shard by shard. Holds only a few at a time."""

    def __init__(self, shards: int, join: Callable[[Value, Value, int, int], Value]) -> None:
        """`join(left, right, n, m)` joins the values of n shards and of the m that follow them."""
        self.shards, self.join = shards, join
        self._held: list[tuple[Node, Value]] = []

    def push(self, node: Node, value: Value) -> None:
        """Adds the value of the shards that follow those pushed before."""
        assert not self._held or self._held[-1][0][1] == node[0], (self._held[-1][0], node)
        self._held.append((node, value))
        while len(self._held) > 1:
            (left, first), (right, second) = self._held[-2:]
            if not is_node((left[0], right[1]), self.shards):
                return
            joined = self.join(first, second, left[1] - left[0], right[1] - right[0])
            self._held[-2:] = [((left[0], right[1]), joined)]

    def take(self) -> list[tuple[Node, Value]]:
        """Returns and clears what is left, in order: one value when all shards have been pushed."""
        held, self._held = self._held, []
        return held
