"""What the taps on torch hear, passed on to the guards of one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from drumline.guard.delayed import AT_ONCE, Hidden
from drumline.guard.forwards import Forwards
from drumline.guard.hang import Pulse
from drumline.guard.losses import Losses
from drumline.guard.parameters import Parameters
from drumline.guard.probes import Probes, capturing
from drumline.guard.reading import Reading
from drumline.guard.taps import Listener

_WATCHED = 12
"""Steps in which labels are compared."""
_MOST_TARGETS = 8


class Heard(Listener):
    """Calls of the script that concern the step in progress."""

    def __init__(
        self,
        pulse: Pulse,
        reading: Reading,
        losses: Losses,
        probes: Probes,
        hidden: Hidden,
        forwards: Forwards,
        parameters: Parameters,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._parameters = parameters
        self._pulse, self._losses, self._probes, self._optimizers = pulse, losses, probes, optimizers
        self._reading, self._hidden, self._forwards = reading, hidden, forwards

    def backward_begins(self, roots: Any) -> None:
        if capturing():
            return
        in_step = self._pulse.phase == "step"
        self._losses.begins(roots, in_step)
        early = self._losses.step <= AT_ONCE or not torch.cuda.is_initialized()
        if in_step and early and self._losses.targets and self._reading.in_order(self._forwards.calls):
            self._losses.check_labels(self._reading.labels)

    def backward_ended(self) -> None:
        if capturing():
            return
        self._probes.backward_ended()
        in_step = self._pulse.phase == "step"
        self._parameters.backward_ended(in_step)
        if in_step and not self._losses.uses_scaler:
            groups = self._optimizers[0].param_groups
            self._hidden.backward_ended(self._losses.step, (p for group in groups for p in group["params"]))

    def clipped(self, parameters: Any, limit: float) -> None:
        held = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        if any(id(parameter) in held for parameter in parameters):
            self._losses.clipped(limit)

    def scales(self, scaler: Any) -> None:
        if self._pulse.phase == "step":
            self._losses.scaler = scaler

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        if optimizer in self._optimizers:
            self._losses.unscales(scaler)

    def reduced(self, tensor: Any, outputs: Any) -> None:
        if self._pulse.phase == "step" and not self._pulse.backward:
            self._losses.reduced(tensor, outputs)

    def aims(self, target: Any) -> None:
        if self._losses.step <= _WATCHED and len(self._losses.targets) < _MOST_TARGETS:
            self._losses.targets.append(target)

    def replaces(self, tensor: Any) -> None:
        if self._pulse.phase == "step" and not self._losses.uses_scaler and not capturing():
            self._hidden.replaced(tensor)

    def reads(self, loader: Any, iterator: Any) -> None:
        self._reading.reads(loader, iterator)

    def drew(self, iterator: Any, indices: Any) -> None:
        self._reading.drew(iterator, indices)

    def got(self, iterator: Any, batch: Any) -> None:
        self._reading.got(iterator, batch)
