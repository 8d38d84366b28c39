"""The transform of a dataset: how stored images become the model's input.

Promises: pure functions of (transform, seed, request). Every random choice is drawn here and in `geometry.py`, by
sample id; `sample.py` and `batch.py` apply it to pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from drumline.config.recipe import Data
from drumline.core.errors import UserError
from drumline.data.feed.draws import Purpose, symmetric_beta, uniform
from drumline.data.feed.sampler import Request
from drumline.data.image.augment import Augmentation, mean_colour
from drumline.data.image.geometry import Geometry, evaluation_geometry, training_geometry
from drumline.data.image.resize import Smooth, Version, resize
from drumline.data.sources import ArrayDataset, Dataset, channel_statistics

Augment = Literal["none", "shift", "shift-flip", "crop-flip"]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MIX_COLUMNS = 6
"""Per sample: fraction of its pixels, fraction of its label, and the box (x0, y0, x1, y1) of its partner's pixels."""


@dataclass(frozen=True)
class Transform:
    """How stored images become the model's input."""

    size: int
    augment: Augment
    eval_crop: float = 0.875
    exif: Literal["ignore", "apply"] = "ignore"
    mixup: float = 0.0
    cutmix: float = 0.0
    resize: Version = "pillow12"
    interpolation: Smooth = "bilinear"
    augmentation: Augmentation = field(default_factory=Augmentation)
    on_bad: Literal["raise", "substitute", "black"] = "raise"
    """What replaces a sample that cannot be read: nothing (the run stops), another sample, or a black image."""

    @property
    def pad(self) -> int:
        """Black pixels on each side of an image before `shift` crops it."""
        return max(1, self.size // 8) if self.augment.startswith("shift") else 0

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def for_evaluation(self) -> Transform:
        """The same transform without randomness. A substitute would be counted twice, so a broken image is black."""
        return replace(
            self,
            augment="none",
            mixup=0.0,
            cutmix=0.0,
            augmentation=Augmentation(),
            on_bad="raise" if self.on_bad == "raise" else "black",
        )

    def geometry(
        self,
        seed: int,
        epoch: int,
        samples: NDArray[np.integer] | Sequence[int],
        sizes: NDArray[np.integer],
    ) -> Geometry:
        """The crop of each image, by stored sizes: (n, 2) of width and height."""
        if self.augment == "crop-flip":
            return training_geometry(sizes, self.size, seed, epoch, np.asarray(samples))
        return evaluation_geometry(sizes, self.size, self.eval_crop)


def make_transform(data: Data, dataset: Dataset, mean: tuple[float, ...]) -> Transform:
    """The training transform that a recipe asks for, with each `auto` resolved by the dataset. `mean`: the colour of
    erased boxes."""
    brightness, contrast, saturation, hue = data.jitter or (0.0,) * 4
    operations, magnitude = data.randaugment or (0, 0)
    return Transform(
        size=_size(data, dataset),
        augment=_augment(data, dataset),
        eval_crop=data.eval_crop,
        exif=data.exif,
        mixup=data.mixup,
        cutmix=data.cutmix,
        resize=data.resize,
        interpolation=data.interpolation,
        augmentation=Augmentation(
            jitter=(brightness, contrast, saturation, hue),
            randaugment=(operations, magnitude),
            erasing=data.erasing,
            fill=mean_colour(mean) or (0,),
        ),
        on_bad="raise" if data.strict else "substitute",
    )


def normalization(data: Data, dataset: Dataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel: the recipe's, else those of an array dataset, else ImageNet's."""
    if data.mean:
        return data.mean, data.std
    return channel_statistics(dataset) if isinstance(dataset, ArrayDataset) else (IMAGENET_MEAN, IMAGENET_STD)


def _size(data: Data, dataset: Dataset) -> int:
    if data.size != "auto":
        return data.size
    if not isinstance(dataset, ArrayDataset):
        return 224
    height, width, _ = dataset.shape
    if height != width:
        raise UserError(
            f"data.size = auto: the stored images are {width} x {height}, not square", "give --data.size N"
        )
    return height


def _augment(data: Data, dataset: Dataset) -> Augment:
    arrays = isinstance(dataset, ArrayDataset)
    if data.augment == "auto":
        if not arrays:
            return "crop-flip"
        by_source: dict[str, Augment] = {
            "cifar10": "shift-flip",
            "cifar100": "shift-flip",
            "synthetic": "none",
        }
        # The source's own name: a packed CIFAR-10 is still CIFAR-10.
        return by_source.get(dataset.name, "shift")
    if data.augment.startswith("shift") and not arrays:
        raise UserError(
            f"data.augment = {data.augment}: image files have different sizes, and shifting needs one size",
            "use crop-flip or none",
        )
    return data.augment


def shift_offsets(seed: int, request: Request, pad: int) -> NDArray[np.int64]:
    """Where the crop starts in the padded image: (n, 2) of x, y in 0..2*pad."""
    draws = uniform(seed, request.epoch, request.samples, Purpose.SHIFT, 2)
    return (draws * (2 * pad + 1)).astype(np.int64)


def mixing_plan(transform: Transform, seed: int, request: Request) -> NDArray[np.float32]:
    """How each sample is mixed with its neighbour in the batch (row 2i with row 2i + 1). Each sample's fraction and
    box come from its own id, and a pair is never split over processes, so the plan is the same on any world size."""
    epoch, samples, size = request.epoch, request.samples, transform.size
    if not transform.mixes:
        return np.empty((len(samples), 0), np.float32)
    plan = np.zeros((len(samples), MIX_COLUMNS), np.float32)
    plan[:, :2] = 1.0
    if transform.mixup and transform.cutmix:
        cut = uniform(seed, epoch, samples, Purpose.MIX_CHOICE, 1)[:, 0] < 0.5
    else:
        cut = np.full(len(samples), transform.cutmix > 0)
    if transform.mixup:
        plan[~cut, :2] = symmetric_beta(seed, epoch, samples[~cut], Purpose.MIX_FRACTION, transform.mixup)[
            :, None
        ]
    if transform.cutmix and cut.any():
        fraction = symmetric_beta(seed, epoch, samples[cut], Purpose.MIX_FRACTION, transform.cutmix)
        half = np.sqrt(1.0 - fraction) * size / 2
        centre = uniform(seed, epoch, samples[cut], Purpose.MIX_BOX, 2) * size
        low = np.clip(np.rint(centre - half[:, None]), 0, size)
        high = np.clip(np.rint(centre + half[:, None]), 0, size)
        plan[cut, 1] = 1.0 - (high - low).prod(axis=1) / size**2
        plan[cut, 2:4], plan[cut, 4:6] = low, high
    return plan


def resize_array(images: NDArray[np.uint8], transform: Transform) -> NDArray[np.uint8]:
    """A stack of images, resized to the transform's size."""
    size = transform.size
    if images.shape[1:3] == (size, size):
        return images
    return np.stack(
        [
            resize(image, (size, size), version=transform.resize, filter=transform.interpolation)
            for image in images
        ]
    )
