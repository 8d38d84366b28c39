"""Which GPU tensors and memory lie on, against which GPU each rank works on (pure over what the ranks report).

Promises: never accuses a model that is spread over several GPUs on purpose, or a run of one process. `check` gathers
what the ranks report; `report` is the one function that asks CUDA; the rest is pure.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from drumline.guards.finding import Finding
from drumline.guards.meeting import Meeting

_GIB = 1 << 30


def check(
    model: nn.Module, teachers: Sequence[nn.Module], meeting: Meeting, step: int, pause: Callable[[], None]
) -> Iterator[tuple[Finding, bool]]:
    """What is wrong with the devices of all ranks, and whether it surely is."""
    own = home(model.parameters())
    if own is None or meeting.size == 1:
        return
    tensors: dict[str, torch.Tensor] = {}
    for place, teacher in enumerate(teachers):
        label = "teacher" if len(teachers) == 1 else f"teacher {place}"
        tensors.update({f"{label} parameter '{name}'": p for name, p in teacher.named_parameters()})
    tensors.update({f"buffer '{name}'": buffer for name, buffer in model.named_buffers()})
    found = misplaced(own, tensors, meeting.rank, meeting.size)
    if found is not None:
        yield found, True
    if own.type == "cuda":
        ranks, reports = meeting.ranks, meeting.gather(f"devices/{step}", report(own), pause)
        found = trespass(ranks, reports)
        if found is not None:
            yield found, True
        for warning in (shared(ranks, reports), imbalance(ranks, reports)):
            if warning is not None:
                yield warning, False


def report(device: torch.device) -> dict[str, Any]:
    """What this rank tells the others: its host, its GPU, the memory in use there, and what it holds elsewhere."""
    told: dict[str, Any] = {
        "host": socket.gethostname(),
        "device": str(device),
        "gpu": "",
        "used": 0,
        "elsewhere": {},
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        told["gpu"] = str(torch.cuda.get_device_properties(device).uuid)
        told["used"] = total - free
        for index in range(torch.cuda.device_count()):
            held = torch.cuda.memory_reserved(index)
            if index != device.index and held:
                told["elsewhere"][str(torch.cuda.get_device_properties(index).uuid)] = held
    return told


def home(parameters: Iterable[torch.Tensor]) -> torch.device | None:
    """The device that a model lives on; None when it is spread over several."""
    found = {parameter.device for parameter in parameters}
    return found.pop() if len(found) == 1 else None


def misplaced(own: torch.device, tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> Finding | None:
    """A tensor of model or teacher on another device than this rank's, in a world of several."""
    if size == 1:
        return None
    for name, tensor in tensors.items():
        if tensor.device != own and not (name.startswith("buffer ") and tensor.device.type == "cpu"):
            return Finding(
                "device",
                f"{name} lies on {tensor.device}, but rank {rank} works on {own}",
                where=f"rank {rank}",
                since="step 1",
                fix=f"move it by .to('{own}'), call torch.cuda.set_device(local_rank) first, and load files with "
                "map_location",
            )
    return None


def trespass(ranks: Sequence[int], reports: Sequence[Mapping[str, Any]]) -> Finding | None:
    """A process that holds memory on the GPU of another rank."""
    owners = {
        (told["host"], told["gpu"]): rank for rank, told in zip(ranks, reports, strict=True) if told["gpu"]
    }
    for rank, told in zip(ranks, reports, strict=True):
        for gpu, held in told["elsewhere"].items():
            owner = owners.get((told["host"], gpu))
            if owner is not None and owner != rank:
                return Finding(
                    "device",
                    f"rank {rank} holds {held / _GIB:.2f} GiB on the GPU of rank {owner}",
                    where=f"process of rank {rank} on {told['host']}",
                    since="step 1",
                    fix="call torch.cuda.set_device(local_rank) before anything touches a GPU, and load files with "
                    "map_location",
                )
    return None


def shared(ranks: Sequence[int], reports: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Two ranks on one GPU: sometimes meant (a test on one GPU), so only worth a warning."""
    seen: dict[tuple[str, str], int] = {}
    for rank, told in zip(ranks, reports, strict=True):
        place = (told["host"], told["gpu"])
        if told["gpu"] and place in seen:
            return Finding(
                "shared-gpu",
                f"ranks {seen[place]} and {rank} work on the same GPU",
                where=f"{told['device']} on {told['host']}",
                since="step 1",
                fix="use torch.cuda.set_device(local_rank)",
            )
        seen[place] = rank
    return None


def imbalance(ranks: Sequence[int], reports: Sequence[Mapping[str, Any]]) -> Finding | None:
    """A GPU with far more memory in use than the others (half more than the median, and over 2 GiB): often other
    ranks' contexts and stray tensors. Other programs count too, so only worth a warning."""
    used = sorted(told["used"] for told in reports)
    if len(used) < 2 or not used[0]:
        return None
    median = used[(len(used) - 1) // 2]
    for rank, told in zip(ranks, reports, strict=True):
        if told["used"] > 1.5 * median and told["used"] - median > 2 * _GIB:
            return Finding(
                "memory",
                f"{told['used'] / _GIB:.1f} GiB in use on the GPU of rank {rank}, {median / _GIB:.1f} on others",
                where=f"{told['device']} on {told['host']}",
                since="step 3",
                fix="look for tensors that all ranks put on the first GPU: torch.load without map_location, .cuda() "
                "before set_device",
            )
    return None
