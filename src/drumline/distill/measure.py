"""A teacher's score before the first step, by which a run is judged and wrong weights are found out.

Promises: counted like any evaluation, each sample once, whichever processes the teacher speaks in.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from drumline.config.recipe import Recipe
from drumline.core.progress import progress
from drumline.data.feed.sampler import evaluation_starts
from drumline.distill.load import Loaded
from drumline.distill.teacher import Teacher
from drumline.parallel.strategy import Strategy
from drumline.train.evaluate import Score
from drumline.train.score import score_module
from drumline.train.sets import Sets


def measured(
    teacher: Teacher, predictions: Tensor, sets: Sets, recipe: Recipe, strategy: Strategy, speaks: bool
) -> Score:
    """The teacher's score on the evaluation set; `predictions` takes its first guesses."""
    grid, peers = strategy.grid, strategy.grid.peers
    mine = evaluation_starts(samples=len(sets.eval), batch=sets.eval_batch, rank=peers.rank, world=peers.size)
    bar = (
        partial(progress, text="measuring the teacher", total=len(mine)) if grid.world.is_rank_zero else iter
    )
    return score_module(
        _Voice(teacher, speaks),
        sets,
        recipe,
        grid,
        through=bar,
        record=predictions,
        autocast=strategy.autocast,
    )


def score_words(teachers: list[Loaded], score: Score, labels: NDArray[np.int64]) -> str:
    names = " + ".join(f"{each.name} ({each.weights})" for each in teachers)
    words = f"teacher {names}: top-1 {score.accuracy:.2%} ({score.top1:,} of {score.samples:,})"
    commonest = np.bincount(labels).max() / len(labels)
    if score.nonfinite or score.accuracy < commonest + 0.1 * (1 - commonest):
        words += (
            ". WARNING: hardly better than chance; are these its weights, and the classes, image size and "
            "normalisation (data.size, data.mean, data.std) that it was trained with?"
        )
    return words


class _Voice(nn.Module):
    """A teacher as evaluation wants it; holds no module, so nothing can put the teacher into training mode. Speaks
    where a pipeline ends: the other places of a replica go through the same samples."""

    def __init__(self, teacher: Teacher, speaks: bool) -> None:
        super().__init__()
        self.hear, self.speaks = teacher.hear, speaks

    def forward(self, images: Tensor) -> Tensor | None:
        said = self.hear([tuple(images.shape)], lambda number: images) if self.speaks else []
        return said[0].logits if said else None
