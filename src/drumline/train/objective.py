"""What a step minimises. The step knows only this interface, so distillation is another objective, not
another loop.

Promises: losses are computed in fp32 per sample and summed, so that weighting by the global batch is exact
for uneven shares; mixing happens on the device from the plan the loader made.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from drumline.data.views import Batch
from drumline.errors import UserError


class Outcome(NamedTuple):
    """Sums over the samples of a micro-batch, on the device."""

    loss: torch.Tensor
    correct: torch.Tensor


class Objective(Protocol):
    """Runs the model on normalised images and scores it."""

    def __call__(self, model: nn.Module, images: torch.Tensor, batch: Batch) -> Outcome: ...


class Classification:
    """Cross-entropy with label smoothing, on mixed or plain images."""

    def __init__(self, label_smoothing: float = 0.0, classes: int = 1) -> None:
        self.label_smoothing, self.classes = label_smoothing, classes

    def __call__(self, model: nn.Module, images: torch.Tensor, batch: Batch) -> Outcome:
        logits = model(images)
        if not isinstance(logits, torch.Tensor):
            raise UserError(
                f"model.name: the model returned {type(logits).__name__} in training, not one tensor of logits",
                "use a model without auxiliary outputs, or wrap it in a factory of your own that returns the logits",
            )
        if logits.ndim != 2 or logits.shape[1] < self.classes:
            raise UserError(
                f"model.name: the logits have shape {tuple(logits.shape)}, the data has {self.classes} classes",
                "give the model one output per class (a factory is called with classes=N)",
            )
        logits = logits.float()
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
