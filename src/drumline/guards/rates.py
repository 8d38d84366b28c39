"""The learning rate against its schedule: past its end, stuck at zero, never moved, moved too early.

Promises: reads numbers that the scheduler holds, once per step; a warm-up from zero, a frozen group, a schedule that
ends at zero and a phase at zero that a LambdaLR leaves again are not reported. Everything else may be meant (a cosine
as a cycle, a scheduler for later), so it only warns.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from drumline.guards.finding import Finding

_LONG_ENOUGH = 8
"""Steps of a run that should have trained something."""


class Rates:
    """Follows one optimizer's rates, and the scheduler where one was given."""

    def __init__(self, optimizer: Optimizer, scheduler: Any, steps_per_epoch: int | None) -> None:
        self.optimizer, self.scheduler, self.steps_per_epoch = optimizer, scheduler, steps_per_epoch
        self.begun_at = self._count()
        self.moved = self.found = False
        self.lived = self.known = False
        self.dead_since: int | None = None
        self.at_forward: int | None = None
        self.early = 0

    def forward(self) -> None:
        """A forward begins: where the schedule stands now."""
        self.at_forward = self._count()

    def look(self, step: int) -> Finding | None:
        """What is wrong just before the optimizer steps."""
        self.moved = self.moved or self._count() != self.begun_at
        return self._past_end(step) or self._dead(step) or self._too_early(step) or self._never(step)

    def follow(self, scheduler: Any) -> None:
        """A scheduler that was found, not handed over."""
        self.scheduler, self.found = scheduler, True
        self.begun_at = self.at_forward = self._count()

    def at_close(self, steps: int, passes: int) -> Finding | None:
        """Training is over: was the schedule followed at all? One that was found may belong to a run that was meant
        to be longer than a part of an epoch."""
        if self.known and not self.lived and steps >= _LONG_ENOUGH:
            return Finding(
                "schedule",
                f"the learning rate was 0 in all {steps} steps: nothing was trained",
                where="every param group of the optimizer",
                since="step 1",
                fix="look at the schedule's function: an integer division, or a warm-up longer than the training",
            )
        if self.found and passes < 2 and (passes or steps < 20):
            return None
        if self.scheduler is None or steps < 2 or self.moved or self._count() != self.begun_at:
            return None
        return self._unmoved(steps)

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
            fix="set T_max to the number of scheduler.step() calls of the whole training (epochs, or steps if it is "
            "stepped after each batch)",
        )

    def _dead(self, step: int) -> Finding | None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if any(isinstance(rate, Tensor) and rate.is_cuda for rate in rates):
            return None  # to look would wait for the device, in every step
        self.known = True
        alive = any(rate != 0.0 for rate in self._rates())
        self.lived = self.lived or alive
        if alive or not self.lived:
            self.dead_since = None
            return None
        self.dead_since = self.dead_since or step
        if step == self.dead_since or self._lives_again():
            return None
        return Finding(
            "schedule",
            "the learning rate is 0 and training goes on: nothing changes any more",
            where="every param group of the optimizer",
            since=f"step {self.dead_since}",
            fix="make the schedule as long as the training: it ended before the steps did",
        )

    def _lives_again(self) -> bool:
        """Whether the schedule's own function says that the rate rises later."""
        if not isinstance(self.scheduler, LambdaLR):
            return False
        later = [
            self.scheduler.last_epoch + ahead for ahead in (*range(1, 65), *(2**n for n in range(7, 17)))
        ]
        try:
            return any(scale(at) for scale in self.scheduler.lr_lambdas for at in later)
        except (IndexError, KeyError, ValueError):  # a table that ends
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

    def _never(self, step: int) -> Finding | None:
        if self.scheduler is None or self.moved or not self.steps_per_epoch:
            return None
        # Two epochs, since schedules may step once per epoch, after it.
        return self._unmoved(step) if step > 2 * self.steps_per_epoch else None

    def _unmoved(self, steps: int) -> Finding:
        return Finding(
            "schedule",
            f"the scheduler was never stepped in {steps} steps: the rate is still {max(self._rates()):.3g}",
            where=type(self.scheduler).__name__,
            since="step 1",
            fix="call scheduler.step() after each epoch (or step, if it was made for steps)",
        )
