"""Checks of what must change from step to step: the learning rate's schedule, and the state of the random generator.

Promises: reads numbers that the scheduler holds, and in the first steps the state of the CPU generator. A warm-up
from zero, a frozen group, a schedule that ends at zero, a phase at zero that a LambdaLR leaves again, and a loop that
draws no random numbers are not reported. Anything else may be intended (a cosine as a cycle, a scheduler for later),
so it only warns.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from drumline.guards.finding import Finding

_LEAST_STEPS = 8
"""A run with fewer steps than this may end within its warm-up from 0."""
_LEAST_STEPS_FOUND = 20
"""A scheduler that was found, not passed, must have been stepped by now in a loop without a DataLoader."""
_SEED_STEPS = 8
"""The first steps, in which the random generator is watched."""
_SEED_REPEATS = 3
"""Steps in a row with the same generator states that are reported."""


class Rates:
    """Follows the learning rates of one optimizer, and its scheduler if there is one."""

    def __init__(self, optimizer: Optimizer, scheduler: Any, steps_per_epoch: int | None) -> None:
        self.optimizer, self.scheduler, self.steps_per_epoch = optimizer, scheduler, steps_per_epoch
        self.started_at = self._count()
        self.stepped = self.found = False
        self.was_nonzero = self.known = False
        self.zero_since: int | None = None
        self.at_forward: int | None = None
        self.early = 0

    def forward(self) -> None:
        """A forward pass begins: notes the schedule's position."""
        self.at_forward = self._count()

    def check(self, step: int) -> Finding | None:
        """Just before the optimizer steps."""
        self.stepped = self.stepped or self._count() != self.started_at
        return self._past_end(step) or self._zero(step) or self._too_early(step) or self._never_stepped(step)

    def follow(self, scheduler: Any) -> None:
        """Follows a scheduler that was found, not passed by the script."""
        self.scheduler, self.found = scheduler, True
        self.started_at = self.at_forward = self._count()

    def at_close(self, steps: int, passes: int) -> Finding | None:
        """After training: the schedule was never stepped. One that was found may belong to a run that ended early,
        within its first epoch."""
        if self.known and not self.was_nonzero and steps >= _LEAST_STEPS:
            return Finding(
                "schedule",
                f"the learning rate was 0 in all {steps} steps: nothing was trained",
                where="every param group of the optimizer",
                since="step 1",
                fix="check the schedule's function: an integer division, or a warm-up longer than the training",
            )
        if self.found and passes < 2 and (passes or steps < _LEAST_STEPS_FOUND):
            return None
        if self.scheduler is None or steps < 2 or self.stepped or self._count() != self.started_at:
            return None
        return self._unstepped(steps)

    def _count(self) -> int | None:
        return None if self.scheduler is None else int(self.scheduler.last_epoch)

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _past_end(self, step: int) -> Finding | None:
        if (
            not isinstance(self.scheduler, CosineAnnealingLR)
            or self.scheduler.last_epoch <= self.scheduler.T_max
        ):
            return None
        rate = max(self._rates())
        return Finding(
            "schedule",
            f"the cosine schedule is past its end: it was made for T_max={self.scheduler.T_max}, has been stepped "
            f"{self.scheduler.last_epoch} times, and the rate rises again ({rate:.3g})",
            since=f"step {step}",
            fix="set T_max to the number of scheduler.step() calls in the whole training (epochs, or steps if it is "
            "stepped after each batch)",
        )

    def _zero(self, step: int) -> Finding | None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if any(isinstance(rate, torch.Tensor) and rate.is_cuda for rate in rates):
            return None  # reading it would wait for the device in every step
        self.known = True
        nonzero = any(rate != 0.0 for rate in self._rates())
        self.was_nonzero = self.was_nonzero or nonzero
        if nonzero or not self.was_nonzero:
            self.zero_since = None
            return None
        self.zero_since = self.zero_since or step
        if step == self.zero_since or self._rises_again():
            return None
        return Finding(
            "schedule",
            "the learning rate is 0 and training continues: nothing changes any more",
            where="every param group of the optimizer",
            since=f"step {self.zero_since}",
            fix="make the schedule as long as the training: it ended before the steps did",
        )

    def _rises_again(self) -> bool:
        """Whether the schedule's own function gives a rate above 0 later."""
        if not isinstance(self.scheduler, LambdaLR):
            return False
        ahead = (*range(1, 65), *(2**n for n in range(7, 17)))
        later = [self.scheduler.last_epoch + steps for steps in ahead]
        try:
            return any(scale(at) for scale in self.scheduler.lr_lambdas for at in later)
        except (IndexError, KeyError, ValueError):  # a table of limited length
            return False

    def _too_early(self, step: int) -> Finding | None:
        now = self._count()
        self.early = self.early + 1 if self.at_forward is not None and now != self.at_forward else 0
        if self.early < 2:
            return None
        return Finding(
            "schedule",
            "scheduler.step() is called before optimizer.step(): the first rate is never used",
            since=f"step {step - 1}",
            fix="call scheduler.step() after optimizer.step()",
        )

    def _never_stepped(self, step: int) -> Finding | None:
        if self.scheduler is None or self.stepped or not self.steps_per_epoch:
            return None
        # Two epochs: a schedule may be stepped once per epoch, after it.
        return self._unstepped(step) if step > 2 * self.steps_per_epoch else None

    def _unstepped(self, steps: int) -> Finding:
        return Finding(
            "schedule",
            f"the scheduler was never stepped in {steps} steps: the rate is still {max(self._rates()):.3g}",
            where=type(self.scheduler).__name__,
            since="step 1",
            fix="call scheduler.step() after each epoch (or step, if it was made for steps)",
        )


class Seeds:
    """The states of the CPU generator at the first forward pass of a step and before its update."""

    def __init__(self) -> None:
        self._at_forward: str | None = None
        self._last: tuple[str, str] | None = None
        self._same = 0

    def forward(self, steps: int) -> None:
        """A forward pass begins."""
        if steps < _SEED_STEPS and self._at_forward is None:
            self._at_forward = _state()

    def check(self, step: int) -> Finding | None:
        """Just before the optimizer steps."""
        before, self._at_forward = self._at_forward, None
        if step > _SEED_STEPS or before is None:
            return None
        now = (before, _state())
        drawn = now[0] != now[1]
        self._same = self._same + 1 if drawn and now == self._last else 0
        self._last = now
        if self._same != _SEED_REPEATS - 1:
            return None
        return Finding(
            "seed",
            "the random generator is in the same state in every step: dropout and augmentation repeat",
            "torch.manual_seed in the loop",
            f"step {step - _SEED_REPEATS + 1}",
            "seed once, before the loop",
        )


def _state() -> str:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest()
