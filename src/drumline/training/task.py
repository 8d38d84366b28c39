"""What a run trains: a module, the objective that it minimises, and what belongs to them.

Promises: the loop runs any task. `classification` is the plain one; distillation brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.data.classes import Classes
from drumline.data.feed.loader import Batches
from drumline.data.feed.sampler import Request
from drumline.observe.display import Display
from drumline.parallel.strategy import Cut, Strategy
from drumline.training.model import initial_model
from drumline.training.objective import Classification, Objective
from drumline.training.plan import Plan
from drumline.training.sets import Sets

Feed = Callable[[Batches, Iterable[Request]], Batches]
"""Adds to this process's batches what the objective reads besides them."""


def unchanged(batches: Batches, requests: Iterable[Request]) -> Batches:
    """Adds nothing."""
    return batches


@dataclass(frozen=True)
class Task:
    """Built before the first step, in the same way on every rank."""

    module: nn.Module
    """Everything that is trained."""
    model: nn.Module
    """What is evaluated and exported: `module`, or a submodule of it."""
    objective: Objective
    cut: Cut = field(default_factory=Cut)
    messages: tuple[str, ...] = ()
    """What to log about it."""
    teacher_predictions: torch.Tensor | None = None
    """The class that the teacher predicts for each evaluation sample, to count agreement."""
    teacher_top1: float | None = None
    """The teacher's accuracy."""
    evaluates: bool = True
    """Whether the model's accuracy means anything."""
    feed: Feed = unchanged
    spans_devices: bool = False
    """Whether the objective computes on several GPUs in each process, as a teacher in stages does."""


Builder = Callable[[Recipe, Sets, Plan, Strategy, Display], Task]


def classification(recipe: Recipe, sets: Sets, plan: Plan, strategy: Strategy, display: Display) -> Task:
    """The recipe's model on the data's labels."""
    classes = Classes.of(sets.train)
    module, messages = initial_model(recipe, classes, strategy)
    module = strategy.sync_batchnorm(module)
    objective = Classification(recipe.train.label_smoothing, len(classes))
    return Task(module, module, objective, messages=messages)
