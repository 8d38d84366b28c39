"""What this process holds of a tensor, whether FSDP has sharded it or not.

Apart from `fsdp.py`, because every run asks, and importing torch's sharding takes half a second.
"""

from __future__ import annotations

from typing import Any

import torch

from drumline.parallel.world import World
from drumline.state.fingerprint import Rows
from drumline.state.shards import shard_rows


def is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded: then it has the shape of the whole and the memory of a part."""
    return hasattr(tensor, "to_local")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a sharded tensor, in the same memory; any other tensor itself."""
    if not is_part(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():
        part: torch.Tensor = sharded.to_local()
    return part


def joined(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """All of a sharded tensor, on every process; any other tensor itself. All processes call it."""
    if not is_part(tensor):
        return tensor
    shares = [shard_rows(len(tensor), rank, world.size) for rank in range(world.size)]
    return world.all_gather_rows(local_part(tensor), [last - first for first, last in shares])


def rows_held(tensor: torch.Tensor) -> Rows | None:
    """Where this process's part of a sharded tensor lies in the whole; None for any other tensor."""
    if not is_part(tensor):
        return None
    sharded: Any = tensor
    mesh = sharded.device_mesh
    first, _ = shard_rows(len(tensor), mesh.get_local_rank(), mesh.size())
    return Rows(first * (tensor.numel() // max(1, len(tensor))), tensor.numel())
