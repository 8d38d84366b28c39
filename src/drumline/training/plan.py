"""The length of a run in steps, and when it evaluates and saves."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.data.feed.sampler import steps_per_epoch
from drumline.training.schedule import Schedule, build_schedule


@dataclass(frozen=True)
class Plan:
    """How long a run is, in steps."""

    total: int
    per_epoch: int
    schedule: Schedule
    eval_steps: int
    save_steps: int

    def evaluates_after(self, step: int) -> bool:
        """`step` counts finished steps."""
        return step == self.total or (self.eval_steps > 0 and step % self.eval_steps == 0)

    def saves_after(self, step: int, every_steps: int) -> bool:
        return (
            step == self.total
            or (self.save_steps > 0 and step % self.save_steps == 0)
            or (every_steps > 0 and step % every_steps == 0)
        )


def make_plan(recipe: Recipe, samples: int) -> Plan:
    """Counts the steps of a run on so many training samples. Refuses a batch larger than the set."""
    batch = recipe.data.batch
    per_epoch = steps_per_epoch(samples, batch)
    if per_epoch == 0:
        raise UserError(
            f"data.batch = {batch}: the training set has only {samples} samples",
            f"give --data.batch {samples} or less",
        )
    total = recipe.train.steps or max(1, round(recipe.train.epochs * per_epoch))
    return Plan(
        total=total,
        per_epoch=per_epoch,
        schedule=build_schedule(recipe.optim, batch, total, per_epoch),
        eval_steps=_steps(recipe.train.eval_every, per_epoch),
        save_steps=_steps(recipe.checkpoint.every_epochs, per_epoch),
    )


def _steps(epochs: float, per_epoch: int) -> int:
    """0 stays 0; anything above is at least one step, however short the epoch."""
    return max(1, round(epochs * per_epoch)) if epochs else 0
