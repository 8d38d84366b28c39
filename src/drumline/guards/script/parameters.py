"""Which parameters a script trains, and with which gradients: missing, never zeroed, all zero, or used twice.

Promises: gradients and parameters are read, never written. Values are read of two small tensors of each optimizer, in
the first steps only (on a GPU in the first three, when the guard waits anyway); otherwise only which gradients exist.
Certain are a parameter that strict DDP requires and that has no gradient, a layer that was replaced after the
optimizer was created, and gradients that are never zeroed or all zero. The rest (heads trained in turn, layers
unfrozen later, optimizers created later) may be intended and only warns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drumline.core.errors import UserError
from drumline.guards.checks.model import (
    never_stepped,
    not_in_model,
    not_in_optimizer,
    unconnected,
    without_gradient,
)
from drumline.guards.finding import Finding, LoopState
from drumline.guards.script.discovery import Discovery
from drumline.guards.script.forwards import Forwards

UNREACHED_STEPS = 20
"""Steps without a gradient after which a parameter is reported."""
_SHORT_RUN = 8
"""A run that ends before `UNREACHED_STEPS` reports parameters without a gradient if it has this many steps."""
_UNCONNECTED_STEPS = 3
"""Steps in which no parameter has a gradient."""
_NEVER_STEPPED = 4
"""Backward passes that reach the parameters of an optimizer before it is reported as never stepped."""
_MOST_CALLS = 256
"""Maximum number of backward calls that are examined before any optimizer has stepped."""
_WATCHED_STEPS = 8
_WATCHED_STEPS_ON_GPU = 3
_STRIKES = 2
"""Steps with a mistake before it is reported."""
_PROBES = 2
_LARGEST = 1 << 16
_SAMPLE = 16


def capturing() -> bool:
    """Whether a CUDA graph is being captured, during which nothing may be read or kept."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Parameters:
    """The parameters of one model and of its optimizers."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], forwards: Forwards, discovery: Discovery
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._forwards, self._discovery = forwards, discovery
        self._unreached: list[dict[str, torch.Tensor]] | None = None
        """For each optimizer, the parameters that no backward has reached yet."""
        self._reached: list[torch.Tensor | None] = [None] * len(optimizers)
        """For each optimizer, a parameter that has had a gradient."""
        self._arrivals = [0] * len(optimizers)
        """Backward passes that reached an optimizer before its first step."""
        self._steps = [0] * len(optimizers)
        self._backwards = self._calls = 0

    def backward_ended(self, in_step: bool) -> None:
        """Gradients are complete. A gradient that the script removes before the step counts too."""
        self._backwards += in_step
        self._calls += 1
        if max(self._steps) > UNREACHED_STEPS or (self._calls > _MOST_CALLS and not any(self._steps)):
            return
        for number, steps in enumerate(self._steps):
            self._unreached_of(number)
            one = self._reached[number]
            if not steps and one is not None and one.grad is not None:
                self._arrivals[number] += 1

    def reached(self, number: int, held: Sequence[torch.Tensor], step: int) -> Finding | None:
        """Before one of the first steps of an optimizer: parameters that backward has never reached."""
        self._steps[number] = step
        if step > UNREACHED_STEPS:
            return None
        left = list(self._unreached_of(number))
        if not left:
            return None
        if all(one is None for one in self._reached):
            return self._unconnected(number, step)
        if all(parameter.grad is None for parameter in held):
            return None  # gradients that are missing everywhere were removed: `Probes` reports it
        wrapper = self._forwards.wrapper
        strict = wrapper is not None and not wrapper.find_unused_parameters and not wrapper.static_graph
        through = self._forwards.wrapped_calls and self._forwards.synced and self._forwards.direct is None
        if strict and len(self._optimizers) == 1 and through and step == 1:
            return without_gradient(left, 1, certain=True)
        return without_gradient(left, UNREACHED_STEPS) if step == UNREACHED_STEPS else None

    def at_close(self, done: Sequence[int]) -> list[Finding]:
        """After the last step: an optimizer that never stepped, and parameters without gradient in a short run."""
        found = []
        for number, steps in enumerate(done):
            if not steps and self._arrivals[number] >= _NEVER_STEPPED:
                kind = type(self._optimizers[number]).__name__
                found.append(never_stepped(number, kind, self._arrivals[number]))
            left = list(self._unreached[number]) if self._unreached is not None else []
            if left and self._reached[number] is not None and _SHORT_RUN <= steps < UNREACHED_STEPS:
                found.append(without_gradient(left, steps))
        return found

    def _unreached_of(self, number: int) -> dict[str, torch.Tensor]:
        """The parameters of an optimizer that have had no gradient so far."""
        if self._unreached is None:
            names = {id(p): name for name, p in self._model.named_parameters()}
            self._unreached = [
                {names[id(p)]: p for p in held_by(one) if id(p) in names and p.requires_grad}
                for one in self._optimizers
            ]
        unreached = self._unreached[number]
        for name in [name for name, p in unreached.items() if p.grad is not None]:
            self._reached[number] = unreached.pop(name)
        return unreached

    def _unconnected(self, number: int, step: int) -> Finding | None:
        """Backward was called in each of the first steps, and has reached no parameter at all."""
        if step != _UNCONNECTED_STEPS or number or self._backwards < step:
            return None
        if any(p.grad is not None for p in self._model.parameters()):
            return None  # the optimizer holds other tensors: `unknown` reports it
        return unconnected(step, certain=not self._discovery.others_train())

    def unknown(self, optimizer: Optimizer, loop: LoopState, step: int) -> list[Finding]:
        """At a comparison: tensors in the optimizer that are in no model."""
        of_teachers = self._discovery.teacher_parameters.values()
        known = {id(p) for p in (*loop.parameters.values(), *of_teachers)}
        forgotten = not_in_optimizer(loop) is not None
        held = {id(p) for one in self._optimizers for p in held_by(one)}
        missing = {tuple(p.shape) for p in loop.parameters.values() if p.requires_grad and id(p) not in held}
        found = []
        for number, group in enumerate(optimizer.param_groups):
            unknown = {
                f"param_groups[{number}]['params'][{index}]": p
                for index, p in enumerate(group["params"])
                if id(p) not in known and p.grad is None
            }
            # Alone they may belong to a loss and be used later. Next to a parameter that no optimizer holds, they are
            # what it replaced.
            if unknown and (forgotten or step == UNREACHED_STEPS):
                replaced = forgotten and all(tuple(p.shape) in missing for p in unknown.values())
                found.append(not_in_model("parameters", unknown, f"step {step}", replaced))
        return found


class _Probe:
    """One parameter of an optimizer."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.last: torch.Tensor | None = None
        """The gradient of the last step."""
        self.after_backward: torch.Tensor | None = None
        self.fired = 0
        self.kept = False
        """The first backward since the last step added to that step's gradient."""
        self.reset = False
        self.handle: RemovableHandle = parameter.register_hook(self._fire)

    def _fire(self, added: torch.Tensor) -> None:
        """Just before backward adds to `.grad`."""
        if capturing():
            return
        gradient = self.parameter.grad
        if _is_zero(gradient):
            self.reset = True
        elif self.fired == 0 and self.last is not None and gradient is not None:
            self.kept = torch.equal(gradient.detach(), self.last)
        self.fired += 1

    def before_step(self) -> tuple[bool, bool] | None:
        """Whether the gradient was not zeroed since the last step, and whether no backward has changed it; None
        before the second step or without a gradient."""
        gradient = self.parameter.grad
        state = None
        if self.last is not None and gradient is not None and not gradient.is_sparse:
            stale = self.fired == 0 and torch.equal(gradient.detach(), self.last) and bool(self.last.any())
            state = (self.fired > 0 and self.kept and not self.reset, stale)
        self.last = None if gradient is None or gradient.is_sparse else gradient.detach().clone()
        self.fired, self.kept, self.reset = 0, False, False
        return state


