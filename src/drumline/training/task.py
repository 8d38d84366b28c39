"""The task of a run: a module, the objective that it minimises, and the data that the objective reads.

Promises: the step and the loop run any task; `classification` is the plain one, and distillation builds its own.
Losses are computed in fp32 per sample and summed, so that weighting by the global batch is exact for uneven slices.
Mixup and cutmix run on the device, by the plan that the loader made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.data.classes import Classes
from drumline.data.feed.batch import Batch
from drumline.data.feed.loader import Batches
from drumline.data.feed.sampler import Request
from drumline.data.sources.base import NO_LABEL, known_labels
from drumline.observe.display import Display
from drumline.parallel.strategy import Cut, Strategy
from drumline.training.losses import Loss, OwnLoss, cross_entropy, make_loss
from drumline.training.metrics import Metric
from drumline.training.model import initial_model
from drumline.training.schedule import Plan
from drumline.training.sets import Sets


class LossSums(NamedTuple):
    """Sums over the samples of a micro-batch, on the device."""

    loss: torch.Tensor
    correct: torch.Tensor
    terms: torch.Tensor | None = None
    """One sum for each of the objective's `terms`."""
    unlabelled: torch.Tensor | None = None
    """How many samples have no label; None if all have one."""


class Meter:
    """Running sums on the device. The fields are views of `sums`, one vector, so that reading them is one copy."""

    def __init__(self, terms: int, device: torch.device) -> None:
        self.sums = torch.zeros(4 + terms, dtype=torch.float64, device=device)
        self.loss, self.correct, self.samples, self.unlabelled = self.sums[:4].unbind()
        self.terms = self.sums[4:]
        """The objective's own terms."""


class Objective:
    """Runs the model on normalised images and computes the loss. The step restores the state of an objective after a
    rehearsal, and the loop saves it."""

    terms: tuple[str, ...] = ()
    """Names of further sums that it reports, such as the parts of its loss."""
    meets: bool = False
    """Whether scoring a batch waits for other processes."""
    teachers: tuple[nn.Module, ...] = ()
    """The frozen networks that it runs beside the model."""

    def __call__(self, model: nn.Module, images: torch.Tensor, batch: Batch) -> LossSums:
        raise NotImplementedError

    def at(self, step: int) -> None:
        """Called before each step with its number. Never waits for the device."""

    def check(self) -> None:
        """Raises an error if something it owns, such as a teacher, has changed. Called after the first step and each
        epoch."""

    def use_average(self, average: nn.Module | None) -> None:
        """Called once with the moving average of the model, if the recipe has one (`train.ema`)."""

    def live(self) -> list[torch.Tensor]:
        """The tensors of its own that a step writes."""
        return []

    def collect(self) -> dict[str, torch.Tensor]:
        """On rank 0, its state for a checkpoint, on the host, the same on any number of processes. All processes call
        it."""
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores what `collect` returned. Rank 0's state counts; all processes call it."""


