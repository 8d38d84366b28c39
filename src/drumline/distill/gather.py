"""What batch-relational losses need of other processes, with gradients that are right.

Promises: the loss is computed from the rows of the whole global batch. It is the same number on each process, so each
needs only the gradient of its own rows: backward exchanges nothing. The weights are such that a loss counted once per
own sample (as the step counts all losses) has the gradient of that loss, whatever the number of processes. In strict
mode it is computed once per process, between its shards' forwards and backwards. That every process computes the same
loss from the rows is the caller's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from drumline.distill.method import Seen
from drumline.parallel.strict.lockstep import Lockstep
from drumline.parallel.world import World

Loss = Callable[[Seen], Tensor]


class Spread(Protocol):
    """Where the other samples of the global batch are."""

    world: World

    def loss(self, seen: Seen, loss: Loss) -> Tensor:
        """The loss over the global batch, of which `seen` is this part. Everybody calls it, in the same order."""


class Gathered:
    """On the other processes. Calls as `gathered(rows)`: all rows in the order of the global batch."""

    def __init__(self, world: World, counts: Sequence[int]) -> None:
        self.world, self.counts = world, tuple(counts)

    def loss(self, seen: Seen, loss: Loss) -> Tensor:
        return loss(seen.with_rows([self(rows) for rows in seen.rows()]))

    def __call__(self, rows: Tensor) -> Tensor:
        if self.world.size == 1:
            return rows
        return _Rows.apply(rows, self.world, self.counts)


class OverShards:
    """In the other shards, of this process and of others."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep, self.world = lockstep, lockstep.world
        lockstep.needed = True

    def loss(self, seen: Seen, loss: Loss) -> Tensor:
        rows = seen.rows()
        value, slopes = self.lockstep.exchange(rows, lambda brought: self._scored(brought, seen, loss))
        # A shard's part of the loss counts 1 / shards; the slopes of its rows are nobody else's.
        return _Given.apply(value, slopes, float(self.lockstep.shards), *rows)

    def _scored(
        self, brought: list[list[Tensor]], seen: Seen, loss: Loss
    ) -> list[tuple[Tensor, list[Tensor | None]]]:
        """The loss over all rows, and for each shard of this process the slopes of its own."""
        size, counts = len(brought[0][0]), self.lockstep.counts
        wanted = [rows.requires_grad for rows in brought[0]]
        gathered = [
            self.world.all_gather_rows(
                torch.cat([rows.detach() for rows in column]), [size * count for count in counts]
            )
            for column in zip(*brought, strict=True)
        ]
        with torch.enable_grad():
            leaves = [rows.detach().requires_grad_(yes) for rows, yes in zip(gathered, wanted, strict=True)]
            value = loss(seen.with_rows(leaves))
        slopes = iter(
            torch.autograd.grad(value, [leaf for leaf in leaves if leaf.requires_grad], allow_unused=True)
        )
        of_all = [next(slopes) if yes else None for yes in wanted]
        return [
            (
                value.detach(),
                [None if slope is None else slope[size * shard : size * (shard + 1)] for slope in of_all],
            )
            for shard in self.lockstep.own
        ]


class _Given(torch.autograd.Function):
    """A loss that is known already, with its slopes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: list[Tensor | None], factor: float, *rows: Tensor) -> Tensor:
        ctx.slopes, ctx.factor = slopes, factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = [None if slope is None else slope * (grads[0] * ctx.factor) for slope in ctx.slopes]
        return None, None, None, *given


class _Rows(torch.autograd.Function):
    """The step weighs a loss L by own/global · processes and DDP divides by processes: of L(rows) this process would
    get own/global of the gradient of its rows, and no other process has the rest. Hence the factor global/own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World, counts: tuple[int, ...]) -> Tensor:
        first = sum(counts[: world.rank])
        ctx.own = slice(first, first + counts[world.rank])
        ctx.factor = sum(counts) / counts[world.rank]
        return world.all_gather_rows(rows, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.own] * ctx.factor, None, None
