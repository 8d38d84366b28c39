"""The schedule of a run: its length in steps, the learning rate of each, and when it evaluates and saves.

Promises: depends only on the recipe and the size of the training set, so a resumed run has the same rate at every
step, and evaluates and saves after the same steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from drumline.config.learning import Optim
from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.data.feed.sampler import steps_per_epoch


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the step: peak, shape, and turning points in steps."""

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


class Due(NamedTuple):
    """What follows a step."""

    evaluation: bool
    save: bool
    log: bool
    epoch_end: bool


@dataclass(frozen=True)
class Plan:
    """How long a run is, and when it evaluates, saves and logs, all in steps. 0: only at the end."""

    total: int
    per_epoch: int
    schedule: Schedule
    evaluate_every: int
    save_every: tuple[int, int]
    """From `checkpoint.every_epochs` and `checkpoint.every_steps`."""
    log_every: int
    unfreeze: int = 0
    """The step after which the frozen modules start to train. 0: never."""

    def due(self, done: int, evaluates: bool = True) -> Due:
        """What follows after `done` steps. `evaluates`: whether the run evaluates at all."""
        end = done == self.total
        evaluation = evaluates and (end or _is_multiple(done, self.evaluate_every))
        save = end or done == self.unfreeze or any(_is_multiple(done, steps) for steps in self.save_every)
        epoch_end = done % self.per_epoch == 0
        # A line at each save, so that the log of a resumed run equals that of an uninterrupted one.
        log = done % self.log_every == 0 or evaluation or save or epoch_end
        return Due(evaluation, save, log, epoch_end)


def make_plan(recipe: Recipe, samples: int) -> Plan:
    """The plan of a run on this number of training samples. Rejects a batch that is larger than the set."""
    batch = recipe.data.batch
    per_epoch = steps_per_epoch(samples, batch)
    if per_epoch == 0:
        raise UserError(
            f"data.batch = {batch}: the training set has only {samples} samples",
            f"give --data.batch {samples} or less",
        )
    total = recipe.train.steps or max(1, round(recipe.train.epochs * per_epoch))
    unfreeze = _steps(recipe.train.unfreeze_epoch, per_epoch)
    return Plan(
        total=total,
        per_epoch=per_epoch,
        schedule=build_schedule(recipe.optim, batch, total, per_epoch),
        evaluate_every=_steps(recipe.train.eval_every, per_epoch),
        save_every=(_steps(recipe.checkpoint.every_epochs, per_epoch), recipe.checkpoint.every_steps),
        log_every=recipe.train.log_every,
        unfreeze=unfreeze if unfreeze < total else 0,
    )


def _is_multiple(done: int, steps: int) -> bool:
    return steps > 0 and done % steps == 0


def _steps(epochs: float, per_epoch: int) -> int:
    """0 stays 0; anything above is at least one step, however short the epoch."""
    return max(1, round(epochs * per_epoch)) if epochs else 0
