"""Reads running sums off the device late, so that the step never waits for them.

Promises: asking for a reading queues a copy and returns; a reading is handed out once the device has passed
that point, in order; nothing is lost at the end (`drain`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from drumline.core.host_copy import HostCopy
from drumline.parallel.world import World


@dataclass(frozen=True)
class Reading:
    """Sums over the whole world since the reading before."""

    step: int
    loss_sum: float
    correct: int
    samples: int
    terms: tuple[float, ...] = ()
    """Sums of the objective's own terms."""

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, self.samples)

    @property
    def accuracy(self) -> float:
        return self.correct / max(1, self.samples)


class Meter:
    """Running sums on the device. The fields are views of `sums`, one vector, so that reading them is one copy."""

    def __init__(self, terms: int, device: torch.device) -> None:
        self.sums = torch.zeros(3 + terms, dtype=torch.float64, device=device)
        self.loss, self.correct, self.samples = self.sums[:3].unbind()
        self.terms = self.sums[3:]
        """The objective's own terms."""


class MeterReader:
    """Reads a step's meter from time to time."""

    def __init__(self, meter: Meter, world: World) -> None:
        self.meter, self.world = meter, world
        self._waiting: deque[tuple[int, HostCopy]] = deque()
        self._glances: deque[tuple[int, HostCopy]] = deque()

    def request(self, step: int) -> None:
        """Adds the meter up over the ranks, starts its copy to the host and sets it to zero."""
        sums = self.world.all_reduce(self.meter.sums.clone())
        self.meter.sums.zero_()
        self._waiting.append((step, HostCopy(sums)))

    def glance(self, step: int) -> None:
        """Starts a copy of the sums so far and leaves the meter as it is. Every rank calls it at the same step."""
        self._glances.append((step, HostCopy(self.world.all_reduce(self.meter.sums.clone()))))

    def glanced(self) -> Reading | None:
        """The newest glance that has arrived since the last call. Never waits."""
        seen = None
        while self._glances and self._glances[0][1].done:
            seen = _reading(*self._glances.popleft())
        return seen

    def ready(self) -> list[Reading]:
        """The readings that have arrived, oldest first. Never waits."""
        arrived = []
        while self._waiting and self._waiting[0][1].done:
            arrived.append(self._next())
        return arrived

    def drain(self) -> list[Reading]:
        """All that is still on its way; waits for it."""
        return [self._next() for _ in range(len(self._waiting))]

    def _next(self) -> Reading:
        return _reading(*self._waiting.popleft())


def _reading(step: int, late: HostCopy) -> Reading:
    loss, correct, samples, *terms = late.values().tolist()
    return Reading(step, loss, int(correct), int(samples), tuple(terms))
