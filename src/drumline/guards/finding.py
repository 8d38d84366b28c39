"""What checks receive and return: one rank's loop, the reports of all ranks, and a finding.

Promises: a finding says what is wrong, where, since when and what to do, in `drumline train` and in a user's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Finding:
    """One mistake. `guard` is the guard's name ("bypass", "drift", ...) in code, messages and documentation.

    `where` names the tensor, rank, file and line, as far as they are known. `since` names a step or a moment. Empty
    fields are not printed.
    """

    guard: str
    what: str
    where: str = ""
    since: str = ""
    fix: str = ""
    certain: bool = False
    """Whether it stops a user's loop; if not, it warns. In Drumline's own loop, `guard.action` decides."""

    def details(self) -> list[tuple[str, str]]:
        """Where and since when, as far as they are known."""
        return [(label, text) for label, text in (("where", self.where), ("since", self.since)) if text]

    def __str__(self) -> str:
        details = [*self.details(), *([("fix", self.fix)] if self.fix else [])]
        lines = [f"drumline guard [{self.guard}]: {self.what}"]
        return "\n".join([*lines, *(f"  {label}: {text}" for label, text in details)])


class GuardError(RuntimeError):
    """A guard stopped training. `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(str(finding))


@dataclass(frozen=True)
class LoopState:
    """One rank of a training loop, Drumline's or a user's, when its state is checked."""

    rank: int
    device: torch.device | None
    """The rank's own device; None if the model is spread over several."""
    parameters: Mapping[str, torch.Tensor]
    """The model's parameters."""
    held: Collection[torch.Tensor]
    """The tensors that an optimizer holds."""
    tensors: Mapping[str, torch.Tensor]
    """Tensors that must be on `device`, by what they are."""
    since: str
    in_run: bool
    """Whether this is Drumline's own loop."""
    equal_memory: bool
    """Whether each process uses only its own GPU, and about as much memory as the others."""


@dataclass(frozen=True)
class Reports:
    """What all ranks report at one step: a message of each rank, in the order of `ranks`."""

    ranks: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    step: int

    @property
    def since(self) -> str:
        """The step, as findings name it."""
        return f"step {self.step:,}"

    def of(self, name: str) -> list[Any]:
        """One entry of every message."""
        return [message[name] for message in self.messages]

    def known(self, name: str) -> list[tuple[int, Any]]:
        """One entry of every message that has it, with the rank."""
        return [(rank, one) for rank, one in zip(self.ranks, self.of(name), strict=True) if one is not None]


LocalCheck = Callable[[LoopState], Finding | None]
RankCheck = Callable[[Reports], Finding | None]


def rank_names(ranks: Collection[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def listed(names: Collection[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
