"""Tensors on the wrong device, and GPU memory that is not where it should be.

Promises: `memory_of` alone asks CUDA, and does not wait for the device; the rest decides from what the ranks report.
A model that is spread over several GPUs on purpose is never reported.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from drumline.guards.finding import Finding

UNEVEN = 1.5
"""A rank is reported if it uses this many times the memory of the median rank ..."""
LEAST_BYTES = 512 * 2**20
"""... and this much more, counting the peak of its own process ..."""
LEAST_BYTES_OF_DEVICE = 2 << 30
"""... or this much more, counting everything on its GPU: contexts and other programs too."""
_GIB = 1 << 30


def memory_of(device: torch.device, whole_device: bool) -> dict[str, Any]:
    """What this rank reports: its host, its GPU, the memory in use there, and what it holds on other GPUs.

    Memory in use is that of the whole GPU, which includes other processes, or the peak of this process.
    """
    report: dict[str, Any] = {"host": socket.gethostname(), "device": str(device), "gpu": "", "used": 0}
    report["elsewhere"] = {}
    if device.type != "cuda":
        return report
    free, total = torch.cuda.mem_get_info(device) if whole_device else (0, 0)
    report["gpu"] = _uuid(device.index)
    report["used"] = total - free if whole_device else torch.cuda.max_memory_allocated(device)
    for index in range(torch.cuda.device_count()):
        held = torch.cuda.memory_reserved(index)
        if index != device.index and held:
            report["elsewhere"][_uuid(index)] = held
    return report


def home(parameters: Iterable[torch.Tensor]) -> torch.device | None:
    """The device of a model; None if it is spread over several."""
    found = {parameter.device for parameter in parameters}
    return found.pop() if len(found) == 1 else None


def misplaced(
    tensors: Mapping[str, torch.Tensor], device: torch.device, rank: int, since: str, fix: str = ""
) -> Finding | None:
    """Tensors, by what they are, that are not on this rank's device. Call it with those that should be."""
    away = [(name, tensor.device) for name, tensor in tensors.items() if tensor.device != device]
    if not away:
        return None
    name, where = away[0]
    more = f" and {len(away) - 1} more are" if len(away) > 1 else " is"
    return Finding(
        "device",
        f"{name}{more} on {where}, but rank {rank} computes on {device}",
        where=f"rank {rank}, {name}",
        since=since,
        fix=fix
        or f"move it by .to('{device}'), call torch.cuda.set_device(local_rank) first, and load files with "
        "map_location",
    )


def memory_elsewhere(
    ranks: Sequence[int], reports: Sequence[Mapping[str, Any]], since: str, any_gpu: bool
) -> Finding | None:
    """A process that holds memory on the GPU of another rank or, with `any_gpu`, on any GPU but its own."""
    owners = {
        (report["host"], report["gpu"]): rank
        for rank, report in zip(ranks, reports, strict=True)
        if report["gpu"]
    }
    for rank, report in zip(ranks, reports, strict=True):
        for gpu, held in report["elsewhere"].items():
            owner = owners.get((report["host"], gpu))
            if owner == rank or (owner is None and not any_gpu):
                continue
            whose = f"the GPU of rank {owner}" if owner is not None else f"GPU {gpu}, which is not its own"
            return Finding(
                "device",
                f"rank {rank} holds {held / _GIB:.2f} GiB on {whose}",
                where=f"process of rank {rank} on {report['host']}",
                since=since,
                fix="call torch.cuda.set_device(local_rank) before anything uses a GPU, load files with map_location "
                "and use no .cuda(0) or 'cuda:0'",
            )
    return None


def shared_gpu(ranks: Sequence[int], reports: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Two ranks on one GPU, which is intended in some tests."""
    seen: dict[tuple[str, str], int] = {}
    for rank, report in zip(ranks, reports, strict=True):
        gpu = (report["host"], report["gpu"])
        if report["gpu"] and gpu in seen:
            return Finding(
                "shared-gpu",
                f"ranks {seen[gpu]} and {rank} use the same GPU",
                where=f"{report['device']} on {report['host']}",
                since="step 1",
                fix="use torch.cuda.set_device(local_rank)",
            )
        seen[gpu] = rank
    return None


def memory_imbalance(
    ranks: Sequence[int], reports: Sequence[Mapping[str, Any]], since: str, least: int
) -> Finding | None:
    """A rank that uses far more memory than the median rank, and at least `least` bytes more."""
    used = sorted(report["used"] for report in reports)
    if len(used) < 2 or not used[0]:
        return None
    median = used[(len(used) - 1) // 2]
    for rank, report in zip(ranks, reports, strict=True):
        if report["used"] > UNEVEN * median and report["used"] - median > least:
            return Finding(
                "memory",
                f"{report['used'] / _GIB:.1f} GiB in use on the GPU of rank {rank}, {median / _GIB:.1f} on others",
                where=f"rank {rank}, {report['device']} on {report['host']}",
                since=since,
                fix="check what only this rank keeps (gathered outputs, a list of losses), and what all ranks put on "
                "the first GPU (torch.load without map_location, .cuda() before set_device)",
            )
    return None


def _uuid(index: int | None) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
