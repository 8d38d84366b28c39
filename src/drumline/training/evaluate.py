"""Scores a model on every sample of a set, exactly once, on any number of processes.

Promises: batches are fixed by the set alone and dealt whole to the ranks, so each sample is computed in the
same company whatever the world; counts are integers, losses are summed in fixed point, so totals do not depend
on the order of addition; the count is checked against the source and a mismatch stops the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from drumline.core import arithmetic
from drumline.core.errors import UserError
from drumline.core.heartbeat import Phase, enter
from drumline.data.feed.batch import Batch
from drumline.parallel.world import World
from drumline.training.step import Normalise

_FIXED_POINT = 2**24
LARGEST_SUM = 2.0**38
"""Of the losses of a set: as fixed-point numbers they then add up within 64 bits, in any order."""


@dataclass(frozen=True)
class Score:
    """Integer counts over the whole set, and the mean cross-entropy."""

    samples: int
    top1: int
    top5: int
    loss: float
    """NaN when an output was not finite, or a sample's loss above `LARGEST_SUM` / samples: no mean is made up."""
    nonfinite: int = 0
    """Samples for which the model gave NaN or infinity."""
    agreed: int | None = None
    """Samples whose first guess is the teacher's, where there is one."""

    @property
    def accuracy(self) -> float:
        return self.top1 / self.samples

    @property
    def accuracy5(self) -> float:
        return self.top5 / self.samples

    @property
    def agreement(self) -> float | None:
        """Fraction of the samples whose first guess is the teacher's."""
        return None if self.agreed is None else self.agreed / self.samples


class Tally(NamedTuple):
    """Counts over samples: scalar int64 tensors, or their totals."""

    samples: Any
    top1: Any
    """Correct at the first guess."""
    top5: Any
    """Correct within five."""
    loss: Any
    """Sum in fixed point."""
    nonfinite: Any
    """Samples with NaN or infinity in their logits."""
    unsummed: Any
    """Losses left out of the sum: too large, or not finite."""
    agreed: Any
    """Samples whose first guess is the teacher's."""


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterator[Batch],
    samples: int,
    batch_size: int,
    normalise: Normalise,
    world: World,
    autocast: torch.dtype | None,
    watch: Callable[[int], None] = lambda done: None,
    teacher_predictions: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
    readers: int = 1,
    outputs: torch.Tensor | None = None,
) -> Score:
    """Runs `model` in eval mode over this rank's batches and sums over the world; where it returns None, another rank
    has the output. `teacher_predictions` holds the teacher's class by sample id, to count agreement; `record` takes
    this model's, for this rank's samples. `readers` go through the set at the same time. `outputs` maps each label to
    the model's output, where its classes are numbered differently from the data's."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(len(Tally._fields), dtype=torch.int64, device=world.device)
    most = LARGEST_SUM / samples
    done = 0
    enter(Phase.STARTING)
    for batch in batches:
        images = normalise(padded(batch.images, batch_size))
        with arithmetic.autocast(world.device, autocast):
            output = model(images)
        if output is not None:
            logits = output[: len(batch.labels)].float()
            labels = batch.labels if outputs is None else outputs[batch.labels]
            theirs = None if teacher_predictions is None else teacher_predictions[batch.samples]
            totals += torch.stack(tally(logits, labels, most, theirs))
            if record is not None:
                record[batch.samples] = logits.argmax(dim=1)
        done += len(batch.labels)
        watch(min(samples, done * readers))
        enter(Phase.EVALUATING)
    model.train(was_training)
    total = Tally(*world.all_reduce(totals).tolist())
    if total.samples != samples:
        raise UserError(
            f"guard [evaluation]: {total.samples:,} samples were scored, the evaluation set has {samples:,}: some "
            f"were {'left out' if total.samples < samples else 'counted twice'}, and the score would "
            "not be the model's",
            "give every process the same evaluation set, and let its source give each sample exactly once",
        )
    mean = math.nan if total.nonfinite or total.unsummed else total.loss / _FIXED_POINT / samples
    return Score(
        samples=total.samples,
        top1=total.top1,
        top5=total.top5,
        loss=mean,
        nonfinite=total.nonfinite,
        agreed=None if teacher_predictions is None else total.agreed,
    )


def tally(
    logits: torch.Tensor,
    labels: torch.Tensor,
    most: float = LARGEST_SUM,
    teacher: torch.Tensor | None = None,
) -> Tally:
    """Counts one batch. Losses above `most` are left out of the sum; `teacher` holds the teacher's first guesses.

    A label's rank is the number of classes before it; of equal logits the lower class comes first. A row that
    contains a NaN has no rank for its label, so a broken model is never right."""
    own = logits.gather(1, labels[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > own) | ((logits == own) & (classes < labels[:, None]))
    rank = before.sum(dim=1).masked_fill(logits.isnan().any(dim=1), 5)
    losses = F.cross_entropy(logits, labels, reduction="none").double()
    summed = losses <= most  # false for NaN
    none = torch.zeros((), dtype=torch.int64, device=logits.device)
    return Tally(
        samples=torch.full((), len(labels), device=logits.device),
        top1=(rank < 1).sum(),
        top5=(rank < 5).sum(),
        loss=losses.where(summed, 0).mul(_FIXED_POINT).round().long().sum(),
        nonfinite=(~logits.isfinite().all(dim=1)).sum(),
        unsummed=(~summed).sum(),
        agreed=none if teacher is None else (logits.argmax(dim=1) == teacher).sum(),
    )


def padded(images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """A last, smaller batch filled up with black images (not counted), so that every batch has one shape."""
    missing = batch_size - len(images)
    return images if missing == 0 else F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing))
