"""Is everything where it belongs? Tensors on this rank's device, memory spread evenly over the GPUs.

Promises: what decides is pure, over numbers gathered elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from drumline.core.machine import host_name
from drumline.guards.finding import Finding
from drumline.parallel.world import World

UNEVEN = 1.5
"""A rank that holds this many times the memory of the middle one has something that the others have not ..."""
LEAST_BYTES = 512 * 2**20
"""... if it is also this much more."""


@dataclass(frozen=True)
class MemoryRow:
    """What one rank holds in GPU memory, in bytes."""

    host: str
    device: int
    own: int
    """The most so far, on its own device."""
    elsewhere: Mapping[int, int]
    """On other devices of its machine."""


def memory_row(world: World) -> MemoryRow:
    """This rank's. Does not wait for the device."""
    own = world.device.index
    others = {
        device: torch.cuda.memory_allocated(device)
        for device in range(torch.cuda.device_count())
        if device != own
    }
    held = {device: count for device, count in others.items() if count}
    return MemoryRow(host_name(), own, torch.cuda.max_memory_allocated(own), held)


def memory_findings(rows: Sequence[MemoryRow], since: str) -> list[Finding]:
    """Ranks that hold memory on another rank's GPU, or far more than the others. Pure."""
    found = []
    for rank, row in enumerate(rows):
        for device, count in row.elsewhere.items():
            owners = [other for other, at in enumerate(rows) if (at.host, at.device) == (row.host, device)]
            whose = f", which is rank {owners[0]}'s" if owners else ""
            found.append(
                Finding(
                    "device",
                    f"rank {rank} holds {_mib(count)} on GPU {device}{whose}; its own is GPU {row.device}",
                    where=f"rank {rank}, GPU {device} of {row.host}",
                    since=since,
                    fix="move everything to the process's own device: no .cuda(0), no 'cuda:0', also as map_location",
                )
            )
    middle = sorted(row.own for row in rows)[(len(rows) - 1) // 2]
    for rank, row in enumerate(rows):
        if row.own > UNEVEN * middle and row.own - middle > LEAST_BYTES:
            found.append(
                Finding(
                    "memory",
                    f"rank {rank} has used {_mib(row.own)} of GPU memory, the middle rank {_mib(middle)}",
                    where=f"rank {rank}, GPU {row.device} of {row.host}",
                    since=since,
                    fix="look for what only this rank keeps, such as gathered outputs or a list of losses",
                )
            )
    return found


def placed_findings(
    named: Mapping[tuple[str, str], torch.Tensor],
    others: Iterable[torch.Tensor],
    device: torch.device,
    since: str,
    stages: Collection[torch.device] = (),
) -> list[Finding]:
    """Tensors of the run that are on another device than the rank's own, or those that its stages lie on."""
    right = {device, *stages}
    away = [
        (f"{group} {name!r}", tensor) for (group, name), tensor in named.items() if tensor.device not in right
    ]
    away += [("a tensor of the objective", tensor) for tensor in others if tensor.device != device]
    if not away:
        return []
    name, tensor = away[0]
    more = f" and {len(away) - 1} more" if len(away) > 1 else ""
    return [
        Finding(
            "device",
            f"{name}{more} is on {tensor.device}, this rank computes on {device}",
            where=name,
            since=since,
            fix="let the run move the model: no .cuda(), .cpu() or .to(device) in its constructor or forward",
        )
    ]


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
