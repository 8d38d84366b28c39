"""Sums the gradients of all shards in the order of the tree. The additions are our own; the backend only moves bytes.

Promises: the sum has the same bits on any number of processes up to the number of shards, with any timing. Each
process folds the nodes that it holds, sends every other process a piece of them (all-to-all), adds the pieces of all
nodes in tree order, and gathers the sums. A process that holds one node sends 2 P (W-1)/W numbers, as in a ring
all-reduce. Gradients travel in buckets while backward still computes the earlier layers. Sums are fp32 (wider for
wider parameters). The result has the same memory alignment on any world, so its norms are equal, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, TypeVar

import torch
from torch import Tensor

from drumline.data.feed.sampler import bounds
from drumline.parallel.world import Pending, World

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


BUCKET_BYTES = 25 * 2**20
_ALIGN = 128
"""Numbers between the starts of two gradients: a multiple of any vector width."""
Tensors = list[Tensor]


class OrderedSum:
    """In a step: `begin()`; for each own shard `shard_begin`, backward, `shard_end`; then `finish()`. Afterwards
    every parameter's `.grad` is the sum over all shards."""

    def __init__(
        self, parameters: Sequence[Tensor], world: World, shards: int, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.world, self.shards = world, shards
        self.held = owned(shards, world.size)
        self.nodes = [whole_nodes(held, shards) for held in self.held]
        self.last = self.held[world.rank][1] - 1
        self.unused: set[int] = set()
        """Places of parameters that no shard of the last step gave a gradient."""
        self._parameters = list(parameters)
        self._buckets = [
            _Bucket.of(each, parameters, self.nodes, world) for each in bucketed(parameters, bucket_bytes)
        ]
        self._bucket_of = {place: bucket for bucket in self._buckets for place in bucket.places}
        self._side = (
            torch.cuda.Stream(world.device) if world.device.type == "cuda" and world.size > 1 else None
        )
        self._armed = False
        self._launched = 0
        if world.size > 1:
            for place, parameter in enumerate(parameters):
                parameter.register_post_accumulate_grad_hook(lambda _, place=place: self._ready(place))

    def begin(self) -> None:
        """Starts a step."""
        self.unused = set(range(len(self._parameters)))
        self._launched = 0
        for bucket in self._buckets:
            bucket.fold = Fold(self.shards, _added)
            bucket.sent = bucket.gathered = None
            bucket.kept = []

    def shard_begin(self, shard: int) -> None:
        """Called before the backward of each shard, in shard order."""
        for parameter in self._parameters:
            parameter.grad = None
        self._armed = self.world.size > 1 and shard == self.last
        for bucket in self._buckets:
            bucket.missing = len(bucket.places)

    def shard_end(self, shard: int) -> None:
        """Called after it. Sends what backward has not sent yet, if this was the last one."""
        if self._armed:
            self._armed = False
            for bucket in self._buckets[self._launched :]:
                self._launch(bucket)
            return
        for bucket in self._buckets:
            self._push(bucket, shard)

    def finish(self) -> None:
        """Waits for the other processes, and puts the sums into `.grad`."""
        for place, bucket in enumerate(self._buckets):
            if self.world.size > 1:
                self._reduce_up_to(place)
                assert bucket.gathered is not None
                bucket.total = bucket.gathered.wait()
            else:
                ((_, values),) = bucket.fold.take()
                torch._foreach_copy_(bucket.views(bucket.total), values)
            for parameter, view in zip(
                (self._parameters[place] for place in bucket.places), bucket.views(bucket.total), strict=True
            ):
                parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
        if self._side is not None:
            torch.cuda.current_stream(self.world.device).wait_stream(self._side)

    def leave_out(self, places: set[int]) -> None:
        """Removes the gradients of these parameters, which never get any."""
        for place in places:
            self._parameters[place].grad = None

    def _ready(self, place: int) -> None:
        """Called when a gradient of the last own shard is complete. Buckets are sent in order, the same on every
        process."""
        if not self._armed:
            return
        self._bucket_of[place].missing -= 1
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch(self._buckets[self._launched])

    def _push(self, bucket: _Bucket, shard: int) -> None:
        values = []
        for place, view in zip(bucket.places, bucket.shapes, strict=True):
            gradient = self._parameters[place].grad
            if gradient is None:
                values.append(torch.zeros_like(view, dtype=bucket.dtype, device=bucket.total.device))
                continue
            self.unused.discard(place)
            values.append(gradient.to(bucket.dtype))
        bucket.fold.push((shard, shard + 1), values)

    def _launch(self, bucket: _Bucket) -> None:
        """Folds the last shard's gradients of a bucket, sends them, and reduces what has arrived of earlier
        buckets."""
        self._push(bucket, self.last)
        with self._beside():
            bucket.sent = self.world.all_to_all_async(
                bucket.packed(self.world.size), len(self.nodes[self.world.rank]), [len(n) for n in self.nodes]
            )
            self._launched += 1
            # Two buckets later it has mostly arrived, and the order of messages is the same on every process.
            if self._launched > 2:
                self._reduce(self._buckets[self._launched - 3])

    def _reduce_up_to(self, place: int) -> None:
        with self._beside():
            for bucket in self._buckets[: place + 3]:
                self._reduce(bucket)

    def _reduce(self, bucket: _Bucket) -> None:
        """Adds this process's piece of all nodes, and starts to gather the pieces."""
        if bucket.gathered is not None:
            return
        assert bucket.sent is not None
        pieces = bucket.sent.wait().view(-1, bucket.piece)
        fold: Fold[Tensors] = Fold(self.shards, _added)
        for node, piece in zip((node for each in self.nodes for node in each), pieces, strict=True):
            fold.push(node, [piece])
        ((_, (total,)),) = fold.take()
        bucket.gathered = self.world.all_gather_async(total, bucket.total)

    def _beside(self) -> AbstractContextManager[object]:
        """On a GPU, a stream of its own: backward must not wait for messages."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self.world.device))
        return torch.cuda.stream(self._side)


@dataclass
class _Bucket:
    """Parameters whose gradients travel together."""

    places: list[int]
    shapes: Tensors
    """Of the shapes and strides that the gradients have; without values."""
    offsets: list[int]
    dtype: torch.dtype
    piece: int
    """Numbers that each process adds."""
    total: Tensor
    nodes: list[Node]
    fold: Fold[Tensors] = field(default_factory=lambda: Fold(1, _added))
    missing: int = 0
    sent: Pending | None = None
    gathered: Pending | None = None
    kept: list[tuple[Node, Tensors]] = field(default_factory=list)
    """What was packed, until the step ends: another stream may still be reading it."""
    _packed: Tensor | None = None

    @staticmethod
    def of(places: list[int], parameters: Sequence[Tensor], nodes: list[list[Node]], world: World) -> _Bucket:
        offsets, length = [], 0
        for place in places:
            offsets.append(length)
            length += -(-parameters[place].numel() // _ALIGN) * _ALIGN
        piece = -(-length // world.size)
        dtype = _sum_dtype(parameters[places[0]])
        total = torch.zeros(piece * world.size, dtype=dtype, device=parameters[places[0]].device)
        # On no device: only shapes, and strides without gaps.
        shapes = [torch.empty_like(parameters[place], device="meta") for place in places]
        return _Bucket(places, shapes, offsets, dtype, piece, total, nodes[world.rank])

    def views(self, flat: Tensor) -> Tensors:
        """The gradients within a flat vector, in their shapes and memory layouts."""
        return [
            torch.as_strided(flat, shape.shape, shape.stride(), flat.storage_offset() + offset)
            for shape, offset in zip(self.shapes, self.offsets, strict=True)
        ]

    def packed(self, processes: int) -> Tensor:
        """This process's nodes, cut into a piece for each process: (processes, nodes, piece)."""
        held = self.kept = self.fold.take()
        assert [node for node, _ in held] == self.nodes, (self.nodes, [node for node, _ in held])
        if self._packed is None:
            self._packed = torch.zeros(
                (len(held), len(self.total)), dtype=self.dtype, device=self.total.device
            )
        for row, (_, values) in zip(self._packed, held, strict=True):
            torch._foreach_copy_(self.views(row), values)
        return self._packed.view(len(held), processes, self.piece).transpose(0, 1).contiguous()


def bucketed(parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[int]]:
    """Places of the parameters, last first, as backward completes them, in runs of one type and about this size."""
    buckets: list[list[int]] = []
    backwards = range(len(parameters) - 1, -1, -1)
    for _, places in groupby(backwards, key=lambda place: _sum_dtype(parameters[place])):
        size = bucket_bytes
        for place in places:
            if size >= bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(place)
            size += parameters[place].numel() * parameters[place].element_size()
    return buckets


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _added(left: Tensors, right: Tensors, n: int, m: int) -> Tensors:
    """In new memory: a gradient may be a view of something else."""
    return list(torch._foreach_add(left, right))
