"""Gathers the rows of the global batch for losses that relate samples, with correct gradients.

Promises: the loss is computed from the rows of the whole global batch. Every process computes the same number and
needs only the gradient of its own rows, so backward exchanges nothing. The factors are such that a loss counted once
per own sample, as the step counts all losses, has the gradient of the global loss on any number of processes. In
strict mode the loss is computed once per process, between the forwards and the backwards of its shards. The loss must
be a deterministic function of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from drumline.distillation.method import LossInputs
from drumline.parallel.strict.lockstep import Lockstep
from drumline.parallel.world import World

Loss = Callable[[LossInputs], Tensor]


class GlobalBatch(Protocol):
    """Computes losses over the global batch."""

    world: World

    def loss(self, inputs: LossInputs, loss: Loss) -> Tensor:
        """The loss over the global batch, given this process's (or shard's) rows. All call it, in the same order."""


class AcrossRanks:
    """Gathers rows from all processes. `gather(rows)` returns all rows in the order of the global batch."""

    def __init__(self, world: World, counts: Sequence[int]) -> None:
        self.world, self.counts = world, tuple(counts)

    def loss(self, inputs: LossInputs, loss: Loss) -> Tensor:
        return loss(inputs.with_rows([self(rows) for rows in inputs.rows()]))

    def __call__(self, rows: Tensor) -> Tensor:
        if self.world.size == 1:
            return rows
        return _GatherRows.apply(rows, self.world, self.counts)


class AcrossShards:
    """Gathers rows from all shards, in strict mode."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep, self.world = lockstep, lockstep.world
        lockstep.needed = True

    def loss(self, inputs: LossInputs, loss: Loss) -> Tensor:
        rows = inputs.rows()
        value, gradients = self.lockstep.exchange(
            rows, lambda brought: self._loss_and_gradients(brought, inputs, loss)
        )
        # Each shard's loss counts 1 / shards, and only this shard has the gradients of its rows.
        return _Precomputed.apply(value, gradients, float(self.lockstep.shards), *rows)

    def _loss_and_gradients(
        self, brought: list[list[Tensor]], inputs: LossInputs, loss: Loss
    ) -> list[tuple[Tensor, list[Tensor | None]]]:
        """The loss over all rows and, for each shard of this process, the gradients of its rows."""
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
            value = loss(inputs.with_rows(leaves))
        gradients = iter(
            torch.autograd.grad(value, [leaf for leaf in leaves if leaf.requires_grad], allow_unused=True)
        )
        of_all = [next(gradients) if yes else None for yes in wanted]
        return [
            (
                value.detach(),
                [
                    None if gradient is None else gradient[size * shard : size * (shard + 1)]
                    for gradient in of_all
                ],
            )
            for shard in self.lockstep.own
        ]


class _Precomputed(torch.autograd.Function):
    """A loss whose value and gradients are already known."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: list[Tensor | None], factor: float, *rows: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.factor = gradients, factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = [
            None if gradient is None else gradient * (grads[0] * ctx.factor) for gradient in ctx.gradients
        ]
        return None, None, None, *given


class _GatherRows(torch.autograd.Function):
    """The step multiplies a loss L by own/global · processes, and DDP divides by processes. This process would get
    own/global of the gradient of its rows, and no other process has the rest. Hence the factor global/own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World, counts: tuple[int, ...]) -> Tensor:
        first = sum(counts[: world.rank])
        ctx.own = slice(first, first + counts[world.rank])
        ctx.factor = sum(counts) / counts[world.rank]
        return world.all_gather_rows(rows, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.own] * ctx.factor, None, None
