"""A few small parameters watched through backward and step: gradients never zeroed, all zero, or used twice.

Promises: gradients and parameters are read, never written. Hooks are on two small tensors of each optimizer, in the
first steps only. On a GPU, values are read in the first three steps only, when the guard waits anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drumline.guards.finding import Finding, Found

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
        verdict = None
        if self.last is not None and gradient is not None and not gradient.is_sparse:
            stale = self.fired == 0 and torch.equal(gradient.detach(), self.last) and bool(self.last.any())
            verdict = (self.fired > 0 and self.kept and not self.reset, stale)
        self.last = None if gradient is None or gradient.is_sparse else gradient.detach().clone()
        self.fired, self.kept, self.reset = 0, False, False
        return verdict


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
    ) -> list[Found]:
        """Just before a step. `has_gradient`: whether a gradient that is not zero has reached the model's output
        since
        the last step."""
        if step > _WATCHED_STEPS + 1:
            return []
        held = [p for group in optimizer.param_groups for p in group["params"]]
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
        verdicts = [verdict for probe in self._probes[number] if (verdict := probe.before_step()) is not None]
        found = []
        for name, struck in (
            ("zero-gradients", zero),
            ("zero-grad", bool(verdicts) and all(one[0] for one in verdicts)),
            ("stale-gradients", bool(verdicts) and all(one[1] for one in verdicts)),
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


def _finding(guard: str, step: int) -> Found:
    what, fix, certain = _FINDINGS[guard]
    return Finding(guard, what, "all parameters of the optimizer", f"step {step - 1}", fix), certain
