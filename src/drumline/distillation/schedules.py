"""How the weight and the temperature of a method change during training.

Promises: pure functions of the step and the length of the run, so a resumed run continues with the same numbers. A
schedule reaches its end at the last step. Rejects numbers that no schedule uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from drumline.config.fields import fields_of
from drumline.config.limits import Range
from drumline.core.errors import UserError

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class TermSchedule:
    """The schedule of one method. Its fields are options of every method (`--distill.options NAME:VALUE`)."""

    warmup: Annotated[float, Range(0)] = 0.0
    """Epochs over which the weight of the method rises linearly to its full value."""
    schedule: Shape = "constant"
    """How the weight changes after the warm-up: linearly or by half a cosine, until the last step."""
    end: Annotated[float, Range(0)] = 0.0
    """Weight at the last step, as a multiple of the full weight, if `schedule` is not constant."""
    T_schedule: Shape = "constant"
    """How the temperature changes from its value (`distill.T`) at the first step until the last step."""
    T_end: Annotated[float, Range(0.001, 1e6)] = 1.0
    """Temperature at the last step, if `T_schedule` is not constant."""

    def __post_init__(self) -> None:
        for name, option in fields_of(type(self)).items():
            if wrong := option.check(value := getattr(self, name)):
                raise UserError(f"distill.options {name} = {value:g}: {wrong.what}", wrong.fix)
            shape = {"end": "schedule", "T_end": "T_schedule"}.get(name, "")
            if shape and value != option.default and getattr(self, shape) == "constant":
                raise UserError(
                    f"distill.options {name} = {value:g}: has no effect, because {shape} is constant",
                    f"also give {shape}:linear or {shape}:cosine",
                )

    def weight_factor(self, step: int, per_epoch: int, total: int) -> float:
        """The factor of the weight at a step, counted from 0, of a run of `total` steps. The warm-up rises from epoch
        to epoch, as in the code of dkd's authors."""
        rising = min(1.0, (step // per_epoch + 1) / self.warmup) if self.warmup else 1.0
        start = round(self.warmup * per_epoch)
        return rising * _between(1.0, self.end, self.schedule, step - start, total - start)

    def temperature(self, T: float, step: int, total: int) -> float:
        """The temperature at a step, counted from 0, of a run of `total` steps that starts with `T`."""
        return _between(T, self.T_end, self.T_schedule, step, total)

    def describe(self) -> str:
        """What changes, in brackets; empty if nothing does."""
        parts = [f"warm-up of {self.warmup:g} epochs"] if self.warmup else []
        parts += [f"{self.schedule} to {self.end:g} times"] if self.schedule != "constant" else []
        parts += [f"T {self.T_schedule} to {self.T_end:g}"] if self.T_schedule != "constant" else []
        return f" ({', '.join(parts)})" if parts else ""


CONSTANT = TermSchedule()
"""Full weight, and the temperature of the method, at every step."""


def _between(first: float, last: float, shape: Shape, step: int, steps: int) -> float:
    """The value at a step of a change from `first` at step 0 to `last` at step `steps` - 1."""
    if shape == "constant":
        return first
    done = min(1.0, max(0, step) / max(1, steps - 1))
    left = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return first * left + last * (1 - left)
