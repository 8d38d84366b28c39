"""What a step minimises. The step knows only this interface, so distillation is another objective, not
another loop.

Promises: losses are computed in fp32 per sample and summed, so that weighting by the global batch is exact
for uneven shares; mixing happens on the device from the plan the loader made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch


class Outcome(NamedTuple):
    """Sums over the samples of a micro-batch, on the device."""

    loss: torch.Tensor
    correct: torch.Tensor
    terms: torch.Tensor | None = None
    """One sum for each of the objective's `terms`."""


class Objective:
    """Runs the model on normalised images and scores it. It owns what it keeps from step to step; the step restores
    that after a rehearsal, and the loop saves it."""

    terms: tuple[str, ...] = ()
    """Names of further sums that it reports, such as the parts of its loss."""
    meets: bool = False
    """Whether scoring a batch waits for other processes."""

    def __call__(self, model: nn.Module, images: torch.Tensor, batch: Batch) -> Outcome:
        raise NotImplementedError

    def at(self, step: int) -> None:
        """Called before each step with its number. Never waits for the device."""

    def check(self) -> None:
        """Raises an error if something it owns, such as a teacher, has changed. Called after the first step and each
        epoch."""

    def live(self) -> list[torch.Tensor]:
        """The tensors of its own that a step writes."""
        return []

    def collect(self) -> dict[str, torch.Tensor]:
        """Its state for a checkpoint, on the host, the same on any number of processes. All processes call it."""
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores what `collect` returned. Rank 0's state counts; all processes call it."""


class Classification(Objective):
    """Cross-entropy with label smoothing, on mixed or plain images."""

    def __init__(self, label_smoothing: float = 0.0, classes: int = 1) -> None:
        self.label_smoothing, self.classes = label_smoothing, classes

    def __call__(self, model: nn.Module, images: torch.Tensor, batch: Batch) -> Outcome:
        logits = model(images)
        check_logits(logits, self.classes)
        return self.outcome(logits.float(), batch)

    def outcome(self, logits: torch.Tensor, batch: Batch) -> Outcome:
        """The score of fp32 logits."""
        losses = self.losses(logits, batch.labels)
        if batch.mix.shape[1]:
            share = batch.mix[:, 1]
            losses = share * losses + (1 - share) * self.losses(logits, partner(batch.labels))
        with torch.no_grad():
            correct = (logits.argmax(dim=1) == batch.labels).sum()
        return Outcome(losses.sum(), correct)

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One loss per sample."""
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.label_smoothing)


def check_logits(logits: object, classes: int) -> None:
    """Refuses a model that does not give one tensor with a logit for each class."""
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
