"""FSDP's two exchanges by way of the host, for processes that share a GPU.

They meet over gloo, and torch's own exchanges hand gloo pointers to GPU memory there, which ends the process without
a word. Right, and not fast: who has a GPU for each process has NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renames both.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _ByHost:
    """What FSDP asks of an exchange besides a call."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class GatherByHost(_ByHost):
    """Every process's piece on every process, in rank order; there when the call returns."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        whole = torch.empty_like(output_tensor, device="cpu")
        _gather(whole, input_tensor.cpu(), group=group)
        output_tensor.copy_(whole)


class ReduceScatterByHost(_ByHost):
    """Each process's part of what all have added up, or averaged; there when the call returns."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        part = torch.empty_like(output_tensor, device="cpu")
        _reduce_scatter(part, input_tensor.cpu(), op=op, group=group)
        output_tensor.copy_(part)
