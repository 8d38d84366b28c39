"""Passes what the taps on torch observe on to the monitors of one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from drumline.guards.checks.settings import loss_settings
from drumline.guards.script.comparison import Comparison, Monitors
from drumline.guards.script.nonfinite import IMMEDIATE_STEPS, HiddenNaN
from drumline.guards.script.parameters import Parameters
from drumline.guards.script.probes import capturing
from drumline.guards.script.taps import Listener

_LABEL_STEPS = 12
"""Steps in which labels are compared."""
_MOST_TARGETS = 8


class ScriptListener(Listener):
    """The calls of the script that concern the step in progress."""

    def __init__(
        self,
        monitors: Monitors,
        hidden: HiddenNaN,
        parameters: Parameters,
        optimizers: Sequence[Optimizer],
        comparison: Comparison,
    ) -> None:
        self._comparison = comparison
        sizes = [parameter.numel() for parameter in comparison.model.parameters()]
        self._whole = sum(sizes)
        self._sizes = {*sizes, self._whole} - {0, 1}
        self._hang, self._loaders, self._losses = monitors.hang, monitors.loaders, monitors.losses
        self._probes, self._forwards = monitors.probes, monitors.forwards
        self._hidden, self._parameters, self._optimizers = hidden, parameters, optimizers

    @property
    def _in_step(self) -> bool:
        """After a forward pass of the model and before the update."""
        return self._hang.phase == "step"

    def backward_begins(self, roots: Any) -> None:
        if capturing():
            return
        in_step, losses = self._in_step, self._losses
        if in_step and self._probes.cleared():
            for one in (losses, self._hidden, self._forwards):
                one.restart()
        losses.backward_begins(roots, in_step)
        early = losses.step <= IMMEDIATE_STEPS or not torch.cuda.is_initialized()
        if in_step and early and losses.targets and self._loaders.in_order(self._forwards.calls):
            losses.check_labels(self._loaders.labels)

    def backward_ended(self) -> None:
        if capturing():
            return
        in_step = self._in_step
        self._probes.backward_ended(self._first_held())
        self._parameters.backward_ended(in_step)
        if in_step and not self._losses.uses_scaler:
            self._hidden.backward_ended(self._losses.step, self._first_held())

    def _first_held(self) -> Iterator[torch.Tensor]:
        return (p for group in self._optimizers[0].param_groups for p in group["params"])

    def clips(self, parameters: Any, limit: float) -> None:
        held = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        if any(id(parameter) in held for parameter in parameters):
            self._losses.clipped(limit)

    def scales(self, scaler: Any) -> None:
        if self._in_step:
            self._losses.scaler = scaler

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        if optimizer in self._optimizers:
            self._losses.unscaled(scaler)

    def detaches(self, tensor: Any, outputs: Any) -> None:
        if self._in_step and not self._hang.backward:
            self._losses.detached(tensor, outputs)

    def reduces(self, tensor: Any) -> None:
        # Each parameter by itself, or all in one flat copy. The size rules out most other tensors.
        comparison = self._comparison
        if self._hang.phase != "between" or comparison.exchanged or tensor.numel() not in self._sizes:
            return
        comparison.exchanged = tensor.numel() == self._whole or any(
            tensor.data_ptr() == parameter.data_ptr() for parameter in comparison.model.parameters()
        )

    def computes_loss(self, target: Any, settings: dict[str, Any]) -> None:
        losses = self._losses
        if losses.step <= _LABEL_STEPS and len(losses.targets) < _MOST_TARGETS:
            losses.targets.append(target)
            if losses.step <= IMMEDIATE_STEPS and not capturing():
                losses.settings.add(loss_settings(settings))

    def replaces_nan(self, tensor: Any) -> None:
        if self._in_step and not self._losses.uses_scaler and not capturing():
            self._hidden.replaced(tensor)

    def reads(self, loader: Any, iterator: Any) -> None:
        self._loaders.reads(loader, iterator)

    def draws(self, iterator: Any, indices: Any) -> None:
        self._loaders.draws(iterator, indices)

    def receives(self, iterator: Any, batch: Any) -> None:
        self._loaders.receives(iterator, batch)
