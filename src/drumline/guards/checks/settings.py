"""Settings, inputs, labels and losses that must be alike on all ranks. All of these findings warn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drumline.guards.checks.drift import is_plain, sample_of
from drumline.guards.finding import Finding

INPUT_SCALE = 10.0
"""Inputs whose standard deviations differ by this factor, or whose means lie this many deviations apart, were
prepared
differently. Ranks with different data (classes, sites, noise) stay far below it."""
LOSS_FACTOR = 1.5
"""A rank's loss is too high if it is this many times the others' ..."""
LOSS_ERRORS = 5.0
"""... and higher by this many standard errors."""
_MOST_INPUTS = 4
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


def different_settings(
    ranks: Sequence[int], settings: Sequence[Mapping[str, str]], step: int
) -> Finding | None:
    """The first setting that differs between ranks."""
    for name in ("dropout rates", "layers", "optimizer", "autocast", "cross_entropy"):
        for rank, one in zip(ranks, settings, strict=True):
            if one[name] != settings[0][name]:
                shown = "" if name == "layers" else f": {settings[0][name]} and {one[name]}"
                return Finding(
                    "setup",
                    f"ranks {ranks[0]} and {rank} train with different settings ({name}){shown}",
                    f"ranks {ranks[0]} and {rank}",
                    f"step {step}",
                    "build model, loss, optimizer and autocast from the same settings on every rank",
                )
    return None


def frozen_on_some_ranks(
    ranks: Sequence[int], flags: Sequence[str], names: Sequence[str], step: int
) -> Finding | None:
    """A parameter that is frozen on one rank and trained on another. `flags` has a 0 or 1 for each parameter."""
    for rank, mine in zip(ranks, flags, strict=True):
        if mine == flags[0] or not len(mine) == len(flags[0]) == len(names):
            continue
        differ = [index for index, flag in enumerate(mine) if flag != flags[0][index]]
        frozen, trained = (rank, ranks[0]) if mine[differ[0]] == "0" else (ranks[0], rank)
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


def input_scales(tensors: Iterable[torch.Tensor]) -> list[tuple[float, float]]:
    """Mean and standard deviation of the first floating-point inputs of a batch with more than one dimension."""
    found = []
    for tensor in tensors:
        if tensor.dim() > 1 and tensor.is_floating_point() and is_plain(tensor) and tensor.numel() > 1:
            deviation, mean = torch.std_mean(tensor.detach().float())
            found.append((float(mean), float(deviation)))
    return found[:_MOST_INPUTS]


def different_scales(scales: Sequence[Sequence[Sequence[float]]]) -> tuple[int, int] | None:
    """The indices of the first two ranks whose inputs are on different scales."""
    for index, other in enumerate(scales):
        if len(other) != len(scales[0]):
            return None
        for (mean, deviation), (other_mean, other_deviation) in zip(scales[0], other, strict=True):
            small, large = sorted((deviation, other_deviation))
            if small > 0 and (large > INPUT_SCALE * small or abs(mean - other_mean) > INPUT_SCALE * large):
                return 0, index
    return None


def different_inputs(
    ranks: Sequence[int], scales: Sequence[Any], pair: tuple[int, int], step: int
) -> Finding:
    """Two ranks, by index, whose inputs are on different scales in each of the first `step` steps."""
    shown = [", ".join(f"mean {mean:.3g} std {std:.3g}" for mean, std in scales[index]) for index in pair]
    first, second = (ranks[index] for index in pair)
    return Finding(
        "inputs",
        f"the inputs of ranks {first} and {second} are on different scales: {shown[0]} and {shown[1]}",
        f"ranks {first} and {second}, in each of {step} steps",
        "step 1",
        "normalise the inputs in the same way on every rank; ignore this if ranks have different kinds of data",
    )


def different_losses(
    ranks: Sequence[int], messages: Sequence[Mapping[str, Any]], step: int
) -> Finding | None:
    """A rank that computes a different loss, or whose loss stays far above the others'."""
    kinds = [[tuple(kind) for kind in message["kinds"]] for message in messages]
    if all(len(each) == _LOSS_STEPS and len(set(each)) == 1 for each in kinds):
        for rank, each in zip(ranks, kinds, strict=True):
            if each != kinds[0]:
                return Finding(
                    "loss",
                    f"ranks {ranks[0]} and {rank} compute different losses: {_shown(kinds[0])} and {_shown(each)}",
                    f"ranks {ranks[0]} and {rank}",
                    f"step {step}",
                    "compute the loss by the same lines, with the same factors, on every rank",
                )
    levels = [message["loss"] for message in messages]
    if any(level is None for level in levels) or len(levels) < 2:
        return None
    most = max(range(len(levels)), key=lambda index: levels[index][0])
    others = [level for index, level in enumerate(levels) if index != most]
    mean, error, count = levels[most]
    rest = max(level[0] for level in others)
    errors = error + max(level[1] for level in others)
    if rest <= 0 or mean < LOSS_FACTOR * rest or mean - rest < LOSS_ERRORS * errors:
        return None
    return Finding(
        "loss",
        f"the loss of rank {ranks[most]} stays at {mean:.3g}, {mean / rest:.1f} times that of the others",
        f"rank {ranks[most]}, mean of {count} losses",
        f"step {step}",
        "compare its labels, data and loss with another rank's; nothing to do if its data is harder",
    )


def different_labels(
    ranks: Sequence[int], messages: Sequence[Mapping[str, Any]], step: int
) -> Finding | None:
    """A label of the loader that becomes one class in the loss of a rank and a different class on another rank."""
    for (rank, mine), (other, theirs) in combinations(zip(ranks, messages, strict=True), 2):
        for label in mine["classes"].keys() & theirs["classes"].keys():
            if mine["classes"][label] != theirs["classes"][label]:
                return Finding(
                    "labels",
                    f"label {label} of the loader is class {mine['classes'][label]} in the loss of rank {rank} and "
                    f"class {theirs['classes'][label]} on rank {other}",
                    f"ranks {rank} and {other}",
                    f"step {step}",
                    "number the classes the same way on every rank: sort their names",
                )
    return None


def summed_gradients(
    ranks: Sequence[int], messages: Sequence[Mapping[str, Any]], step: int
) -> Finding | None:
    """Gradients that the script adds up over the ranks without dividing them or the loss, or that it exchanges again
    after DDP. Each rank sends some values of a gradient after backward and before the step."""
    samples = [message["sample"] for message in messages]
    if any(each is None for each in samples) or any(one["divided"] for one in messages) or len(ranks) < 2:
        return None
    local, now = (
        torch.tensor([sample[index] for sample in samples], dtype=torch.float64) for index in (0, 1)
    )
    # Equal gradients are DDP's mean already.
    if not all(torch.allclose(local.sum(0), each, rtol=1e-3, atol=0.0) for each in now):
        return None
    return Finding(
        "averaging",
        f"the gradients are the sum over {len(ranks)} ranks, not the mean: the learning rate acts {len(ranks)} times",
        "the code that exchanges .grad after backward",
        f"step {step}",
        "divide by the number of ranks after all_reduce (or use ReduceOp.AVG), and leave the exchange to DDP if it "
        "is used; nothing to do if the learning rate is chosen for the sum",
    )


def _shown(kinds: Sequence[Sequence[str]]) -> str:
    return " of ".join(name.removesuffix("Backward0") for name in kinds[-1][:2])
