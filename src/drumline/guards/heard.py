"""What the taps on torch hear, passed on to the guards of one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from drumline.guards.delayed import AT_ONCE, Hidden
from drumline.guards.parameters import Parameters
from drumline.guards.probes import capturing
from drumline.guards.rounds import Rounds, Sources
from drumline.guards.setups import loss_settings
from drumline.guards.taps import Listener

_WATCHED = 12
"""Steps in which labels are compared."""
_MOST_TARGETS = 8


class Heard(Listener):
    """Calls of the script that concern the step in progress."""

    def __init__(
        self,
        sources: Sources,
        hidden: Hidden,
        parameters: Parameters,
        optimizers: Sequence[Optimizer],
        rounds: Rounds,
    ) -> None:
        self._rounds = rounds
        sizes = [parameter.numel() for parameter in rounds.model.parameters()]
        self._whole = sum(sizes)
        self._sizes = {*sizes, self._whole} - {0, 1}
        self._pulse, self._reading, self._losses = sources.pulse, sources.reading, sources.losses
        self._probes, self._forwards = sources.probes, sources.forwards
        self._hidden, self._parameters, self._optimizers = hidden, parameters, optimizers

    def backward_begins(self, roots: Any) -> None:
        if capturing():
            return
        in_step = self._pulse.phase == "step"
        if in_step and self._probes.emptied():
            for one in (self._losses, self._hidden, self._forwards):
                one.restart()
        self._losses.begins(roots, in_step)
        early = self._losses.step <= AT_ONCE or not torch.cuda.is_initialized()
        if in_step and early and self._losses.targets and self._reading.in_order(self._forwards.calls):
            self._losses.check_labels(self._reading.labels)

    def backward_ended(self) -> None:
        if capturing():
            return
        in_step = self._pulse.phase == "step"
        self._probes.backward_ended(self._first_held())
        self._parameters.backward_ended(in_step)
        if in_step and not self._losses.uses_scaler:
            self._hidden.backward_ended(self._losses.step, self._first_held())

    def _first_held(self) -> Iterator[torch.Tensor]:
        return (p for group in self._optimizers[0].param_groups for p in group["params"])

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

    def exchanges(self, tensor: Any) -> None:
        # Each parameter by itself, or all in one flat copy. The size tells at once that most tensors are neither.
        if self._pulse.phase != "between" or self._rounds.exchanged or tensor.numel() not in self._sizes:
            return
        parameters = self._rounds.model.parameters()
        self._rounds.exchanged = tensor.numel() == self._whole or any(
            tensor.data_ptr() == parameter.data_ptr() for parameter in parameters
        )

    def aims(self, target: Any, settings: dict[str, Any]) -> None:
        if self._losses.step <= _WATCHED and len(self._losses.targets) < _MOST_TARGETS:
            self._losses.targets.append(target)
            if self._losses.step <= AT_ONCE and not capturing():
                self._losses.settings.add(loss_settings(settings))

    def replaces(self, tensor: Any) -> None:
        if self._pulse.phase == "step" and not self._losses.uses_scaler and not capturing():
            self._hidden.replaced(tensor)

    def reads(self, loader: Any, iterator: Any) -> None:
        self._reading.reads(loader, iterator)

    def drew(self, iterator: Any, indices: Any) -> None:
        self._reading.drew(iterator, indices)

    def got(self, iterator: Any, batch: Any) -> None:
        self._reading.got(iterator, batch)
