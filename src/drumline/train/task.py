"""What a run is about: the module to train, the objective it is trained by, and what comes along with them.

Promises: the loop takes any task. `classification` is the plain one; distillation brings another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from drumline.data.loader import Batches
from drumline.data.order import Request
from drumline.launch.world import World
from drumline.observe.display import Display
from drumline.parallel.together import Together
from drumline.recipe import Recipe
from drumline.train import prepare, spread
from drumline.train.objective import Classification, Objective

Feed = Callable[[Batches, Iterable[Request]], Batches]
"""Adds to this rank's batches what the objective wants beside them."""


def unchanged(batches: Batches, requests: Iterable[Request]) -> Batches:
    """The batches as they are."""
    return batches


@dataclass(frozen=True)
class Task:
    """Built before the run's first step, by every rank alike."""

    module: nn.Module
    """All that is trained."""
    model: nn.Module
    """What is evaluated and exported: `module`, or a part of it."""
    objective: Objective
    words: tuple[str, ...] = ()
    """What to say of it."""
    rival: torch.Tensor | None = None
    """Another model's first guess by evaluation sample, to count agreement with."""
    rival_top1: float | None = None
    """The other model's score."""
    evaluates: bool = True
    """Whether the model's score means anything."""
    feed: Feed = unchanged
    together: Together | None = None
    """In strict mode, the shards that the task's parts meet in."""


Builder = Callable[[Recipe, prepare.Sets, prepare.Plan, World, Display], Task]


def classification(
    recipe: Recipe, sets: prepare.Sets, plan: prepare.Plan, world: World, display: Display
) -> Task:
    """The recipe's model on the data's labels."""
    classes = len(sets.train.classes)
    module, word = prepare.prepare_model(recipe, classes, world)
    together = spread.prepare_shards(recipe, world)
    module = spread.span_norms(module, recipe, world, together)
    objective = Classification(recipe.train.label_smoothing, classes)
    return Task(module, module, objective, (word,), together=together)