class Probes:
    """The probes of all optimizers of a loop."""

    def __init__(self, count: int) -> None:
        self._probes: list[list[_Probe]] = [[] for _ in range(count)]
        self._strikes: list[dict[str, int]] = [{} for _ in range(count)]
        self._ended = False
        self._reached: torch.Tensor | None = None
        """A parameter that has had a gradient, for checks that need no values."""

    def before_step(
        self, number: int, optimizer: Optimizer, step: int, has_gradient: Callable[[], bool]
    ) -> list[Finding]:
        """Just before a step. `has_gradient`: whether a gradient that is not zero has reached the model's output
        since the last step."""
        if step > _WATCHED_STEPS + 1:
            return []
        held = held_by(optimizer)
        on_gpu = any(parameter.is_cuda for parameter in held)
        last = _WATCHED_STEPS_ON_GPU if on_gpu else _WATCHED_STEPS
        if step > last:
            self.close(number)
            return []
        gradients = [p.grad for p in held if p.grad is not None]
        empty = not any(g.is_sparse or bool(g.detach().any()) for g in gradients)
        zero = empty and len(self._probes) == 1 and has_gradient()
        if step == 1:
            self._choose(number, held)
        states = [state for probe in self._probes[number] if (state := probe.before_step()) is not None]
        found = []
        for name, struck in (
            ("zero-gradients", zero),
            ("zero-grad", bool(states) and all(one[0] for one in states)),
            ("stale-gradients", bool(states) and all(one[1] for one in states)),
        ):
            strikes = self._strikes[number]
            # A loop that steps twice for each backward is stale at every second step.
            begun = strikes.get(name, 0) if struck or name == "stale-gradients" else 0
            strikes[name] = begun + struck
            if struck and strikes[name] == _STRIKES:
                found.append(_finding(name, step))
        if step == last:
            self._ended = True
            for probe in self._probes[number]:
                probe.handle.remove()  # the next backward is not watched, so nothing waits for a GPU any more
        elif not self._probes[number]:
            self._choose(number, held)
        return found

    def cleared(self) -> bool:
        """Whether gradients were cleared after the last backward, as far as that is known without waiting."""
        probes = self._all()
        if not probes or self._ended:
            return self._reached is not None and self._reached.grad is None
        return all(_is_zero(probe.parameter.grad) for probe in probes)

    def backward_ended(self, held: Iterable[torch.Tensor]) -> None:
        """Gradients are complete."""
        if self._reached is None:
            self._reached = next((parameter for parameter in held if parameter.grad is not None), None)
        for probe in self._all():
            gradient = probe.parameter.grad
            if gradient is not None and not gradient.is_sparse:
                probe.after_backward = gradient.detach().clone()

    def sample(self) -> tuple[list[float], list[float]] | None:
        """Some values of a gradient after the last backward, and now."""
        for probe in self._all():
            now, before = probe.parameter.grad, probe.after_backward
            if now is not None and before is not None and now.shape == before.shape and bool(before.any()):
                return before.flatten()[:_SAMPLE].tolist(), now.detach().flatten()[:_SAMPLE].tolist()
        return None

    def divided_by(self, count: float) -> bool:
        """Whether the gradients were divided after the last backward. True if that is not known yet."""
        for probe in self._all():
            now, before = probe.parameter.grad, probe.after_backward
            if now is not None and before is not None and bool(before.any()) and now.shape == before.shape:
                return torch.allclose(now.detach() * count, before, rtol=1e-3, atol=0.0)
        return True

    def close(self, number: int | None = None) -> None:
        """Stops watching one optimizer, or all."""
        for index, probes in enumerate(self._probes):
            if number is None or index == number:
                for probe in probes:
                    probe.handle.remove()
                probes.clear()

    def _all(self) -> list[_Probe]:
        return [probe for probes in self._probes for probe in probes]

    def _choose(self, number: int, held: list[Any]) -> None:
        """Small parameters that have a gradient of their own."""
        suitable = [
            p
            for p in held
            if p.requires_grad and p.grad is not None and not p.grad.is_sparse and 1 < p.numel() <= _LARGEST
        ]
        suitable.sort(key=lambda parameter: int(parameter.numel()))
        self._probes[number] = [_Probe(parameter) for parameter in suitable[:_PROBES]]
        for probe in self._probes[number]:
            probe.before_step()


