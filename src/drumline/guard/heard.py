"""What the taps on torch hear, passed on to the guards of one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from drumline.guard.delayed import Hidden
from drumline.guard.hang import Pulse
from drumline.guard.losses import Losses
from drumline.guard.probes import Probes
from drumline.guard.reading import Reading
from drumline.guard.taps import Listener


class Heard(Listener):
    """Calls of the script that concern the step in progress."""

    def __init__(
        self,
        pulse: Pulse,
        reading: Reading,
        losses: Losses,
        probes: Probes,
        hidden: Hidden,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._pulse, self._losses, self._probes, self._optimizers = pulse, losses, probes, optimizers
        self._reading, self._hidden = reading, hidden

    def backward_begins(self, roots: Any) -> None:
        self._losses.begins(roots, self._reading.labels, self._pulse.phase == "step")

    def backward_ended(self) -> None:
        self._probes.backward_ended()
        if self._pulse.phase == "step" and not self._losses.uses_scaler:
            groups = self._optimizers[0].param_groups
            self._hidden.backward_ended(self._losses.step, (p for group in groups for p in group["params"]))

    def clipped(self, parameters: Any, limit: float) -> None:
        held = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        if any(id(parameter) in held for parameter in parameters):
            self._losses.clipped(limit)

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        if optimizer in self._optimizers:
            self._losses.unscales(scaler)

    def reduced(self, tensor: Any, outputs: Any) -> None:
        if self._pulse.phase == "step" and not self._pulse.backward:
            self._losses.reduced(tensor, outputs)

    def reads(self, loader: Any, iterator: Any) -> None:
        self._reading.reads(loader, iterator)

    def drew(self, iterator: Any, indices: Any) -> None:
        self._reading.drew(iterator, indices)

    def got(self, iterator: Any, batch: Any) -> None:
        self._reading.got(iterator, batch)
