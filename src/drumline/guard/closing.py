"""The last comparison, when the loop is over: drift since the one before, copies of the weights, samples and losses.

Promises: bounded waits only: a rank posts its message and waits a few seconds for the others'; the last to come sees
all of them. Weights that the script changed after its last step (to save the best ones) are not compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from drumline.guard.beside import unlike_copies, unlike_teachers
from drumline.guard.compare import difference, numbers
from drumline.guard.finding import Finding
from drumline.guard.meeting import Meeting
from drumline.guard.reading import overlap
from drumline.guard.rounds import Found, Rounds
from drumline.guard.setups import unlike_losses

_SECONDS = 10.0
_LINGER = 3.0


def versions(parameters: Iterable[torch.Tensor]) -> int:
    """A number that changes when a parameter is written to."""
    return sum(parameter._version for parameter in parameters)


def last_word(rounds: Rounds, optimizer: Optimizer, steps: Sequence[int], untouched: bool) -> dict[str, Any]:
    """What this rank says at the end."""
    tensors = rounds._tensors(optimizer)
    sources = rounds.sources
    return {
        "steps": list(steps),
        "parameters": numbers(tensors["parameters"]) if untouched else None,
        "copies": sources.beside.copies(),
        "teachers": sources.beside.states(),
        "data": sources.reading.summary(),
        "loss": sources.losses.level(),
        "kinds": [],
    }


def compare_last(meeting: Meeting, word: dict[str, Any], agreed_at: int) -> list[Found]:
    """What the ranks find at the end; nothing when one of them does not come."""
    words = meeting.gather("closing", word, lambda: None, seconds=_SECONDS)
    linger(meeting, "closing/read")
    if any(one is None for one in words):
        return []
    ranks, steps = meeting.ranks, word["steps"][0]
    found: list[Found] = []
    alike = len({tuple(one["steps"]) for one in words}) == 1
    values = [one["parameters"] for one in words]
    if alike and all(value is not None for value in values):
        place = difference(values)
        if place is not None:
            name, accused = place
            told = ", ".join(str(ranks[at]) for at in accused)
            found.append((_drifted(name, told, steps, agreed_at), True))
    for doubtful in (
        unlike_copies(ranks, [one["copies"] for one in words], steps),
        overlap(ranks, [one["data"] for one in words], steps),
        unlike_losses(ranks, words, steps),
        unlike_teachers(ranks, [one["teachers"] for one in words], steps),
    ):
        if doubtful is not None:
            found.append((doubtful, False))
    return found


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
        f"ranks have drifted apart: parameter '{name}' differs on ranks {told} after the last step",
        f"'{name}'",
        f"between steps {agreed_at} and {steps}",
        "look for what changes weights or gradients on one rank only; a smaller every= finds the step",
    )
