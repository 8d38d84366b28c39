"""What this process holds of a tensor, whether it is sharded or not.

Separate from `fsdp.py`, because every run asks, and importing torch's sharding takes half a second.
"""

from __future__ import annotations

from typing import Any

import torch

from drumline.parallel.world import World
from drumline.state.fingerprint import Rows
from drumline.state.shards import shard_rows


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded: it then has the shape of the whole and the memory of a shard."""
    return hasattr(tensor, "to_local")


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a sharded tensor, in the same memory; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():
        shard: torch.Tensor = sharded.to_local()
    return shard


def full_tensor(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The whole of a sharded tensor, on every process; any other tensor itself. All processes call it."""
    if not is_sharded(tensor):
        return tensor
    rows = [shard_rows(len(tensor), rank, world.size) for rank in range(world.size)]
    return world.all_gather_rows(local_shard(tensor), [last - first for first, last in rows])


def shard_span(tensor: torch.Tensor) -> Rows | None:
    """Where this process's shard lies in the whole tensor; None where the tensor is not sharded."""
    if not is_sharded(tensor):
        return None
    sharded: Any = tensor
    mesh = sharded.device_mesh
    first, _ = shard_rows(len(tensor), mesh.get_local_rank(), mesh.size())
    return Rows(first * (tensor.numel() // max(1, len(tensor))), tensor.numel())
