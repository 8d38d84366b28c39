"""The learning rate as a pure function of the step.

Promises: depends on (recipe, global batch, steps) only, so a resumed run takes the same rate at every step.
Asking beyond the end of the run is our own mistake and asserts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from drumline.config.recipe import Optim


@dataclass(frozen=True)
class Schedule:
    """Peak rate, shape and landmarks, all in steps."""

    peak: float
    shape: str
    total: int
    warmup: int
    milestones: tuple[int, ...]
    gamma: float
    final: float

    def __call__(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0."""
        assert 0 <= step < self.total, (step, self.total)
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        if self.shape == "cosine":
            done = (step - self.warmup) / max(1, self.total - self.warmup)
            return self.peak * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done)))
        if self.shape == "step":
            return self.peak * self.gamma ** sum(step >= milestone for milestone in self.milestones)
        return self.peak


def build_schedule(optim: Optim, batch: int, total: int, per_epoch: int) -> Schedule:
    """The schedule of a recipe for a run of `total` steps."""
    milestones = optim.milestones or (total / per_epoch / 2, total / per_epoch * 3 / 4)
    return Schedule(
        peak=scaled_rate(optim, batch),
        shape=optim.schedule,
        total=total,
        warmup=round(optim.warmup_epochs * per_epoch),
        milestones=tuple(round(milestone * per_epoch) for milestone in milestones),
        gamma=optim.gamma,
        final=optim.final_lr,
    )


def scaled_rate(optim: Optim, batch: int) -> float:
    """The peak rate for this global batch."""
    ratio = batch / optim.reference_batch
    return optim.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optim.lr_scaling]
