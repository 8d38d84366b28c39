"""The values that `auto` stands for in the training fields of a recipe: batch, length, learning rate and warm-up.

They depend on the number of training samples, on the optimizer, and on whether the run starts from trained weights.
They do not depend on the machine or the number of processes, so a recipe means the same training everywhere. What a
network learns depends on the number of optimizer steps: 500 photographs in batches of 128 are 3 steps per epoch, and
ten epochs of that teach it nothing. A small set therefore gets smaller batches and more epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from drumline.config.fields import value_of, with_values
from drumline.config.recipe import Recipe
from drumline.config.toml import short_literal
from drumline.core.errors import UserError

STEPS_PER_EPOCH = 20
"""The target of `auto` for a small set."""
SMALLEST_BATCH, LARGEST_BATCH = 16, 128
"""The limits of `auto`. BatchNorm is noisy with smaller batches, and only the user knows whether larger ones fit."""
REFERENCE_BATCH = 256
RATES = {"sgd": 0.2, "adamw": 1e-3, "lars": 2.0, "lamb": 4e-3}
"""Peak rates for the reference batch, from scratch."""
LINEAR = ("sgd", "lars")
"""Optimizers whose rate is proportional to the batch. For the others, it is proportional to the square root."""
FINE_TUNING = 1 / 3
"""Factor of the rate for a run that starts from trained weights. A tenth was worse, even from weak weights."""
WARMUP = 0.05
"""Fraction of the epochs."""


def choose_defaults(recipe: Recipe, samples: int) -> tuple[Recipe, str]:
    """The recipe with a number for each `auto` of the fields above, and a line that lists them; empty if there are
    none."""
    chosen = []
    for name, choose in CHOICES.items():
        if value_of(recipe, name) == "auto":
            value = choose(recipe, samples)
            recipe = with_values(recipe, {name: value})
            if name != "train.epochs" or not recipe.train.steps:
                chosen.append(f"{name}={short_literal(value)}")
    if not chosen:
        return recipe, ""
    start = f"starting from {recipe.model.weights}" if recipe.model.weights else "from scratch"
    return recipe, f"chosen for {samples:,} training samples, {start}: {' '.join(chosen)}"


def _batch(recipe: Recipe, samples: int) -> int:
    """A power of two, near a batch that gives the wanted number of steps per epoch."""
    wanted = 2 ** round(math.log2(max(1, samples / STEPS_PER_EPOCH)))
    batch = min(max(wanted, SMALLEST_BATCH), LARGEST_BATCH)
    while batch > max(recipe.data.mixing_unit, samples // 2):
        batch //= 2
    return batch


def _epochs(recipe: Recipe, samples: int) -> float:
    steps, least, most = (600, 10, 40) if recipe.model.weights else (1200, 30, 80)
    per_epoch = max(1, samples // recipe.data.batch)
    return float(min(max(round(steps / per_epoch), least), most))


def _rate(recipe: Recipe, samples: int) -> float:
    """The rate for the batch, to two digits; for the reference batch if the recipe scales the rate itself."""
    optim, batch = recipe.optim, recipe.data.batch
    if optim.name not in RATES:
        raise UserError(
            f"optim.lr = auto: there is no default rate for your own optimizer, optim.name = {optim.name}",
            "give a learning rate, such as optim.lr=0.001",
        )
    ratio = (batch if optim.lr_scaling == "none" else optim.reference_batch) / REFERENCE_BATCH
    rate = RATES[optim.name] * (ratio if optim.name in LINEAR else math.sqrt(ratio))
    return float(f"{rate * (FINE_TUNING if recipe.model.weights else 1):.2g}")


def _warmup(recipe: Recipe, samples: int) -> float:
    epochs = recipe.train.epochs
    if recipe.train.steps:
        epochs = recipe.train.steps / max(1, samples // recipe.data.batch)
    return float(f"{WARMUP * epochs:.2g}")


CHOICES: dict[str, Callable[[Recipe, int], Any]] = {
    "data.batch": _batch,
    "train.epochs": _epochs,
    "optim.lr": _rate,
    "optim.warmup_epochs": _warmup,
}
"""In the order in which one depends on another."""
