"""A trained model, ready to predict: weights, class names and preprocessing.

Promises: an image becomes exactly the pixels that evaluation gives the model, normalised in the same way. Rejects
weights without a record of their model, and a model that the user's own code builds unless that code is trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from drumline.config.sources import names_code
from drumline.core.errors import UserError
from drumline.inference.classifier import Classifier, Picture
from drumline.inference.export.load import ExportedModel, exported_format, load_exported
from drumline.models.registry import create_model
from drumline.state.pretrained import is_pretrained
from drumline.state.weights import load_weights, resolve_weights, weights_record
from drumline.training.sets import Normalise


@dataclass(frozen=True, repr=False)
class TrainedModel(Classifier):
    """A PyTorch model in eval mode."""

    model: nn.Module

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.inference_mode()
    def compute(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.model(self.normalised(pixels))
        return logits.float().softmax(dim=1)

    def normalised(self, pixels: Tensor) -> Tensor:
        """The model's input for preprocessed pixels."""
        normalise = Normalise.build(self.record.mean, self.record.std, self.device, channels_last=False)
        return normalise(pixels.to(self.device))

    def preprocess(self, images: Sequence[Picture]) -> Tensor:
        """The model's input: float, (images, 3, size, size), normalised, on the model's device."""
        return self.normalised(self._stacked(self._all_pixels(images)))


def load_model(
    path: str | PathLike[str], *, device: str | torch.device | None = None, trust: bool = False
) -> TrainedModel | ExportedModel:
    """Loads a trained model, ready to predict.

    Example:

        model = drumline.load_model("runs/photos-resnet18-1")
        print(model.predict("cat.jpg").label)

    Args:
        path: A run folder (its best weights), a checkpoint, weights, or a file that `drumline export` wrote.
        device: Where the model computes. Default: the CPU; for an exported file, the device that it was exported for.
        trust: Allows files that can run code: a model that the user's own code builds (`module:function`), and
            exported programs (pt2, aoti, torchscript).

    Returns:
        The model in eval mode, with its class names and its image preprocessing.

    Raises:
        UserError: There are no such weights, or they have no record of their model.
    """
    if kind := exported_format(Path(path)):
        return load_exported(Path(path), kind, trust, None if device is None else torch.device(device))
    return load_trained(path, device=device or "cpu", trust=trust)


def load_trained(
    path: str | PathLike[str], *, device: str | torch.device = "cpu", trust: bool = False
) -> TrainedModel:
    """The same for a run, a checkpoint or weights: the model is a PyTorch module."""
    if is_pretrained(str(path)):
        raise UserError(
            f"{path} names published weights, which have no class names",
            f"train with finetune={path} on your images, and give the run",
        )
    file = resolve_weights(Path(path))
    record = weights_record(file)
    if record is None:
        raise UserError(
            f"{file} does not say what model it holds",
            "give a run, or weights that drumline wrote; for others use create_model and load_weights",
        )
    if names_code(record.model) and not trust:
        raise UserError(
            f"{file} holds a model that the code of {record.model} builds",
            "if you trust that code, call load_model(..., trust=True)",
            code="untrusted-code",
        )
    model = create_model(record.model, classes=record.outputs, **record.arguments)
    load_weights(model, file)
    return TrainedModel(record, model.eval().to(device))
