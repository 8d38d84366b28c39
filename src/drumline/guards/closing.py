"""The last comparison, when the loop is over: drift since the one before, copies of the weights, samples and losses.

Promises: bounded waits only: a rank posts its message and waits a few seconds for the others'; the last to come sees
all of them. Weights that the script changed after its last step (to save the best ones) are not compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from drumline.core.text import counted
from drumline.guards.beside import unlike_copies, unlike_teachers
from drumline.guards.bypass import evidence, rank_names, stepped_around
from drumline.guards.compare import apart, difference, numbers, sample_of
from drumline.guards.finding import Finding
from drumline.guards.hang import Beat, skipped_step
from drumline.guards.meeting import Meeting
from drumline.guards.reading import overlap
from drumline.guards.rounds import ROUNDING, Found, Rounds, rounding
from drumline.guards.setups import unlike_losses

_SECONDS = 10.0
_LINGER = 3.0


def versions(parameters: Iterable[torch.Tensor]) -> int:
    """A number that changes when a parameter is written to."""
    return sum(parameter._version for parameter in parameters)


def last_word(
    rounds: Rounds, optimizers: Sequence[Optimizer], steps: Sequence[int], untouched: bool
) -> dict[str, Any]:
    """What this rank says at the end."""
    tensors = rounds._tensors(optimizers[0])
    sources = rounds.sources
    return {
        "steps": list(steps),
        "parameters": numbers(tensors["parameters"]) if untouched else None,
        "copies": sources.beside.copies(),
        "teachers": sources.beside.states(),
        "data": sources.reading.summary(),
        "loss": sources.losses.level(),
        "kinds": [],
        "passes": sources.pulse.history(),
        "rates": {
            f"param_groups[{place}]['lr']"
            + (f" of optimizer {number}" if len(optimizers) > 1 else ""): float(group["lr"])
            for number, one in enumerate(optimizers)
            for place, group in enumerate(one.param_groups)
            if "lr" in group
        },
        "seen": evidence(rounds.forwards),
    }


def compare_last(
    rounds: Rounds, optimizers: Sequence[Optimizer], steps: Sequence[int], untouched: bool
) -> list[Found]:
    """What the ranks find at the end; nothing when one of them does not come."""
    meeting = rounds.meeting
    word = last_word(rounds, optimizers, steps, untouched)
    words = meeting.gather("closing", word, lambda: None, seconds=_SECONDS)
    found = [] if any(one is None for one in words) else _differences(rounds, optimizers[0], words)
    linger(meeting, "closing/read")
    return found


def _differences(rounds: Rounds, optimizer: Optimizer, words: Sequence[Mapping[str, Any]]) -> list[Found]:
    """All ranks decide alike, from the same words."""
    meeting, agreed_at = rounds.meeting, rounds.agreed_at
    ranks, steps = meeting.ranks, words[0]["steps"][0]
    found: list[Found] = []
    values = [one["parameters"] for one in words]
    known = all(value is not None for value in values)
    place = difference(values) if known else None
    unequal, rates = unequal_steps(ranks, words, agreed_at), unlike_rates(ranks, words)
    if unequal is not None and (place is not None or not known):
        certain = known and all(one["seen"]["wrapped"] for one in words) and not rounds.averaged()
        found.append((unequal, certain))
    elif place is not None and unequal is None:
        name, accused = place
        told = rank_names([ranks[at] for at in accused])
        sample = sample_of(rounds._tensors(optimizer)["parameters"].get(name))
        samples = meeting.gather("closing/sample", sample, lambda: None, seconds=_SECONDS)
        far = apart([one for one in samples if one is not None])
        around = stepped_around(
            [one["seen"] for one in words], name, f"between steps {agreed_at} and {steps}"
        )
        if rates is not None:
            rates = replace(rates, where=f"{rates.where}; parameter '{name}' differs too")
        if rates is None and 0 < far < ROUNDING:
            found.append((rounding("parameters", f"'{name}' on {told}", far, "after the last step"), False))
        else:
            found.append((around or rates or _drifted(name, told, steps, agreed_at), not rounds.averaged()))
    elif rates is not None:
        found.append((rates, False))
    for doubtful in (
        unlike_copies(ranks, [one["copies"] for one in words], steps),
        overlap(ranks, [one["data"] for one in words], steps),
        unlike_losses(ranks, words, steps),
        unlike_teachers(ranks, [one["teachers"] for one in words], steps),
    ):
        if doubtful is not None:
            found.append((doubtful, False))
    return found


def unequal_steps(ranks: Sequence[int], words: Sequence[Mapping[str, Any]], agreed_at: int) -> Finding | None:
    """Ranks that end after different numbers of steps."""
    counts = [one["steps"] for one in words]
    number = next((at for at in range(len(counts[0])) if len({each[at] for each in counts}) > 1), None)
    if number is None:
        return None
    beats = {
        rank: Beat(one["steps"][0], "finished", passes=one["passes"])
        for rank, one in zip(ranks, words, strict=True)
    }
    what, fix = skipped_step(beats, agreed_at + 1) or (
        "ranks took unequal numbers of steps",
        "call optimizer.step() equally often on every rank: skip a batch on all ranks or on none",
    )
    told = ", ".join(
        f"rank {rank}: {counted(each[number], 'step')}" for rank, each in zip(ranks, counts, strict=True)
    )
    return Finding("steps", what, told, f"after step {agreed_at}", fix)


def unlike_rates(ranks: Sequence[int], words: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Learning rates that differ between ranks at the end."""
    first = words[0]["rates"]
    for rank, one in zip(ranks, words, strict=True):
        for name, value in one["rates"].items():
            if name in first and value != first[name]:
                return Finding(
                    "drift",
                    f"{name} is {first[name]:.4g} on rank {ranks[0]} and {value:.4g} on rank {rank} at the end",
                    f"ranks {ranks[0]} and {rank}",
                    "seen after the last step",
                    "step the scheduler alike on every rank; all_reduce the loss that ReduceLROnPlateau reads",
                )
    return None


def linger(meeting: Meeting, key: str) -> None:
    """The store may live in this process: stays until the others have come here too, or for a moment."""
    meeting.post(f"{key}/{meeting.rank}", True)
    until = time.monotonic() + _LINGER
    while time.monotonic() < until:
        if all(meeting.look(f"{key}/{rank}") for rank in meeting.ranks):
            return
        time.sleep(0.01)


def _drifted(name: str, told: str, steps: int, agreed_at: int) -> Finding:
    return Finding(
        "drift",
        f"ranks have drifted apart: parameter '{name}' differs on {told} after the last step",
        f"'{name}'",
        f"between steps {agreed_at} and {steps}",
        "look for what changes weights or gradients on one rank only; a smaller every= finds the step",
    )
