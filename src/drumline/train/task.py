"""What a run is about: the module to train, the objective it is trained by, and what comes along with them.

Promises: the loop takes any task. `classification` is the plain one; distillation brings another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.data.classes import Classes
from drumline.data.feed.loader import Batches
from drumline.data.feed.sampler import Request
from drumline.observe.display import Display
from drumline.parallel.grid import Grid
from drumline.parallel.pipeline.pipelined import Ahead
from drumline.parallel.strict.lockstep import Together
from drumline.train import prepare, spread
from drumline.train.objective import Classification, Objective
from drumline.train.prepare_model import prepare_model

Feed = Callable[[Batches, Iterable[Request]], Batches]
"""Adds to this rank's batches what the objective wants beside them."""


def unchanged(batches: Batches, requests: Iterable[Request]) -> Batches:
    """The batches as they are."""
    return batches


def as_given(module: nn.Module, output: Any, *others: Any) -> Any:
    """The output as it is."""
    return output


@dataclass(frozen=True)
class Cut:
    """How a task's module is computed in stages."""

    name: str = ""
    """The part of it that is cut: all of it, or a module in it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What its forward is called with beside the images."""
    after: Callable[..., Any] = as_given
    """What a module like the task's makes of that part's output, and of what else it is called with. Runs with the
    last stage."""
    reads_images: bool = False
    """Whether the objective reads the images too."""
    ahead: Ahead | None = None
    """What is done with a step's micro-batches before the stages see them, in every process."""

    def root(self, module: nn.Module) -> nn.Module:
        """The part that is cut, of a module like the task's."""
        return module.get_submodule(self.name) if self.name else module


@dataclass(frozen=True)
class Task:
    """Built before the run's first step, by every rank alike."""

    module: nn.Module
    """All that is trained."""
    model: nn.Module
    """What is evaluated and exported: `module`, or a part of it."""
    objective: Objective
    cut: Cut = Cut()
    words: tuple[str, ...] = ()
    """What to say of it."""
    teacher_predictions: torch.Tensor | None = None
    """The class that the teacher predicts for each evaluation sample, to count agreement."""
    teacher_top1: float | None = None
    """The teacher's accuracy."""
    evaluates: bool = True
    """Whether the model's score means anything."""
    feed: Feed = unchanged
    together: Together | None = None
    """In strict mode, the shards that the task's parts meet in."""


Builder = Callable[[Recipe, prepare.Sets, prepare.Plan, Grid, Display], Task]


def classification(
    recipe: Recipe, sets: prepare.Sets, plan: prepare.Plan, grid: Grid, display: Display
) -> Task:
    """The recipe's model on the data's labels."""
    classes, world = Classes.of(sets.train), grid.world
    module, words = prepare_model(recipe, classes, world)
    together = spread.prepare_shards(recipe, world)
    module = spread.span_norms(module, recipe, world, together)
    objective = Classification(recipe.train.label_smoothing, len(classes))
    return Task(module, module, objective, words=words, together=together)
