"""The loss on the labels: cross-entropy, binary cross-entropy, or the user's own; one number for each sample.

The user's own is called as `loss(logits, labels)` with fp32 logits (n, classes) and int64 labels (n,), outside any
autocast, and twice for mixed samples. It must return one loss per sample: these are weighted by the global batch, so
that the gradient is the same however the batch is divided. Promises: a loss that cannot be called so, returns another
shape, has no gradient, or has parameters or a state of its own is rejected before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from drumline.config.learning import Train
from drumline.config.sources import names_code
from drumline.core.arithmetic import leave_no_trace
from drumline.core.contents import contents
from drumline.core.errors import UserError
from drumline.core.named import check_called, instance, load_named, signature_of
from drumline.core.precision import FP32, autocast
from drumline.core.text import near, printable
from drumline.data.classes import some_names
from drumline.data.feed.balance import Balance, class_weights
from drumline.data.sources import Dataset
from drumline.data.sources.base import known_labels

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) to one loss per sample."""
CALLED = "(logits, labels)"
PROBED = 3
"""Samples of the trial call: more than one, to distinguish a mean from a loss per sample."""


def make_loss(train: Train, classes: int, device: torch.device) -> Loss:
    """The recipe's loss, tried on a few made-up logits if it is the user's own."""
    if names_code(train.loss):
        return OwnLoss(train.loss, classes, device)
    losses = {"cross_entropy": cross_entropy, "bce": binary_cross_entropy}
    return partial(losses[train.loss], smoothing=train.label_smoothing)


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """torch's cross-entropy with label smoothing."""
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


def binary_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Each class as a yes-or-no question, averaged over the classes (Wightman et al., 2021)."""
    rest = smoothing / logits.shape[1]
    own = labels.unsqueeze(1) == torch.arange(logits.shape[1], device=logits.device)
    targets = torch.where(own, 1.0 - smoothing + rest, rest).to(logits.dtype)
    with autocast(logits.device, FP32):
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)


def loss_weights(
    dataset: Dataset, balance: Balance, named: Mapping[str, float] | None
) -> NDArray[np.float64]:
    """The weight of each class in the loss, with a mean of 1 over the samples that are drawn. `named`: the weights of
    some classes (the others have 1); None: in inverse proportion to how often a class is drawn."""
    names = dataset.classes
    drawn = class_weights(np.bincount(known_labels(dataset), minlength=len(names)), balance).astype(
        np.float64
    )
    if named is None:
        weights = np.divide(1.0, drawn, out=np.zeros(len(names)), where=drawn > 0)
    else:
        if unknown := [name for name in named if name not in names]:
            close = near(unknown[0], names)
            raise UserError(
                f"train.class_weights: the data has no class '{printable(unknown[0])}'",
                f"did you mean {printable(close[0])}?"
                if close
                else f"the classes are {some_names(names)}; write NAME:WEIGHT",
            )
        weights = np.array([named.get(name, 1.0) for name in names])
    mean = float((weights * drawn).sum() / drawn.sum())
    if mean == 0:
        raise UserError(
            "train.class_weights: every class in the data has weight 0", "give one a weight above 0"
        )
    return weights / mean


class OwnLoss:
    """The user's function or `nn.Module`, checked at each call. A parameter `reduction` is set to `none`."""

    def __init__(self, name: str, classes: int, device: torch.device) -> None:
        self.title = f"train.loss {name}"
        found = load_named(name, "train.loss", CALLED)
        parameters = getattr(signature_of(found), "parameters", {})
        loss: Any = instance(found, self.title, {"reduction": "none"}, CALLED)
        if loss is found and "reduction" in parameters:
            loss = partial(found, reduction="none")
        if isinstance(loss, nn.Module):
            if names := [name for name, _ in loss.named_parameters()]:
                raise UserError(
                    f"{self.title}: has the parameters {', '.join(names[:3])}, which no optimizer trains",
                    "move them to the model (model.name=package.module:factory), or make them buffers",
                )
            loss = loss.to(device)
        check_called(loss, self.title, CALLED, "logits and labels")
        self._loss, self._device = loss, device
        self._try(classes, device)
        self._versions = self._buffer_versions()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        if logits.device != self._device and isinstance(self._loss, nn.Module):
            self._loss.to(logits.device)  # the last stage of a model may be on a different device
            self._device, self._versions = logits.device, self._buffer_versions()
        with autocast(logits.device, FP32):
            losses = self._loss(logits, labels)
        if not isinstance(losses, Tensor) or losses.shape != labels.shape:
            shape = (
                f"a tensor of shape {tuple(losses.shape)}"
                if isinstance(losses, Tensor)
                else type(losses).__name__
            )
            raise UserError(
                f"{self.title}: returned {shape} for {len(labels)} samples",
                f"return one loss per sample, here of shape ({len(labels)},), as with reduction='none': Drumline "
                "divides their sum by the global batch, which is exact for any number of processes and micro-batches",
            )
        return losses.float()

    def check(self) -> None:
        """Rejects a loss that has changed its buffers, because checkpoints do not include them."""
        if self._buffer_versions() != self._versions:
            raise UserError(
                f"{self.title}: changes its buffers, which checkpoints do not include, so a resumed run would differ",
                "compute the loss from logits and labels alone",
            )

    def _try(self, classes: int, device: torch.device) -> None:
        """Calls it twice as a step does, without side effects."""
        logits = torch.linspace(-1, 1, PROBED * classes, device=device).view(PROBED, classes).requires_grad_()
        labels = torch.arange(PROBED, device=device) % classes
        modules = [self._loss] if isinstance(self._loss, nn.Module) else []
        buffers = [buffer for module in modules for buffer in module.buffers()]

        def once() -> tuple[Tensor, object]:
            """The losses, and what the loss holds after the call."""
            with torch.enable_grad(), leave_no_trace(*modules, tensors=buffers, devices=[device]):
                losses = self(logits, labels)
                if not losses.requires_grad:
                    raise UserError(
                        f"{self.title}: the losses do not depend on the logits, so nothing can be learned",
                        "compute them from the logits with torch, without .detach(), .item() or torch.no_grad()",
                    )
                losses.sum().backward()
            return losses.detach(), contents(self._loss)

        try:
            (losses, held), (again, held_again) = once(), once()
        except UserError:
            raise
        except Exception as error:  # a user's loss may raise anything
            raise UserError(
                f"{self.title}: raised {type(error).__name__} for logits of shape {tuple(logits.shape)} and labels "
                f"of shape {tuple(labels.shape)}: {error}",
                f"correct it; it is called as {CALLED} with float32 logits and int64 class numbers",
            ) from error
        # Not by their bits: a run may allow kernels that round differently each time.
        if held != held_again or not torch.allclose(losses, again, equal_nan=True):
            raise UserError(
                f"{self.title}: keeps a state between its calls, which a resumed run could not repeat",
                "compute the loss from logits and labels alone",
            )

    def _buffer_versions(self) -> list[int]:
        return [each._version for each in self._loss.buffers()] if isinstance(self._loss, nn.Module) else []
