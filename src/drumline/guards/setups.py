"""Settings that must be the same on all ranks, and losses that must be alike (pure over what the ranks report)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drumline.guards.compare import sample_of
from drumline.guards.finding import Finding
from drumline.guards.forwards import Call

_MOST_WEIGHTS = 16
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


def loss_settings(given: Mapping[str, Any]) -> str:
    """The arguments of `cross_entropy` beside its input and target that are not its defaults."""
    usual = {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0}
    shown = {name: given[name] for name, value in usual.items() if given.get(name, value) != value}
    if isinstance(given.get("weight"), torch.Tensor):
        shown["weight"] = [float(f"{value:.4g}") for value in sample_of(given["weight"], _MOST_WEIGHTS)]
    return ", ".join(f"{name}={value}" for name, value in shown.items()) or "defaults"


def unlike_setups(ranks: Sequence[int], said: Sequence[Mapping[str, str]], step: int) -> Finding | None:
    """The first setting that differs between ranks."""
    for name in ("rates of dropout", "layers", "optimizer", "autocast", "cross_entropy"):
        for rank, one in zip(ranks, said, strict=True):
            if one[name] != said[0][name]:
                shown = "" if name == "layers" else f": {said[0][name]} and {one[name]}"
                return Finding(
                    "setup",
                    f"ranks {ranks[0]} and {rank} train with different settings ({name}){shown}",
                    f"ranks {ranks[0]} and {rank}",
                    f"step {step}",
                    "build model, loss, optimizer and autocast from the same settings on every rank",
                )
    return None


def unlike_trained(
    ranks: Sequence[int], said: Sequence[str], names: Sequence[str], step: int
) -> Finding | None:
    """A parameter that is frozen on one rank and trained on another; `said` has a 0 or 1 for each parameter."""
    for rank, flags in zip(ranks, said, strict=True):
        if flags == said[0] or not len(flags) == len(said[0]) == len(names):
            continue
        differ = [place for place, flag in enumerate(flags) if flag != said[0][place]]
        frozen, trained = (rank, ranks[0]) if flags[differ[0]] == "0" else (ranks[0], rank)
        name, more = names[differ[0]], len(differ) - 1
        which = f"parameters '{name}' and {more} more are" if more else f"parameter '{name}' is"
        return Finding(
            "setup",
            f"{which} frozen on rank {frozen} and trained on rank {trained}",
            f"ranks {ranks[0]} and {rank}",
            f"step {step}",
            "call requires_grad_ in the same way on every rank, before wrapping in DDP",
        )
    return None


def unlike_inputs(ranks: Sequence[int], said: Sequence[Any], pair: tuple[int, int], step: int) -> Finding:
    """Two ranks whose inputs are on different scales."""
    shown = [", ".join(f"mean {mean:.3g} std {std:.3g}" for mean, std in said[place]) for place in pair]
    first, second = (ranks[place] for place in pair)
    return Finding(
        "inputs",
        f"the inputs of ranks {first} and {second} are on different scales: {shown[0]} and {shown[1]}",
        f"ranks {first} and {second}, in each of {step} steps",
        "step 1",
        "normalise the inputs in the same way on every rank; ignore this if ranks have different kinds of data",
    )


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


def unlike_labels(ranks: Sequence[int], words: Sequence[Mapping[str, Any]], step: int) -> Finding | None:
    """A label of the loader that is one class in the loss of a rank and another class on another rank."""
    for place, first in enumerate(words):
        for other, second in list(enumerate(words))[place + 1 :]:
            for label in first["renamed"].keys() & second["renamed"].keys():
                one, two = first["renamed"][label], second["renamed"][label]
                if one != two:
                    return Finding(
                        "labels",
                        f"label {label} of the loader is class {one} in the loss of rank {ranks[place]} and class "
                        f"{two} on rank {ranks[other]}",
                        f"ranks {ranks[place]} and {ranks[other]}",
                        f"step {step}",
                        "number the classes the same way on every rank: sort their names",
                    )
    return None


def summed(ranks: Sequence[int], words: Sequence[Mapping[str, Any]], step: int) -> Finding | None:
    """Gradients that the script adds up over the ranks and does not divide, of losses that it does not divide
    either; or that it exchanges again after DDP did."""
    samples = [one["sample"] for one in words]
    if any(sample is None for sample in samples) or any(one["divided"] for one in words) or len(ranks) < 2:
        return None
    local, now = (
        torch.tensor([sample[place] for sample in samples], dtype=torch.float64) for place in (0, 1)
    )
    total = local.sum(0)
    # Of equal gradients DDP has made the mean already.
    if not all(torch.allclose(total, each, rtol=1e-3, atol=0.0) for each in now):
        return None
    return Finding(
        "averaging",
        f"the gradients are the sum over {len(ranks)} ranks, not the mean: the rate acts {len(ranks)} times",
        "what exchanges .grad after backward",
        f"step {step}",
        "divide by the number of ranks after all_reduce (or ReduceOp.AVG), and leave the exchange to DDP where it is "
        "used; nothing to do if the rate is made for the sum",
    )


def _shown(kinds: Sequence[Sequence[str]]) -> str:
    return " of ".join(name.removesuffix("Backward0") for name in kinds[-1][:2])