class Classification(Objective):
    """The loss on the labels, for mixed or plain images."""

    def __init__(
        self,
        label_smoothing: float = 0.0,
        classes: int = 1,
        weights: torch.Tensor | None = None,
        loss: Loss | None = None,
        labelled: float = 1.0,
    ) -> None:
        """`weights`: one per class. A sample counts with the weight of its label, and a mixed one with those of both
        its labels. The sum is divided by the number of samples, not by their weights, so it does not depend on how
        the batch is divided. `loss` replaces cross-entropy with label smoothing. `labelled`: the fraction of the
        training samples that have a label. The loss of these is divided by it, and that of the others is 0: over an
        epoch, the mean is that over the labelled samples, however they fall into batches."""
        self.classes, self.weights, self.labelled = classes, weights, labelled
        self.loss = loss or partial(cross_entropy, smoothing=label_smoothing)

    @staticmethod
    def of(recipe: Recipe, sets: Sets) -> Classification:
        """With the recipe's loss and class weights."""
        classes, weights = len(Classes.of(sets.train)), sets.class_weights(recipe)
        return Classification(
            classes=classes,
            weights=None if weights is None else torch.from_numpy(weights).to(sets.device, torch.float32),
            loss=make_loss(recipe.train, classes, sets.device),
            labelled=len(known_labels(sets.train)) / len(sets.train),
        )

    def __call__(self, model: nn.Module, images: torch.Tensor, batch: Batch) -> LossSums:
        logits = model(images)
        check_logits(logits, self.classes)
        return self.loss_sums(logits.float(), batch)

    def loss_sums(self, logits: torch.Tensor, batch: Batch) -> LossSums:
        """The score of fp32 logits."""
        losses = self.losses(logits, batch.labels)
        if batch.mix.shape[1]:
            share = batch.mix[:, 1]
            losses = share * losses + (1 - share) * self.losses(logits, partner(batch.labels))
        with torch.no_grad():
            correct = (logits.argmax(dim=1) == batch.labels).sum()
            unlabelled = None if self.labelled == 1 else (batch.labels == NO_LABEL).sum()
        return LossSums(losses.sum(), correct, unlabelled=unlabelled)

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One loss per sample."""
        if self.labelled != 1:
            losses = self._labelled_losses(logits, labels.clamp(min=0)) / self.labelled
            return torch.where(labels == NO_LABEL, 0.0, losses)
        return self._labelled_losses(logits, labels)

    def _labelled_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = self.loss(logits, labels)
        return losses if self.weights is None else losses * self.weights[labels]

    def check(self) -> None:
        if isinstance(self.loss, OwnLoss):
            self.loss.check()


def check_logits(logits: object, classes: int) -> None:
    """Rejects a model that does not return one tensor with a logit for each class."""
    if not isinstance(logits, torch.Tensor):
        raise UserError(
            f"model.name: the model returned {type(logits).__name__} in training, not one tensor of logits",
            "use a model without auxiliary outputs, or wrap it in a factory of your own that returns the logits",
        )
    if logits.ndim != 2 or logits.shape[1] < classes:
        raise UserError(
            f"model.name: the logits have shape {tuple(logits.shape)}, the data has {classes} classes",
            "give the model one output per class (a factory is called with classes=N)",
        )


def partner(values: torch.Tensor) -> torch.Tensor:
    """Each row's neighbour in its pair (0 with 1, 2 with 3, …); a last odd row is its own."""
    count = len(values)
    slots = torch.arange(count, device=values.device)
    return values[torch.where(slots ^ 1 < count, slots ^ 1, slots)]


def mixed(images: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """NCHW images after mixup (blend) or cutmix (paste) with their partners, by the loader's plan."""
    others = partner(images)
    share, _, x0, y0, x1, y1 = (column.view(-1, 1, 1, 1) for column in mix.unbind(dim=1))
    rows = torch.arange(images.shape[2], device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(images.shape[3], device=images.device).view(1, 1, 1, -1)
    inside = (columns >= x0) & (columns < x1) & (rows >= y0) & (rows < y1)
    return torch.where(inside, others, torch.lerp(others, images, share))


ExtendBatches = Callable[[Batches, Iterable[Request]], Batches]
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
    """Lines for the log."""
    shown: tuple[str, ...] = ()
    """Lines for log.txt that the screen has shown already."""
    metrics: tuple[Metric, ...] = ()
    """Metrics of an evaluation besides those in the table of `metrics.py`."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the result of the run repeats, such as a teacher's accuracy."""
    summary: str = ""
    """The same for the closing line of the run."""
    teacher_predictions: torch.Tensor | None = None
    """The class that a teacher predicts for each evaluation sample; -1 for those that other processes score."""
    evaluates: bool = True
    """Whether the run evaluates. False where the model's accuracy has no meaning."""
    extend_batches: ExtendBatches = unchanged
    spans_devices: bool = False
    """Whether the objective computes on several GPUs in each process, as a teacher in stages does."""


Builder = Callable[[Recipe, Sets, Plan, Strategy, Display], Task]


def classification(recipe: Recipe, sets: Sets, plan: Plan, strategy: Strategy, display: Display) -> Task:
    """The recipe's model on the data's labels."""
    classes = Classes.of(sets.train)
    module, messages = initial_model(recipe, classes, strategy.world)
    module = strategy.sync_batchnorm(strategy.place(module))
    objective = Classification.of(recipe, sets)
    return Task(module, module, objective, messages=messages)
