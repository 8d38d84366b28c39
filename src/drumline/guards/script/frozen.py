"""Monitors frozen tensors in a user's loop: fingerprints before and after some steps of the first optimizer.

Promises: fingerprints are taken at the steps at which ranks compare, and read a step later, so nothing waits for a
GPU. A parameter that was trainable at any step in between is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from drumline.core.host_copy import HostCopy
from drumline.guards.checks.drift import is_plain
from drumline.guards.checks.frozen import (
    followers,
    frozen_parameters,
    frozen_statistics,
    moved_parameters,
    moved_statistics,
)
from drumline.guards.finding import Finding
from drumline.guards.script.discovery import Discovery
from drumline.state.fingerprint import fingerprints_of


@dataclass
class _Taken:
    step: int
    parameters: dict[str, Tensor]
    statistics: dict[str, Tensor]
    before: HostCopy
    after: HostCopy | None = None

    def values(self, copy: HostCopy) -> dict[str, int]:
        names = [*self.parameters, *self.statistics]
        return dict(zip(names, copy.values().tolist(), strict=True))


class FrozenMonitor:
    """The frozen tensors of one model."""

    def __init__(self, model: nn.Module, discovery: Discovery) -> None:
        self._model, self._discovery = model, discovery
        self._taken: _Taken | None = None
        self._last: dict[str, int] = {}
        """The fingerprints after the last step for which they were taken."""
        self._last_step = 0
        self._watched: dict[str, Tensor] = {}

    def before_step(self, step: int, compares: bool) -> list[Finding]:
        """Just before a step of the first optimizer."""
        for name in [name for name, each in self._watched.items() if each.requires_grad]:
            del self._watched[name]
            self._last.pop(name, None)
        found = self._read(wait=compares)
        if compares and self._taken is None:
            self._taken = self._take(step)
        return found

    def after_step(self) -> None:
        """Just after it."""
        if self._taken is not None and self._taken.after is None:
            self._taken.after = _fingerprints(self._taken.parameters, self._taken.statistics)

    def at_close(self) -> list[Finding]:
        """After the last step."""
        return self._read(wait=True)

    def _take(self, step: int) -> _Taken | None:
        teachers = {id(each) for each in self._discovery.teacher_parameters.values()}
        others = teachers | self._discovery.held_elsewhere
        parameters = {
            name: each
            for name, each in frozen_parameters(self._model).items()
            if id(each) not in others and is_plain(each)
        }
        statistics = {name: each for name, each in frozen_statistics(self._model).items() if is_plain(each)}
        if not parameters and not statistics:
            return None
        self._watched = parameters
        return _Taken(step, parameters, statistics, _fingerprints(parameters, statistics))

    def _read(self, wait: bool) -> list[Finding]:
        taken = self._taken
        if taken is None or taken.after is None or not (wait or taken.after.done):
            return []
        self._taken = None
        before, after = taken.values(taken.before), taken.values(taken.after)
        still = {name for name, each in taken.parameters.items() if not each.requires_grad}
        inside = [name for name in still if before[name] != after[name]]
        between = [name for name in still if self._last.get(name, before[name]) != before[name]]
        learned = [name for name in taken.statistics if self._last.get(name, before[name]) != before[name]]
        since = f"between steps {self._last_step} and {taken.step}"
        self._last, self._last_step = after, taken.step
        found = []
        if inside:
            return [moved_parameters(_ordered(taken, inside), f"step {taken.step}", by_optimizer=True)]
        if between or learned:
            led = followers(self._model, [*between, *learned])
            if alone := [name for name in between if name not in led]:
                found.append(moved_parameters(_ordered(taken, alone), since, by_optimizer=False))
            if alone := [name for name in learned if name not in led]:
                found.append(moved_statistics(alone, since))
        return found


def _fingerprints(parameters: dict[str, Tensor], statistics: dict[str, Tensor]) -> HostCopy:
    return HostCopy(fingerprints_of([each.detach() for each in (*parameters.values(), *statistics.values())]))


def _ordered(taken: _Taken, names: list[str]) -> list[str]:
    return [name for name in taken.parameters if name in set(names)]