def _is_zero(gradient: torch.Tensor | None) -> bool:
    return gradient is None or gradient.is_sparse or not bool(gradient.detach().any())


_FINDINGS = {
    "zero-gradients": (
        "the loss has a gradient, but every gradient is zero or missing when the optimizer steps",
        "call zero_grad() before backward() or after step(), not between them; check what clears .grad, and for fp16 "
        "without a GradScaler",
        True,
    ),
    "zero-grad": (
        "gradients are not zeroed between steps: each step uses the sum of all gradients so far",
        "call optimizer.zero_grad() before each backward(), or after each step() when accumulating",
        True,
    ),
    "stale-gradients": (
        "the optimizer steps again with the gradients of its last step: no backward in between",
        "call step() once for each backward(), and zero_grad() after it",
        False,
    ),
}
"""What is wrong, what to do, and whether it is certain."""


def _finding(guard: str, step: int) -> Finding:
    what, fix, certain = _FINDINGS[guard]
    return Finding(guard, what, "all parameters of the optimizer", f"step {step - 1}", fix, certain)


def held_by(optimizer: Optimizer) -> list[Any]:
    """The tensors that an optimizer holds."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def with_hooks(optimizer: Optimizer, caller: str) -> Optimizer:
    """The optimizer, or the one inside it that takes the steps: PostLocalSGDOptimizer has no hooks of its own."""
    inner = getattr(optimizer, "optim", None)
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    if isinstance(inner, Optimizer):
        return with_hooks(inner, caller)
    raise UserError(
        f"{caller}: {type(optimizer).__name__} never calls Optimizer.__init__, so it has no hooks",
        "pass the torch optimizer inside it",
    )
