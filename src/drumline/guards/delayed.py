"""Whether a step's gradients were finite: at once, or on a GPU one step later, so that nobody waits.

Promises, of the late way: a fused pass over the gradients and one over the parameters per step, and a copy that is
read when the next step has been queued behind it. A finding comes one step late, with the parameters as they were
before the bad step: they are kept from each step to the next, in as much memory as the parameters take, and put back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from drumline.core.host_copy import HostCopy
from drumline.guards.forwards import Call
from drumline.guards.gradients import all_finite, dense_gradients


@dataclass(frozen=True)
class Bad:
    """A step with gradients that were not finite."""

    step: int
    calls: list[Call]
    ids: list[int]
    gone: bool = False
    """The gradients themselves are not there any more."""


@dataclass(frozen=True)
class _Pending:
    step: int
    calls: list[Call]
    ids: list[int]
    bad: HostCopy
    """Not 0 if a gradient was not finite."""


AT_ONCE = 3
"""First steps that are looked at before the optimizer's step on a GPU too: most mistakes show there."""


class Finiteness:
    """The gradients of all optimizers of a model."""

    def __init__(self) -> None:
        self._delayed: dict[int, Delayed] = {}

    def look(
        self, number: int, held: list[torch.Tensor], step: int, calls: Sequence[Call], ids: Sequence[int]
    ) -> Iterator[Bad]:
        """Before a step of optimizer `number`, which holds these parameters: the bad one before it, whose update is
        taken back as long as it is looked at, or this one."""
        yield from self._of_before(number)
        if held and held[0].is_cuda and step > AT_ONCE:
            if number not in self._delayed:
                self._delayed[number] = Delayed(held)
            self._delayed[number].look(step, calls, ids)
        elif not all_finite(dense_gradients(held)):
            yield Bad(step, list(calls), list(ids))

    def left(self) -> Iterator[Bad]:
        """After the last step."""
        for number in self._delayed:
            yield from self._of_before(number)

    def forget(self) -> None:
        """Nothing is left to be told."""
        self._delayed.clear()

    def _of_before(self, number: int) -> Iterator[Bad]:
        bad = self._delayed[number].verdict() if number in self._delayed else None
        if bad is not None:
            after = self._delayed[number].put_back()
            yield bad
            # Nobody has stopped at that: a warning changes nothing.
            self._delayed[number].put(after)


class Delayed:
    """The gradients of one optimizer."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._held = [parameter for parameter in parameters if parameter.numel()]
        self._kept = [parameter.detach().clone() for parameter in self._held]
        kinds = {(parameter.device, parameter.dtype) for parameter in self._held}
        self._alike = len(kinds) == 1 and self._held[0].is_floating_point()
        self._one = torch.ones((), device=self._held[0].device) if self._alike else None
        self._pending: _Pending | None = None

    @torch.no_grad()
    def look(self, step: int, calls: Sequence[Call], ids: Sequence[int]) -> None:
        """Just before the optimizer's step. Never waits."""
        gradients = [parameter.grad for parameter in self._held if parameter.grad is not None]
        if gradients:
            self._pending = _Pending(step, list(calls), list(ids), HostCopy(self._not_finite(gradients)))
        torch._foreach_copy_(self._kept, self._held)

    def _not_finite(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Not 0 if a value is not finite. The loss scaler's kernel is by far the fastest; it multiplies by 1."""
        if self._one is not None and not any(g.is_sparse or g.requires_grad for g in gradients):
            found = torch.zeros((), device=self._one.device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, self._one)
            return found
        return (~torch.isfinite(_largest(dense_gradients(self._held)))).any()

    def verdict(self) -> Bad | None:
        """Of the step before, if its gradients were not finite; waits for that step if the device is there still."""
        pending, self._pending = self._pending, None
        if pending is None or not bool(pending.bad.values()):
            return None
        return Bad(pending.step, pending.calls, pending.ids, gone=True)

    @torch.no_grad()
    def put_back(self) -> list[torch.Tensor]:
        """The parameters become what they were before the step that `verdict` told of; gives those after it."""
        after = [parameter.detach().clone() for parameter in self._held]
        self.put(self._kept)
        return after

    @torch.no_grad()
    def put(self, values: list[torch.Tensor]) -> None:
        """Writes the parameters."""
        torch._foreach_copy_(self._held, values)


_MOST_REPLACED = 16


class Hidden:
    """NaN in the model's output, or in the gradient that reaches it, in a step whose gradients are all finite."""

    def __init__(self) -> None:
        self._pending: tuple[int, HostCopy] | None = None
        self._after: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        """What was replaced since the last backward."""
        self._versions = 0
        self._changed = 0

    def backward_ended(self, step: int, held: Iterable[torch.Tensor]) -> None:
        """Gradients are complete. Those that the script changes before it steps are looked at here too."""
        self._after += self._before
        self._before.clear()
        if step > AT_ONCE and not self._changed:
            return
        gradients = dense_gradients(held)
        if gradients:
            self._after.append(_largest(gradients).sum())
        self._versions = sum(gradient._version + id(gradient) for gradient in gradients)

    def replaced(self, tensor: torch.Tensor) -> None:
        """The script replaces NaN in a tensor that has a gradient."""
        self._before.append(torch.linalg.vector_norm(tensor.detach().float(), math.inf))
        del self._before[:-_MOST_REPLACED]

    def restart(self) -> None:
        """The gradients were cleared after the last backward, and its NaN with them: nothing hides it."""
        self._after.clear()

    def look(self, step: int, calls: Sequence[Call], held: Iterable[torch.Tensor]) -> int | None:
        """The step with a NaN: this one, or on a GPU the one before, if it is known by now. Never waits."""
        after, self._after, self._before = self._after + self._before, [], []
        if step <= AT_ONCE:
            now = sum(gradient._version + id(gradient) for gradient in dense_gradients(held))
            self._changed += now != self._versions
        # A call that received no gradient is not part of the step.
        used = [call for call in calls if call.output_gradients]
        values = [value for call in used for value in (*call.outputs, *call.output_gradients)] + after
        values = [value.float() for value in values if value.device == values[0].device]
        if not values:
            return None
        late = HostCopy(torch.stack(values))
        if not values[0].is_cuda:
            return step if bool(torch.isnan(late.values()).any()) else None
        pending, self._pending = self._pending, (step, late)
        if pending is None or not pending[1].done:
            return None
        return pending[0] if bool(torch.isnan(pending[1].values()).any()) else None


def _largest(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value of each, by one fused kernel per device and type. Unlike a sum
    of squares, it overflows only if the values do."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    if len(groups) == 1:
        return torch.stack(torch._foreach_norm(tensors, math.inf))
    found: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for places in groups.values():
        norms = torch._foreach_norm([tensors[place] for place in places], math.inf)
        for place, norm in zip(places, norms, strict=True):
            found[place] = norm.to(tensors[0].device, torch.float64)
    return torch.stack(found)
