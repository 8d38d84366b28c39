"""The teacher's score before the first step, and whether it gets images like those that it was trained on.

Promises: the score counts each evaluation sample once, like any evaluation. Rejects a teacher whose outputs are not
finite. Warns about one that is hardly better than chance, whose weights record other image settings, or that has no
such record and scores higher on images with ImageNet's normalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from drumline.config.recipe import Recipe
from drumline.core.progress import progress
from drumline.data.feed.sampler import evaluation_starts
from drumline.data.feed.transform import IMAGENET_MEAN, IMAGENET_STD
from drumline.distillation.teacher import LoadedTeacher, Teacher, nonfinite_outputs
from drumline.parallel.strategy import Strategy
from drumline.training.evaluate import score_module
from drumline.training.metrics import Metric, Outputs, Score
from drumline.training.model import model_record
from drumline.training.sets import Sets

TRIED = 4
"""Batches of each process that are also scored with ImageNet's normalisation."""


def image_warnings(recipe: Recipe, sets: Sets, teachers: Sequence[LoadedTeacher]) -> list[str]:
    """A warning for each teacher whose weights record different image settings."""
    warnings = []
    for teacher in teachers:
        different = teacher.record.other_images(model_record(recipe, sets)) if teacher.record else []
        if different:
            warnings.append(
                f"WARNING: the teacher {teacher.weights} was trained on different images: {'; '.join(different)}"
            )
    return warnings


def measure_teacher(
    teacher: Teacher,
    predictions: Tensor,
    sets: Sets,
    strategy: Strategy,
    runs_here: bool,
    try_imagenet: bool = False,
) -> tuple[Score, list[str]]:
    """The teacher's score, counted like any evaluation, and warnings; writes its predicted classes to `predictions`.
    Processes that do not run the teacher's last stage go through the same samples (`runs_here` false: without
    computing). `try_imagenet`: the first batches are also scored with ImageNet's normalisation. Rejects a teacher
    whose scores are not finite."""
    grid, peers = strategy.grid, strategy.grid.peers
    own = evaluation_starts(samples=len(sets.eval), batch=sets.eval_batch, rank=peers.rank, world=peers.size)
    bar = partial(progress, text="measuring the teacher", total=len(own)) if grid.world.is_rank_zero else iter
    differs = not (
        np.allclose(sets.mean, IMAGENET_MEAN, atol=0.02) and np.allclose(sets.std, IMAGENET_STD, atol=0.02)
    )
    module = _ForEvaluation(teacher, runs_here, _to_imagenet(sets) if try_imagenet and differs else None)
    compared = torch.zeros(3, dtype=torch.int64, device=grid.world.device)

    def record(outputs: Outputs) -> None:
        found = outputs.logits.argmax(dim=1)
        predictions[outputs.samples] = found
        if module.other is not None:
            both = (found, module.other[: len(found)].argmax(dim=1))
            compared.add_(
                torch.stack(
                    [*((each == outputs.labels).sum() for each in both), torch.ones_like(found).sum()]
                )
            )

    score = score_module(
        module,
        sets,
        strategy.recipe,
        grid,
        through=bar,
        record=record,
        precision=strategy.precision,
    )
    if score.nonfinite:
        raise nonfinite_outputs(f"{score.nonfinite:,} of {score.samples:,} evaluation images")
    ours, imagenet, samples = grid.world.all_reduce(compared).tolist()
    return score, _imagenet_warning(ours, imagenet, samples)


def _to_imagenet(sets: Sets) -> tuple[Tensor, Tensor]:
    """The factors and terms that change the normalisation of images to ImageNet's."""
    mean, std, their_mean, their_std = (
        torch.tensor(each, device=sets.device).view(1, -1, 1, 1)
        for each in (sets.mean, sets.std, IMAGENET_MEAN, IMAGENET_STD)
    )
    return std / their_std, (mean - their_mean) / their_std


def _imagenet_warning(ours: int, imagenet: int, samples: int) -> list[str]:
    """A warning if a teacher is far more accurate with ImageNet's normalisation on these samples."""
    if imagenet - ours <= 0.1 * samples:
        return []
    mean, std = (",".join(f"{value:g}" for value in each) for each in (IMAGENET_MEAN, IMAGENET_STD))
    return [
        f"WARNING: on {samples:,} images with ImageNet's normalisation, the teacher scores {imagenet / samples:.2%} "
        f"instead of {ours / samples:.2%}. If it was trained that way, set data.mean={mean} data.std={std}"
    ]


def agreement_metric(predictions: Tensor) -> Metric:
    """The metric that compares a model with the classes that the teacher predicts, by sample id."""
    return Metric(
        "agreement",
        "fraction of samples for which the model predicts the teacher's class",
        lambda outputs: outputs.logits.argmax(dim=1) == predictions[outputs.samples],
        label="agreement",
    )


def describe_score(teachers: Sequence[LoadedTeacher], score: Score, labels: NDArray[np.int64]) -> str:
    """The log line about a teacher's score, with a warning if it is close to chance."""
    names = " + ".join(f"{each.name} ({each.weights})" for each in teachers)
    line = f"teacher {names}: top-1 {score.accuracy:.2%} ({score.correct:,} of {score.samples:,})"
    majority = np.bincount(labels).max() / len(labels)
    if score.accuracy < majority + 0.1 * (1 - majority):
        line += (
            ". WARNING: hardly better than chance. Check that the weights, the classes, the image size and the "
            "normalisation (data.size, data.mean, data.std) are those that it was trained with"
        )
    return line


class _ForEvaluation(nn.Module):
    """A teacher as evaluation calls it. Not a parent module of it, so nothing can switch it to training mode."""

    def __init__(self, teacher: Teacher, runs_here: bool, change: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.outputs_of, self.runs_here = teacher.outputs_of, runs_here
        self.other: Tensor | None = None
        """Its logits on the changed images of the last batch."""
        self._change, self._left = change, TRIED

    def forward(self, images: Tensor) -> Tensor | None:
        inputs = [images]
        if self._change is not None and self._left:
            self._left -= 1
            inputs.append(images * self._change[0] + self._change[1])
        shape = tuple(images.shape)
        outputs = self.outputs_of([shape] * len(inputs), inputs.__getitem__) if self.runs_here else []
        self.other = outputs[1].logits if len(outputs) > 1 else None
        return outputs[0].logits if outputs else None
