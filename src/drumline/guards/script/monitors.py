"""The monitors of one model on this rank, and the events of the loop that each of them follows.

Promises: nothing is observed while a CUDA graph is captured. A warning of a monitor is reported once, before the step
that follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drumline.guards.checks.model import Modes
from drumline.guards.checks.schedule import Rates, Seeds
from drumline.guards.checks.setup import home, loss_settings
from drumline.guards.finding import LoopState
from drumline.guards.script.discovery import Discovery
from drumline.guards.script.forwards import Forwards, inner_of
from drumline.guards.script.frozen import FrozenMonitor
from drumline.guards.script.hang import HangMonitor
from drumline.guards.script.loaders import Loaders, length_of
from drumline.guards.script.losses import Losses
from drumline.guards.script.nonfinite import IMMEDIATE_STEPS, HiddenNaN
from drumline.guards.script.parameters import Parameters, Probes, capturing, held_by
from drumline.guards.script.peers import Peers, Reporter
from drumline.guards.script.taps import Listener

FIRST_STEPS = 3
_LABEL_STEPS = 12
"""Steps in which labels are compared."""
_MOST_TARGETS = 8


class Monitors(Listener):
    """The monitors of one model. `taps.py` and `watch.py` call the events."""

    def __init__(
        self,
        model: nn.Module,
        teachers: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        scheduler: Any,
        loader: Any,
        peers: Peers,
        reporter: Reporter,
        hang: HangMonitor,
    ) -> None:
        self.model, self.teachers, self.optimizers = inner_of(model), teachers, optimizers
        self.hang = hang
        self._peers, self._reporter = peers, reporter
        self.ids: list[int] = []
        """The sample ids of the step's batch, if the script gives them."""
        self.steps = [0] * len(optimizers)
        self.exchanged = False
        """The script has exchanged weights itself."""
        self._used = False
        """An optimizer has stepped on the batch."""
        self.forwards = Forwards(
            model, self.model, peers.size > 1, self._forward_begins, hang.passed, hang.backward_begins
        )
        self.modes = Modes(self.model, teachers)
        self.loaders, self.probes = Loaders(), Probes(len(optimizers))
        self.losses = Losses(self.probes)
        self.discovery = Discovery(self.model, model, teachers, optimizers)
        self.parameters = Parameters(self.model, optimizers, self.forwards, self.discovery)
        self.frozen = FrozenMonitor(self.model, self.discovery)
        self.rates = Rates(optimizers[0], scheduler, length_of(loader))
        self._hidden, self._seeds = HiddenNaN(), Seeds()
        sizes = [parameter.numel() for parameter in self.model.parameters()]
        self._whole = sum(sizes)
        self._sizes = {*sizes, self._whole} - {0, 1}

    def gives_ids(self, ids: Iterable[int]) -> None:
        """The script names samples of the next batch."""
        if self._used:
            self._begin_step()
        self.ids.extend(ids)

    def check_step(self, step: int) -> None:
        """Before a step of the first optimizer: the checks that need no device."""
        if step == 1:
            self.discovery.search()
            if self.rates.scheduler is None and len(self.discovery.schedulers) == 1:
                self.rates.follow(self.discovery.schedulers[0])
        # A fused optimizer unscales by itself, with values that the loss scaler hands it.
        self.losses.uses_scaler |= any(hasattr(one, "found_inf") for one in self.optimizers)
        self.losses.before_step(self.hang.passes)
        for finding in (
            self.rates.check(step),
            self._seeds.check(step),
            self.modes.frozen_norms(step),
            self.loaders.check(step),
            *self.losses.findings,
            self.modes.check(step),
            self.discovery.in_train_mode(step) if step in (2, 3) else None,
        ):
            self._reporter.report(finding)
        self.losses.findings.clear()

    def check_gradients(self, number: int, step: int, loop: LoopState | None) -> None:
        """Before a step of an optimizer whose gradients are finite, or scaled. `loop` is given if ranks compare."""
        optimizer = self.optimizers[number]
        held = held_by(optimizer)
        if number == 0 and not is_scaled(optimizer) and not self.losses.uses_scaler:
            self._reporter.report(self._hidden.check(step, self.forwards.calls, held))
        found = self.probes.before_step(number, optimizer, step, self.forwards.has_gradient)
        reached = self.parameters.reached(number, held, step)
        if loop is not None:
            trained = self.discovery.trained_teacher(step)
            found += [trained] if trained is not None else []
            found += self.parameters.unknown(optimizer, loop, step)
        for finding in (*found, reached):
            self._reporter.report(finding)

    def state(self, step: int) -> LoopState:
        """The loop as the checks of both loops see it. Other devices are looked for in the first steps only."""
        device = home(self.model.parameters())
        tensors: dict[str, torch.Tensor] = {}
        if step in (1, FIRST_STEPS) and self._peers.size > 1:
            for number, teacher in enumerate(self.teachers):
                label = "teacher" if len(self.teachers) == 1 else f"teacher {number}"
                tensors |= {f"{label} parameter '{name}'": p for name, p in teacher.named_parameters()}
            buffers = self.model.named_buffers()
            tensors |= {f"buffer '{name}'": b for name, b in buffers if b.device.type != "cpu"}
        parameters = dict(self.model.named_parameters())
        elsewhere = [p for p in parameters.values() if id(p) in self.discovery.held_elsewhere]
        held = [p for one in self.optimizers for p in held_by(one)]
        held += [*self.discovery.teacher_parameters.values(), *elsewhere]
        return LoopState(self._peers.rank, device, parameters, held, tensors, f"step {step}", False, True)

    def stepped(self, number: int) -> None:
        """An optimizer has stepped."""
        self.steps[number] += 1
        if number == 0:
            self.frozen.after_step()
            self.hang.stepped(self.steps[0])
            self.losses.stepped()
            self.loaders.stepped()
        self.hang.phase = "between"
        self.hang.move()
        self._used = True
        if len(self.optimizers) == 1:
            self._begin_step()
        if self.steps[number] == FIRST_STEPS:
            self.forwards.unwatch_parts()

    def check_last(self, complete: bool) -> None:
        """After the last step. `complete`: neither the loop nor a guard has ended it early."""
        self._reporter.report(self.rates.at_close(self.steps[0], self.loaders.passes))
        for finding in (*self.parameters.at_close(self.steps), *self.frozen.at_close()) if complete else ():
            self._reporter.report(finding)

    def close(self) -> None:
        """Removes all hooks."""
        self.forwards.close()
        self.probes.close()
        self.discovery.close()

    def _begin_step(self) -> None:
        """A new step begins: at once with one optimizer, which frees the batch; otherwise with the next forward pass,
        because several optimizers may use one backward."""
        self._used = False
        self.forwards.stepped()
        self.ids.clear()

    def _forward_begins(self) -> None:
        """A forward pass of the model begins."""
        self.hang.move()
        trains = torch.is_grad_enabled()
        self.loaders.forward(trains)
        self._reporter.report(self.modes.forward(trains, self.steps[0]))
        if trains:
            if self._used:
                self._begin_step()
            self._seeds.forward(self.steps[0])
            self.hang.phase, self.hang.backward = "step", False
            self.rates.forward()

    @property
    def _in_step(self) -> bool:
        """After a forward pass of the model and before the update."""
        return self.hang.phase == "step"

    def backward_begins(self, roots: Any) -> None:
        """`torch.autograd.backward` is called on these tensors."""
        if capturing():
            return
        in_step, losses = self._in_step, self.losses
        if in_step and self.probes.cleared():
            for one in (losses, self._hidden, self.forwards):
                one.restart()
        losses.backward_begins(roots, in_step)
        early = losses.step <= IMMEDIATE_STEPS or not torch.cuda.is_initialized()
        if in_step and early and losses.targets and self.loaders.in_order(self.forwards.calls):
            losses.check_labels(self.loaders.labels)

    def backward_ends(self) -> None:
        """All gradients of that call are complete."""
        if capturing():
            return
        held = held_by(self.optimizers[0])
        self.probes.backward_ended(held)
        self.parameters.backward_ended(self._in_step)
        if self._in_step and not self.losses.uses_scaler:
            self._hidden.backward_ended(self.losses.step, held)

    def clips(self, parameters: Sequence[Any], limit: float) -> None:
        """Gradients are about to be clipped."""
        held = {id(p) for one in self.optimizers for p in held_by(one)}
        if any(id(parameter) in held for parameter in parameters):
            self.losses.clipped(limit)

    def scales(self, scaler: Any) -> None:
        """An enabled GradScaler scales a loss."""
        if self._in_step:
            self.losses.scaler = scaler

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        """An enabled GradScaler is about to unscale an optimizer's gradients."""
        if optimizer in self.optimizers:
            self.losses.unscaled(scaler)

    def detaches(self, tensor: torch.Tensor, outputs: Any) -> None:
        """A collective without gradients was called on a tensor that has one."""
        if self._in_step and not self.hang.backward:
            self.losses.detached(tensor, outputs)

    def reduces(self, tensor: torch.Tensor) -> None:
        """`all_reduce` was called on this tensor."""
        # Each parameter by itself, or all in one flat copy. The size rules out most other tensors.
        if self.hang.phase != "between" or self.exchanged or tensor.numel() not in self._sizes:
            return
        self.exchanged = tensor.numel() == self._whole or any(
            tensor.data_ptr() == parameter.data_ptr() for parameter in self.model.parameters()
        )

    def opens(self, loader: Any) -> None:
        """A pass over a loader is about to begin."""
        self.loaders.reads(loader, None)

    def opened(self, loader: Any, iterator: Any) -> None:
        """It has begun."""
        self.loaders.reads(loader, iterator)

    def draws(self, iterator: Any, indices: Any) -> None:
        """An iterator drew the indices of a next batch."""
        self.loaders.draws(iterator, indices)

    def receives(self, iterator: Any, batch: Any) -> None:
        """The loop received a batch."""
        self.loaders.receives(iterator, batch)

    def computes_loss(self, target: Any, settings: dict[str, Any]) -> None:
        """`cross_entropy` is called with this target, and with these further arguments."""
        losses = self.losses
        if losses.step <= _LABEL_STEPS and len(losses.targets) < _MOST_TARGETS:
            losses.targets.append(target)
            if losses.step <= IMMEDIATE_STEPS and not capturing():
                losses.settings.add(loss_settings(settings))

    def replaces_nan(self, tensor: torch.Tensor) -> None:
        """`nan_to_num` is called on a tensor that has a gradient."""
        if self._in_step and not self.losses.uses_scaler and not capturing():
            self._hidden.replaced(tensor)


def is_scaled(optimizer: Optimizer) -> bool:
    """Whether the loss scaler calls a fused optimizer, which it does even for a step that it will skip."""
    return getattr(optimizer, "found_inf", None) is not None
