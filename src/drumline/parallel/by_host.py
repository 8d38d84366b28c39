"""FSDP's two exchanges for processes that share a GPU, or otherwise meet over gloo with tensors on one.

torch's own hand gloo pointers to GPU memory there, which ends the process without a word. These go by way of the
host: right, and not fast. Who has a GPU for each process has NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from drumline.parallel.world import World


class _ByHost:
    """What FSDP asks of an exchange besides a call, whose arguments it names. All is there when the call returns."""

    def __init__(self, world: World) -> None:
        self._world = world

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class GatherByHost(_ByHost):
    """Every process's piece on every process, in rank order."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(self._world.all_gather_async(input_tensor, output_tensor).wait())


class ReduceScatterByHost(_ByHost):
    """Each process's part of the mean."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == ReduceOp.AVG, op
        parts = self._world.all_reduce(input_tensor).chunk(self._world.size)
        torch.div(parts[self._world.rank], self._world.size, out=output_tensor)
