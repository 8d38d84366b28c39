"""The last comparison, after the loop: drift since the last one, copies of the weights, samples and losses.

Promises: bounded waits only. A rank posts its message and waits a few seconds for the others'; the last to arrive
sees all of them. Weights that the script changed after its last step (to save the best ones) are not compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from drumline.guards.checks.drift import (
    ROUNDING,
    difference,
    different_rates,
    distance,
    drifted,
    fingerprints,
    rounding,
    sample_of,
    stepped_around,
)
from drumline.guards.checks.samples import overlap
from drumline.guards.checks.settings import different_losses
from drumline.guards.checks.steps import unequal_steps
from drumline.guards.finding import Found, rank_names
from drumline.guards.script.comparison import Comparison
from drumline.guards.script.discovery import different_copies, different_teachers
from drumline.guards.script.rendezvous import Rendezvous

_GATHER_SECONDS = 10.0
_LINGER_SECONDS = 3.0


def versions(parameters: Iterable[torch.Tensor]) -> int:
    """A number that changes if a parameter is written."""
    return sum(parameter._version for parameter in parameters)


def compare_last(
    comparison: Comparison, optimizers: Sequence[Optimizer], steps: Sequence[int], untouched: bool
) -> list[Found]:
    """The findings at the end; none if a rank does not arrive."""
    rendezvous = comparison.rendezvous
    message = _message(comparison, optimizers, steps, untouched)
    messages = rendezvous.gather("closing", message, lambda: None, seconds=_GATHER_SECONDS)
    found = [] if any(one is None for one in messages) else _differences(comparison, optimizers[0], messages)
    linger(rendezvous, "closing/read")
    return found


def _message(
    comparison: Comparison, optimizers: Sequence[Optimizer], steps: Sequence[int], untouched: bool
) -> dict[str, Any]:
    """What this rank reports at the end."""
    tensors, monitors = comparison.tensors(optimizers[0]), comparison.monitors
    return {
        "steps": list(steps),
        "parameters": fingerprints(tensors["parameters"]) if untouched else None,
        "copies": monitors.discovery.copies(),
        "teachers": monitors.discovery.teachers(),
        "data": monitors.loaders.summary(),
        "loss": monitors.losses.level(),
        "kinds": [],
        "passes": monitors.hang.history(),
        "rates": {
            f"param_groups[{index}]['lr']"
            + (f" of optimizer {number}" if len(optimizers) > 1 else ""): float(group["lr"])
            for number, one in enumerate(optimizers)
            for index, group in enumerate(one.param_groups)
            if "lr" in group
        },
        "seen": comparison.forwards.evidence(in_step=False),
    }


def _differences(
    comparison: Comparison, optimizer: Optimizer, messages: Sequence[Mapping[str, Any]]
) -> list[Found]:
    """All ranks decide alike, from the same messages."""
    ranks, steps = comparison.rendezvous.ranks, messages[0]["steps"][0]
    found = _drift(comparison, optimizer, messages)
    for warning in (
        different_copies(ranks, [one["copies"] for one in messages], steps),
        overlap(ranks, [one["data"] for one in messages], steps),
        different_losses(ranks, messages, steps),
        different_teachers(ranks, [one["teachers"] for one in messages], steps),
    ):
        if warning is not None:
            found.append((warning, False))
    return found


def _drift(
    comparison: Comparison, optimizer: Optimizer, messages: Sequence[Mapping[str, Any]]
) -> list[Found]:
    """Parameters, learning rates or numbers of steps that differ."""
    rendezvous, agreed_at = comparison.rendezvous, comparison.agreed_at
    ranks, steps = rendezvous.ranks, messages[0]["steps"][0]
    values = [one["parameters"] for one in messages]
    known = all(value is not None for value in values)
    differs = difference(values) if known else None
    unequal, rates = unequal_steps(ranks, messages, agreed_at), different_rates(ranks, messages)
    if unequal is not None and (differs is not None or not known):
        wrapped = all(one["seen"]["wrapped"] for one in messages)
        return [(unequal, known and wrapped and not comparison.averages())]
    if differs is None or unequal is not None:
        return [] if rates is None else [(rates, False)]
    name, accused = differs
    named = rank_names([ranks[index] for index in accused])
    sample = sample_of(comparison.tensors(optimizer)["parameters"].get(name))
    samples = rendezvous.gather("closing/sample", sample, lambda: None, seconds=_GATHER_SECONDS)
    apart = distance([one for one in samples if one is not None])
    since = f"between steps {agreed_at} and {steps}"
    around = stepped_around([one["seen"] for one in messages], name, since)
    if rates is not None:
        rates = replace(rates, where=f"{rates.where}; parameter '{name}' differs too")
    elif 0 < apart < ROUNDING:
        return [(rounding("parameters", name, named, apart, "after the last step"), False)]
    fix = "check for code that changes weights or gradients on one rank only; a smaller every= finds the step"
    drift = drifted("parameter", name, f"{named} after the last step", f"'{name}'", since, fix)
    return [(around or rates or drift, not comparison.averages())]


def linger(rendezvous: Rendezvous, key: str) -> None:
    """The store may live in this process: waits a moment for the other ranks to arrive here too."""
    rendezvous.post(f"{key}/{rendezvous.rank}", True)
    until = time.monotonic() + _LINGER_SECONDS
    while time.monotonic() < until:
        if all(rendezvous.read(f"{key}/{rank}") for rank in rendezvous.ranks):
            return
        time.sleep(0.01)
