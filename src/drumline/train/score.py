"""The score of a model on an evaluation set: for a run in progress, and as `drumline eval`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from drumline.data.order import evaluation_starts
from drumline.data.views import Batch
from drumline.launch.world import World
from drumline.observe.display import make_display, progress
from drumline.parallel.grid import Grid, make_grid
from drumline.parallel.pipeline.chain import Chain
from drumline.recipe import Recipe
from drumline.train import broken, prepare
from drumline.train.evaluate import Score, evaluate


@dataclass(frozen=True)
class ScoreResult:
    """What `drumline eval` found."""

    weights: str
    samples: int
    correct: int
    correct5: int
    top1: float
    top5: float
    loss: float
    broken_samples: int


def score_module(
    module: nn.Module,
    sets: prepare.Sets,
    recipe: Recipe,
    grid: Grid,
    watch: Callable[[int], None] = lambda done: None,
    through: Callable[[Iterator[Batch]], Iterator[Batch]] = lambda batches: batches,
    rival: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
) -> Score:
    """The score of a (not wrapped) module on the evaluation set, or of one that gives None but where a pipeline ends.
    `watch` is told how many samples are done; the
    batches are drawn `through` a function that may show them; `rival` and `record` are of `evaluate`."""
    world = grid.world
    with closing(
        sets.evaluation(recipe, grid.peers, blank=isinstance(module, Chain) and not grid.reads)
    ) as batches:
        return evaluate(
            module,
            through(batches),
            len(sets.eval),
            sets.eval_batch,
            prepare.normaliser(sets, recipe, world),
            world,
            prepare.precision(recipe, world),
            watch,
            rival,
            record,
            grid.replicas,
        )


def score(recipe: Recipe, world: World) -> ScoreResult:
    """Evaluates the recipe's weights; every rank gets the same result."""
    display = make_display(world.rank)
    prepare.set_arithmetic(recipe.run.deterministic)
    torch.set_num_threads(prepare.threads_per_process(recipe.parallel.threads, world.local_size))
    sets = prepare.prepare_sets(recipe, world)
    module, word = prepare.prepare_model(recipe, len(sets.train.classes), world, strict_head=True)
    display.note(word)
    mine = evaluation_starts(samples=len(sets.eval), batch=sets.eval_batch, rank=world.rank, world=world.size)
    bar = partial(progress, text="evaluating", total=len(mine)) if world.first else iter
    found = score_module(module, sets, recipe, make_grid(world), through=bar)
    broken.agree(sets.bad, world)
    for told in broken.words(sets.bad, listed=False):
        display.note(told)
    display.result(
        f"top-1 {found.accuracy:.2%} ({found.top1:,} of {found.samples:,}), top-5 {found.accuracy5:.2%}, "
        f"loss {found.loss:.4f}"
    )
    display.end()
    return ScoreResult(
        weights=recipe.model.weights,
        samples=found.samples,
        correct=found.top1,
        correct5=found.top5,
        top1=found.accuracy,
        top5=found.accuracy5,
        loss=found.loss,
        broken_samples=len(sets.bad[1].bad),
    )
