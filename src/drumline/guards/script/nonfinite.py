"""Whether a step's gradients are finite: known before the step or, on a GPU, one step later, so that nothing waits.

Promises for the delayed check: one fused pass over the gradients and one over the parameters per step, and a copy
that is read when the next step has been queued. A finding comes one step late, with the parameters as they were
before the bad step: they are kept from each step to the next, which takes as much memory as the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from drumline.core.host_copy import HostCopy
from drumline.guards.checks.nonfinite import all_finite, dense_gradients, largest, mark_nonfinite
from drumline.guards.finding import Finding
from drumline.guards.script.forwards import Call

IMMEDIATE_STEPS = 3
"""The first steps are checked before the optimizer's update on a GPU too: most mistakes show there."""
_MOST_REPLACED = 16


@dataclass(frozen=True)
class BadStep:
    """A step with gradients that are not finite."""

    step: int
    calls: list[Call]
    ids: list[int]
    gradients_gone: bool = False
    """The gradients have been overwritten since."""


@dataclass(frozen=True)
class _Pending:
    step: int
    calls: list[Call]
    ids: list[int]
    bad: HostCopy
    """Not 0 if a gradient was not finite."""


class GradientCheck:
    """Checks the gradients of all optimizers of a model."""

    def __init__(self) -> None:
        self._delayed: dict[int, DelayedCheck] = {}

    def check(
        self, number: int, held: list[torch.Tensor], step: int, calls: Sequence[Call], ids: Sequence[int]
    ) -> Iterator[BadStep]:
        """Before a step of optimizer `number`, which holds these parameters: the bad step before it, whose update is
        undone while the caller handles it, or this one."""
        yield from self._last(number)
        if held and held[0].is_cuda and step > IMMEDIATE_STEPS:
            if number not in self._delayed:
                self._delayed[number] = DelayedCheck(held)
            self._delayed[number].check(step, calls, ids)
        elif not all_finite(dense_gradients(held)):
            yield BadStep(step, list(calls), list(ids))

    def remaining(self) -> Iterator[BadStep]:
        """After the last step."""
        for number in self._delayed:
            yield from self._last(number)

    def discard(self) -> None:
        """Drops the results that have not been read."""
        self._delayed.clear()

    def _last(self, number: int) -> Iterator[BadStep]:
        bad = self._delayed[number].result() if number in self._delayed else None
        if bad is not None:
            after = self._delayed[number].undo()
            yield bad
            # The caller did not stop: a warning changes nothing.
            self._delayed[number].write(after)


class DelayedCheck:
    """Checks the gradients of one optimizer without waiting for them."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._held = [parameter for parameter in parameters if parameter.numel()]
        self._kept = [parameter.detach().clone() for parameter in self._held]
        kinds = {(parameter.device, parameter.dtype) for parameter in self._held}
        fast = len(kinds) == 1 and self._held[0].is_floating_point()
        self._one = torch.ones((), device=self._held[0].device) if fast else None
        self._pending: _Pending | None = None

    @torch.no_grad()
    def check(self, step: int, calls: Sequence[Call], ids: Sequence[int]) -> None:
        """Just before the optimizer's update. Never waits."""
        gradients = [parameter.grad for parameter in self._held if parameter.grad is not None]
        if gradients:
            self._pending = _Pending(step, list(calls), list(ids), HostCopy(self._nonfinite(gradients)))
        torch._foreach_copy_(self._kept, self._held)

    def _nonfinite(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Not 0 if a value is not finite."""
        if self._one is not None and not any(g.is_sparse or g.requires_grad for g in gradients):
            found = torch.zeros((), device=self._one.device)
            mark_nonfinite(gradients, found, self._one)
            return found
        return (~torch.isfinite(largest(dense_gradients(self._held)))).any()

    def result(self) -> BadStep | None:
        """The step before, if its gradients were not finite. Waits for that step if the device has not finished
        it."""
        pending, self._pending = self._pending, None
        if pending is None or not bool(pending.bad.values()):
            return None
        return BadStep(pending.step, pending.calls, pending.ids, gradients_gone=True)

    @torch.no_grad()
    def undo(self) -> list[torch.Tensor]:
        """Restores the parameters from before the step that `result` returned, and returns those after it."""
        after = [parameter.detach().clone() for parameter in self._held]
        self.write(self._kept)
        return after

    @torch.no_grad()
    def write(self, values: list[torch.Tensor]) -> None:
        """Writes the parameters."""
        torch._foreach_copy_(self._held, values)


class HiddenNaN:
    """NaN in the model's output, in the gradient that reaches it, or in a tensor that the script replaces, in a step
    whose gradients are all finite."""

    def __init__(self) -> None:
        self._pending: tuple[int, HostCopy] | None = None
        self._values: list[torch.Tensor] = []
        """The largest values of the step in progress."""
        self._replaced: list[torch.Tensor] = []
        """The largest values of tensors that were replaced since the last backward."""
        self._versions = 0
        self._changed = 0

    def backward_ended(self, step: int, held: Iterable[torch.Tensor]) -> None:
        """Gradients are complete. They are checked here too if the script changes them before it steps."""
        self._values += self._replaced
        self._replaced.clear()
        if step > IMMEDIATE_STEPS and not self._changed:
            return
        gradients = dense_gradients(held)
        if gradients:
            self._values.append(largest(gradients).sum())
        self._versions = _versions(gradients)

    def replaced(self, tensor: torch.Tensor) -> None:
        """The script replaces NaN in a tensor that has a gradient."""
        self._replaced.append(torch.linalg.vector_norm(tensor.detach().float(), math.inf))
        del self._replaced[:-_MOST_REPLACED]

    def restart(self) -> None:
        """The gradients were cleared after the last backward, and its NaN with them: nothing is hidden."""
        self._values.clear()

    def check(self, step: int, calls: Sequence[Call], held: Iterable[torch.Tensor]) -> Finding | None:
        """A NaN in this step or, on a GPU, in the step before, if its result has arrived. Never waits."""
        values, self._values, self._replaced = self._values + self._replaced, [], []
        if step <= IMMEDIATE_STEPS:
            self._changed += _versions(dense_gradients(held)) != self._versions
        # A call that received no gradient is not part of the step.
        used = [call for call in calls if call.largest_gradients]
        values = [one for call in used for one in (*call.largest_outputs, *call.largest_gradients)] + values
        values = [value.float() for value in values if value.device == values[0].device]
        if not values:
            return None
        copy = HostCopy(torch.stack(values))
        if not values[0].is_cuda:
            return _hidden(step) if bool(torch.isnan(copy.values()).any()) else None
        pending, self._pending = self._pending, (step, copy)
        if pending is None or not pending[1].done:
            return None
        return _hidden(pending[0]) if bool(torch.isnan(pending[1].values()).any()) else None


def _versions(gradients: Iterable[torch.Tensor]) -> int:
    """A number that changes if a gradient is written or replaced."""
    return sum(gradient._version + id(gradient) for gradient in gradients)


def _hidden(step: int) -> Finding:
    return Finding(
        "hidden-nan",
        "NaN in the model's output or its gradient was replaced before the step",
        f"step {step}",
        f"step {step}",
        "find where the NaN arises (torch.autograd.set_detect_anomaly) and remove its cause",
    )
