"""The base class of models that are ready to predict: class names, preprocessing, and predictions for images.

Promises: an image becomes exactly the pixels that the model sees in an evaluation, wherever the image comes from. The
subclass decides what computes the probabilities: a PyTorch module or an exported file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from drumline.core.errors import UserError
from drumline.core.text import counted
from drumline.data.feed.batch import crop_decoded, crop_encoded
from drumline.data.feed.transform import Geometry, Transform, resize_array
from drumline.data.image.decode import decode, to_rgb
from drumline.data.reading import read_whole
from drumline.state.model_record import ModelRecord

Picture = str | PathLike[str] | bytes | Image.Image | NDArray[np.uint8]
"""An image file, its bytes, a PIL image, or an array: height x width (grey) or height x width x channels (1 or 3) of
uint8."""


@dataclass(frozen=True)
class Prediction:
    """The most likely class."""

    label: str
    probability: float
    index: int
    """The index of the class in the model's outputs."""


@dataclass(frozen=True, repr=False)
class Classifier(ABC):
    """A model with its class names and its preprocessing."""

    record: ModelRecord

    def __repr__(self) -> str:
        classes = counted(len(self.classes), "class", "classes")
        return f"<{type(self).__name__} {self.record.model}: {classes}, {self.record.size} px, {self.device}>"

    @property
    def classes(self) -> tuple[str, ...]:
        """In the order of the model's outputs."""
        return self.record.classes.names

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it computes."""

    @abstractmethod
    def compute(self, pixels: Tensor) -> Tensor:
        """The probability of each class for each image. `pixels`: (images, size, size, 3), uint8, on `device`."""

    @torch.inference_mode()
    def from_pixels(self, pixels: Tensor) -> Tensor:
        """The same with pixels and probabilities on the CPU."""
        return self.compute(pixels.to(self.device)).cpu()

    def predict(self, image: Picture) -> Prediction:
        """The most likely class of an image."""
        if isinstance(image, list | tuple):
            raise UserError(
                "predict takes one image, not a list", "call probabilities([...]) for several images"
            )
        return self.best([self.pixels(image)])[0][0]

    def best(self, pixels: Sequence[NDArray[np.uint8]], top: int = 1) -> list[tuple[Prediction, ...]]:
        """The `top` most likely classes of each image, best first. `pixels` come from the method of that name."""
        probabilities = self._probabilities(pixels)
        found = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
        return [
            tuple(
                Prediction(self.label(index), probability, index)
                for probability, index in zip(*row, strict=True)
            )
            for row in zip(found.values.tolist(), found.indices.tolist(), strict=True)
        ]

    def label(self, index: int) -> str:
        """The class name of an output; its index if the data had fewer classes than the model has outputs."""
        return self.classes[index] if index < len(self.classes) else str(index)

    def probabilities(self, images: Sequence[Picture]) -> Tensor:
        """The probability of each class for each image, on the CPU: (images, outputs)."""
        return self._probabilities(self._all_pixels(images))

    def _probabilities(self, pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
        return self.from_pixels(self._stacked(pixels))

    def _stacked(self, pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
        size = self.record.size
        return torch.from_numpy(np.asarray(pixels, np.uint8).reshape(-1, size, size, 3))

    def _all_pixels(self, images: Sequence[Picture]) -> list[NDArray[np.uint8]]:
        if isinstance(images, str | PathLike | bytes | Image.Image):
            raise UserError("expected a list of images, not one image", "give [image]")
        return [self.pixels(image) for image in images]

    def pixels(self, image: Picture, name: str = "the image") -> NDArray[np.uint8]:
        """An image as the model sees it in an evaluation, before normalisation: (size, size, 3). `name` stands for an
        image that is not a file in error messages."""
        transform = self.transform

        def geometry(sizes: NDArray[np.int32]) -> Geometry:
            return transform.geometry(0, 0, [0], sizes)

        where = str(image) if isinstance(image, str | PathLike) else name
        if isinstance(image, str | PathLike | bytes):
            data = image if isinstance(image, bytes) else read_whole(image)
            if self.record.fit == "crop":
                return crop_encoded(data, where, transform, geometry)
            array = np.asarray(decode(data, where, transform.exif))
        else:
            array = _array(image, transform, name)
        if self.record.fit == "crop":
            return crop_decoded(array, where, transform, geometry)
        return resize_array(array[None], transform)[0]

    @property
    def transform(self) -> Transform:
        """The transform of an evaluation."""
        record = self.record
        return Transform(
            size=record.size,
            augment="none",
            eval_crop=record.eval_crop,
            exif="apply" if record.exif == "apply" else "ignore",
            resize=record.resize,  # type: ignore[arg-type]  # checked when the record was read
            interpolation=record.interpolation,  # type: ignore[arg-type]
        )


def _array(image: Image.Image | NDArray[np.uint8], transform: Transform, name: str) -> NDArray[np.uint8]:
    """Decoded pixels, height x width x 3."""
    if isinstance(image, Image.Image):
        turned = ImageOps.exif_transpose(image) if transform.exif == "apply" else image
        return np.asarray(to_rgb(turned, name))
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3) or not array.size:
        raise UserError(
            f"{name} is an array of {array.dtype} with shape {array.shape}",
            "give uint8 with the shape (height, width), (height, width, 1) or (height, width, 3)",
        )
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))
