"""Settings that must be the same on all ranks, and losses that must be alike (pure over what the ranks report)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drumline.guard.finding import Finding
from drumline.guard.forwards import Call

_FACTOR = 1.5
_ERRORS = 5.0


def setup_of(model: nn.Module, optimizer: Optimizer, calls: Sequence[Call]) -> dict[str, str]:
    """What this rank's model, optimizer and precision are."""
    layers = {name: f"{type(m).__name__}({m.extra_repr()})" for name, m in model.named_modules()}
    described = "\n".join(f"{name} {text}" for name, text in layers.items())
    return {
        "layers": hashlib.blake2b(described.encode(), digest_size=8).hexdigest(),
        "rates of dropout": str(
            [m.p for m in model.modules() if isinstance(getattr(m, "p", None), float)][:64]
        ),
        "optimizer": type(optimizer).__name__,
        "autocast": str([{kind: str(dtype) for kind, dtype in call.autocast.items()} for call in calls]),
    }


def unlike_setups(ranks: Sequence[int], said: Sequence[Mapping[str, str]], step: int) -> Finding | None:
    """The first setting that differs between ranks."""
    for name in ("rates of dropout", "layers", "optimizer", "autocast"):
        for rank, one in zip(ranks, said, strict=True):
            if one[name] != said[0][name]:
                shown = "" if name == "layers" else f": {said[0][name]} and {one[name]}"
                return Finding(
                    "setup",
                    f"ranks {ranks[0]} and {rank} train with different settings ({name}){shown}",
                    f"ranks {ranks[0]} and {rank}",
                    f"step {step}",
                    "build model, optimizer and autocast from the same settings on every rank",
                )
    return None


def unlike_losses(ranks: Sequence[int], words: Sequence[Mapping[str, Any]], step: int) -> Finding | None:
    """A rank that computes a different loss, or whose loss stays far above the others'."""
    kinds = [[tuple(kind) for kind in one["kinds"]] for one in words]
    if all(len(each) == 3 and len(set(each)) == 1 for each in kinds):
        for rank, each in zip(ranks, kinds, strict=True):
            if each != kinds[0]:
                return Finding(
                    "loss",
                    f"ranks {ranks[0]} and {rank} compute different losses: {_shown(kinds[0])} and {_shown(each)}",
                    f"ranks {ranks[0]} and {rank}",
                    f"step {step}",
                    "compute the loss by the same lines, with the same factors, on every rank",
                )
    levels = [one["loss"] for one in words]
    if any(level is None for level in levels) or len(levels) < 2:
        return None
    most = max(range(len(levels)), key=lambda place: levels[place][0])
    others = [level for place, level in enumerate(levels) if place != most]
    mean, error, count = levels[most]
    rest = max(level[0] for level in others)
    spread = error + max(level[1] for level in others)
    if rest <= 0 or mean < _FACTOR * rest or mean - rest < _ERRORS * spread:
        return None
    return Finding(
        "loss",
        f"the loss of rank {ranks[most]} stays at {mean:.3g}, {mean / rest:.1f} times that of the others",
        f"rank {ranks[most]}, mean of {count} losses",
        f"step {step}",
        "compare its labels, data and loss with another rank's; nothing to do if its data is harder",
    )


def _shown(kinds: Sequence[Sequence[str]]) -> str:
    return " of ".join(name.removesuffix("Backward0") for name in kinds[-1][:2])
