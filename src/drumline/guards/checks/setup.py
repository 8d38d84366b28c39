"""Checks that all ranks are set up alike: settings, losses, devices and GPU memory.

Promises: `memory_of` alone asks CUDA, and does not wait for the device; the rest decides from what the ranks report.
A model that is spread over several GPUs on purpose is never reported.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drumline.guards.checks.drift import sample_of
from drumline.guards.finding import Finding, LoopState, Reports

LOSS_FACTOR = 1.5
"""A rank's loss is too high if it is this many times the others' ..."""
LOSS_ERRORS = 5.0
"""... and higher by this many standard errors."""
UNEVEN = 1.5
"""A rank is reported if it uses this many times the memory of the median rank ..."""
LEAST_BYTES = 512 * 2**20
"""... and this much more, counting the peak of its own process (Drumline's own loop) ..."""
LEAST_BYTES_OF_DEVICE = 2 << 30
"""... or this much more, counting everything on its GPU: contexts and other programs too (a user's loop)."""
_GIB = 1 << 30
_MOST_WEIGHTS = 16
_LOSS_STEPS = 3
"""Steps whose losses must be of the same kind before ranks' losses are compared."""


def settings_of(
    model: nn.Module, optimizer: Optimizer, autocasts: Iterable[Mapping[str, torch.dtype]]
) -> dict[str, str]:
    """This rank's model, optimizer and precision, as the ranks compare them."""
    layers = {name: f"{type(m).__name__}({m.extra_repr()})" for name, m in model.named_modules()}
    described = "\n".join(f"{name} {text}" for name, text in layers.items())
    dropout = [m.p for m in model.modules() if isinstance(getattr(m, "p", None), float)]
    return {
        "layers": hashlib.blake2b(described.encode(), digest_size=8).hexdigest(),
        "dropout rates": str(dropout[:64]),
        "optimizer": type(optimizer).__name__,
        "autocast": str([{kind: str(dtype) for kind, dtype in each.items()} for each in autocasts]),
    }


def loss_settings(arguments: Mapping[str, Any]) -> str:
    """The arguments of `cross_entropy`, apart from input and target, that are not its defaults."""
    defaults = {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0}
    shown = {name: arguments[name] for name, value in defaults.items() if arguments.get(name, value) != value}
    if isinstance(arguments.get("weight"), torch.Tensor):
        shown["weight"] = [float(f"{value:.4g}") for value in sample_of(arguments["weight"], _MOST_WEIGHTS)]
    return ", ".join(f"{name}={value}" for name, value in shown.items()) or "defaults"


def different_settings(reports: Reports) -> Finding | None:
    """The first setting that differs between ranks."""
    settings, first = reports.of("setup"), reports.ranks[0]
    for name in ("dropout rates", "layers", "optimizer", "autocast", "cross_entropy"):
        for rank, one in zip(reports.ranks, settings, strict=True):
            if one[name] != settings[0][name]:
                shown = "" if name == "layers" else f": {settings[0][name]} and {one[name]}"
                return Finding(
                    "setup",
                    f"ranks {first} and {rank} train with different settings ({name}){shown}",
                    f"ranks {first} and {rank}",
                    reports.since,
                    "build model, loss, optimizer and autocast from the same settings on every rank",
                )
    return None


def frozen_on_some_ranks(reports: Reports) -> Finding | None:
    """A parameter that is frozen on one rank and trained on another, given the names of those frozen on each."""
    first, *_ = frozen = reports.of("frozen")
    for rank, mine in zip(reports.ranks, frozen, strict=True):
        differ = [name for name in (*first, *mine) if (name in first) != (name in mine)]
        if not differ:
            continue
        name, more = differ[0], len(differ) - 1
        here, there = (rank, reports.ranks[0]) if name in mine else (reports.ranks[0], rank)
        which = f"parameters '{name}' and {more} more are" if more else f"parameter '{name}' is"
        return Finding(
            "setup",
            f"{which} frozen on rank {here} and trained on rank {there}",
            f"ranks {reports.ranks[0]} and {rank}",
            reports.since,
            "call requires_grad_ in the same way on every rank, before wrapping in DDP",
        )
    return None


def different_losses(reports: Reports) -> Finding | None:
    """A rank that computes a different loss, or whose loss stays far above the others'."""
    return _different_kinds(reports) or _higher_loss(reports)


def _different_kinds(reports: Reports) -> Finding | None:
    kinds = [[tuple(kind) for kind in each] for each in reports.of("kinds")]
    if not all(len(each) == _LOSS_STEPS and len(set(each)) == 1 for each in kinds):
        return None
    for rank, each in zip(reports.ranks, kinds, strict=True):
        if each != kinds[0]:
            pair = f"ranks {reports.ranks[0]} and {rank}"
            return Finding(
                "loss",
                f"{pair} compute different losses: {_shown(kinds[0])} and {_shown(each)}",
                pair,
                reports.since,
                "compute the loss by the same lines, with the same factors, on every rank",
            )
    return None


def _higher_loss(reports: Reports) -> Finding | None:
    levels = reports.of("loss")
    if any(level is None for level in levels) or len(levels) < 2:
        return None
    most = max(range(len(levels)), key=lambda index: levels[index][0])
    others = [level for index, level in enumerate(levels) if index != most]
    mean, error, count = levels[most]
    rest = max(level[0] for level in others)
    errors = error + max(level[1] for level in others)
    if rest <= 0 or mean < LOSS_FACTOR * rest or mean - rest < LOSS_ERRORS * errors:
        return None
    rank = reports.ranks[most]
    return Finding(
        "loss",
        f"the loss of rank {rank} stays at {mean:.3g}, {mean / rest:.1f} times that of the others",
        f"rank {rank}, mean of {count} losses",
        reports.since,
        "compare its labels, data and loss with another rank's; nothing to do if its data is harder",
    )


def home(parameters: Iterable[torch.Tensor]) -> torch.device | None:
    """The device of a model; None if it is spread over several."""
    found = {parameter.device for parameter in parameters}
    return found.pop() if len(found) == 1 else None


def misplaced(loop: LoopState) -> Finding | None:
    """Tensors that are not on this rank's device."""
    away = [(name, tensor.device) for name, tensor in loop.tensors.items() if tensor.device != loop.device]
    if not away or loop.device is None:
        return None
    name, where = away[0]
    more = f" and {len(away) - 1} more are" if len(away) > 1 else " is"
    return Finding(
        "device",
        f"{name}{more} on {where}, but rank {loop.rank} computes on {loop.device}",
        where=f"rank {loop.rank}, {name}",
        since=loop.since,
        fix="let the run move the model: no .cuda(), .cpu() or .to(device) in its constructor or forward"
        if loop.in_run
        else f"move it by .to('{loop.device}'), call torch.cuda.set_device(local_rank) first, and load files with "
        "map_location",
        certain=True,
    )


def memory_of(loop: LoopState) -> dict[str, Any] | None:
    """What this rank reports: its host, its GPU, the memory in use there, and what it holds on other GPUs.

    Memory in use is the peak of this process in Drumline's own loop, and that of the whole GPU, which includes other
    processes, in a user's loop.
    """
    device = loop.device
    if device is None or device.type != "cuda" or not loop.equal_memory:
        return None
    if loop.in_run:
        used = torch.cuda.max_memory_allocated(device)
    else:
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    return {
        "host": socket.gethostname(),
        "device": str(device),
        "gpu": _uuid(device.index),
        "used": used,
        "elsewhere": {_uuid(index): held for index in others if (held := torch.cuda.memory_reserved(index))},
        "in_run": loop.in_run,
    }


def memory_elsewhere(reports: Reports) -> Finding | None:
    """A process that holds memory on the GPU of another rank or, in Drumline's own loop, on any GPU but its own."""
    known = reports.known("memory")
    owners = {(report["host"], report["gpu"]): rank for rank, report in known}
    for rank, report in known:
        for gpu, held in report["elsewhere"].items():
            owner = owners.get((report["host"], gpu))
            if owner == rank or (owner is None and not report["in_run"]):
                continue
            whose = f"the GPU of rank {owner}" if owner is not None else f"GPU {gpu}, which is not its own"
            return Finding(
                "device",
                f"rank {rank} holds {held / _GIB:.2f} GiB on {whose}",
                where=f"process of rank {rank} on {report['host']}",
                since=reports.since,
                fix="call torch.cuda.set_device(local_rank) before anything uses a GPU, load files with map_location "
                "and use no .cuda(0) or 'cuda:0'",
                certain=True,
            )
    return None


def shared_gpu(reports: Reports) -> Finding | None:
    """Two ranks on one GPU, which is intended in some tests."""
    seen: dict[tuple[str, str], int] = {}
    for rank, report in reports.known("memory"):
        gpu = (report["host"], report["gpu"])
        if gpu in seen:
            return Finding(
                "shared-gpu",
                f"ranks {seen[gpu]} and {rank} use the same GPU",
                where=f"{report['device']} on {report['host']}",
                since=reports.since,
                fix="use torch.cuda.set_device(local_rank)",
            )
        seen[gpu] = rank
    return None


def memory_imbalance(reports: Reports) -> Finding | None:
    """A rank that uses far more memory than the median rank."""
    known = reports.known("memory")
    used = sorted(report["used"] for _, report in known)
    if len(used) < 2 or not used[0]:
        return None
    median = used[(len(used) - 1) // 2]
    for rank, report in known:
        least = LEAST_BYTES if report["in_run"] else LEAST_BYTES_OF_DEVICE
        if report["used"] > UNEVEN * median and report["used"] - median > least:
            return Finding(
                "memory",
                f"{report['used'] / _GIB:.1f} GiB in use on the GPU of rank {rank}, {median / _GIB:.1f} on others",
                where=f"rank {rank}, {report['device']} on {report['host']}",
                since=reports.since,
                fix="check what only this rank keeps (gathered outputs, a list of losses), and what all ranks put on "
                "the first GPU (torch.load without map_location, .cuda() before set_device)",
            )
    return None


def _shown(kinds: Sequence[Sequence[str]]) -> str:
    return " of ".join(name.removesuffix("Backward0") for name in kinds[-1][:2])


def _uuid(index: int | None) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
