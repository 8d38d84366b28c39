"""The transform of a dataset: how stored images become the model's input, and the crop of each image.

Promises: pure functions of (transform, seed, request). Every random choice is drawn here or in `image/augment.py`, by
(seed, epoch, sample id) alone, with operations that every machine rounds in the same way; `batch.py` applies it to
pixels. A row of geometry means: crop the box, resize it to (width, height), crop the model's size from that at
(x, y), mirror it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from drumline.config.learning import Data
from drumline.config.sources import source_named
from drumline.core.errors import UserError
from drumline.data.feed.draws import Purpose, exp_small, symmetric_beta, uniform
from drumline.data.feed.sampler import Request
from drumline.data.image.augment import Augmentation, mean_colour
from drumline.data.image.resize import Smooth, Version, resize
from drumline.data.sources import ArrayDataset, Dataset
from drumline.data.sources.base import Images

CHUNK_BYTES = 1 << 24
"""Of pixels that are summed at a time."""
Augment = Literal["none", "shift", "shift-flip", "crop-flip"]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FULL_SCALE = (0.08, 1.0)
"""Inception's range of crop areas."""
MIX_COLUMNS = 6
"""Per sample: fraction of its pixels, fraction of its label, and the box (x0, y0, x1, y1) of its partner's pixels."""


@dataclass(frozen=True)
class Transform:
    """How stored images become the model's input."""

    size: int
    augment: Augment
    hflip: float | Literal["auto"] = "auto"
    """Probability that an image is mirrored. `auto`: a half if `augment` flips."""
    crop_scale: tuple[float, float] = FULL_SCALE
    """Minimum and maximum area of the crops of `crop-flip`."""
    eval_crop: float = 0.875
    exif: Literal["ignore", "apply"] = "ignore"
    mixup: float = 0.0
    cutmix: float = 0.0
    resize: Version = "pillow12"
    interpolation: Smooth = "bilinear"
    augmentation: Augmentation = field(default_factory=Augmentation)
    own: str = ""
    """The user's own function, as `package.module:function`; empty if there is none."""
    on_bad: Literal["raise", "substitute", "black"] = "raise"
    """What replaces a sample that cannot be read: nothing (the run stops), another sample, or a black image."""

    @property
    def pad(self) -> int:
        """Black pixels on each side of an image before `shift` crops it."""
        return max(1, self.size // 8) if self.augment.startswith("shift") else 0

    @property
    def mirror(self) -> float:
        """Probability that an image is mirrored."""
        flips = 0.5 if self.augment.endswith("flip") else 0.0
        return flips if self.hflip == "auto" else self.hflip

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def for_evaluation(self) -> Transform:
        """The same transform without randomness. A substitute would be counted twice, so a broken image is black."""
        return replace(
            self,
            augment="none",
            hflip="auto",
            mixup=0.0,
            cutmix=0.0,
            augmentation=Augmentation(),
            own="",
            on_bad="raise" if self.on_bad == "raise" else "black",
        )

    def geometry(
        self,
        seed: int,
        epoch: int,
        samples: NDArray[np.integer] | Sequence[int],
        sizes: NDArray[np.integer],
    ) -> Geometry:
        """The crop of each image, by stored sizes: (n, 2) of width and height. `samples`: `Request.keys`."""
        if self.augment == "crop-flip":
            ids, scale = np.asarray(samples), self.crop_scale
            return training_geometry(sizes, self.size, seed, epoch, ids, scale, self.mirror)
        rows = evaluation_geometry(sizes, self.size, self.eval_crop)
        if self.augment == "none" and self.mirror:
            rows[:, Column.MIRROR] = mirrored(seed, epoch, np.asarray(samples), self.mirror)
        return rows


def make_transform(data: Data, dataset: Dataset, mean: tuple[float, ...], training: bool = True) -> Transform:
    """The training transform that a recipe asks for, with each `auto` resolved by the dataset. `mean`: the colour of
    erased boxes. Unless it is for `training`, it has no user code, and fields that have no effect on this
    data are accepted."""
    augment = _augment(data, dataset)
    if training and data.crop_scale != FULL_SCALE and augment != "crop-flip":
        raise UserError(
            f"data.crop_scale = {data.crop_scale}: data.augment = auto means {augment} for {dataset.name}, which "
            "does not resize crops",
            "set data.augment=crop-flip, or remove data.crop_scale",
        )
    brightness, contrast, saturation, hue = data.jitter or (0.0,) * 4
    operations, magnitude = data.randaugment or (0, 0)
    return Transform(
        size=_size(data, dataset),
        augment=augment,
        hflip=data.hflip,
        crop_scale=data.crop_scale,
        eval_crop=data.eval_crop,
        exif=data.exif,
        mixup=data.mixup,
        cutmix=data.cutmix,
        resize=data.resize,
        interpolation=data.interpolation,
        augmentation=Augmentation(
            vflip=data.vflip,
            rotation=data.rotation,
            jitter=(brightness, contrast, saturation, hue),
            randaugment=(operations, magnitude),
            erasing=data.erasing,
            fill=mean_colour(mean) or (0,),
        ),
        own=data.transform if training else "",
        on_bad="raise" if data.strict else "substitute",
    )


def normalization(data: Data, dataset: Dataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel: the recipe's, else those of an array dataset, else ImageNet's."""
    if data.mean:
        return data.mean, data.std
    if isinstance(dataset, ArrayDataset):
        return channel_statistics(dataset.labelled)
    return IMAGENET_MEAN, IMAGENET_STD


def channel_statistics(source: ArrayDataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over all samples, with 255 as 1.

    Exact integer sums, rounded once at the end: the same bits on every machine and for every chunk size.
    """
    whole, rest = divmod(len(source), len(source.images))
    total, squares = _sums(source.images)
    if whole > 1 or rest:
        total_rest, squares_rest = _sums(source.images[:rest])
        total = [whole * a + b for a, b in zip(total, total_rest, strict=True)]
        squares = [whole * a + b for a, b in zip(squares, squares_rest, strict=True)]
    height, width, _ = source.shape
    n = len(source) * height * width
    spread = [n * square - value * value for value, square in zip(total, squares, strict=True)]
    if not all(spread):
        raise UserError(
            f"{source.name}: channel {spread.index(0)} has the same value in every pixel of every image, so "
            "it cannot be normalised by its deviation",
            fix="set data.mean and data.std yourself, for example 0.5 and 0.5",
        )
    mean = tuple(value / (n * 255) for value in total)
    std = tuple(math.sqrt(value / (n * n * 255 * 255)) for value in spread)
    return mean, std


def _sums(images: Images) -> tuple[list[int], list[int]]:
    """Per channel: the sum of the values and the sum of their squares."""
    channels = images.shape[3]
    total, squares = [0] * channels, [0] * channels
    chunk = max(1, CHUNK_BYTES // math.prod(images.shape[1:]))
    for start in range(0, len(images), chunk):
        part = images[start : start + chunk].reshape(-1, channels).astype(np.uint16)
        for channel in range(channels):
            values = part[:, channel]
            total[channel] += int(values.sum(dtype=np.uint64))
            squares[channel] += int((values * values).sum(dtype=np.uint64))
    return total, squares


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
        # The source's own name: a packed CIFAR-10 is still CIFAR-10.
        return source_named(dataset.name).augment if arrays else "crop-flip"
    if data.augment.startswith("shift") and not arrays:
        raise UserError(
            f"data.augment = {data.augment}: image files have different sizes, and shifting needs one size",
            "use crop-flip or none",
        )
    return data.augment


def shift_offsets(seed: int, request: Request, pad: int) -> NDArray[np.int64]:
    """Where the crop starts in the padded image: (n, 2) of x, y in 0..2*pad."""
    draws = uniform(seed, request.epoch, request.keys, Purpose.SHIFT, 2)
    return (draws * (2 * pad + 1)).astype(np.int64)


def mixing_plan(transform: Transform, seed: int, request: Request) -> NDArray[np.float32]:
    """How each sample is mixed with its neighbour in the batch (row 2i with row 2i + 1). Each sample's fraction and
    box come from its own id, and a pair is never split over processes, so the plan is the same on any world size."""
    epoch, samples, size = request.epoch, request.keys, transform.size
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


Geometry = NDArray[np.int32]
"""(n, COLUMNS), by `Column`."""


class Column(IntEnum):
    """The columns of a geometry row. The native part and the GPU kernel read the same order."""

    LEFT = 0
    TOP = 1
    RIGHT = 2
    BOTTOM = 3
    WIDTH = 4
    HEIGHT = 5
    X = 6
    Y = 7
    MIRROR = 8


COLUMNS = len(Column)
ATTEMPTS = 10
LARGEST_ASPECT = 4 / 3
_LOG_ASPECT = math.log(LARGEST_ASPECT)


def training_geometry(
    sizes: NDArray[np.integer],
    size: int,
    seed: int,
    epoch: int,
    samples: NDArray[np.integer],
    scale: tuple[float, float] = FULL_SCALE,
    mirror: float = 0.5,
) -> Geometry:
    """Random resized crops, some of them mirrored. `sizes` is (n, 2): the stored width and height."""
    rows = np.zeros((len(samples), COLUMNS), np.int32)
    draws = uniform(seed, epoch, samples, Purpose.CROP, 4 * ATTEMPTS)
    rows[:, :4] = random_resized_crops(sizes, draws, scale)
    rows[:, Column.WIDTH] = rows[:, Column.HEIGHT] = size
    rows[:, Column.MIRROR] = mirrored(seed, epoch, samples, mirror)
    return rows


def evaluation_geometry(sizes: NDArray[np.integer], size: int, crop: float) -> Geometry:
    """The whole image, resized to a short side of size / crop, and the centre crop of that."""
    wide, high = np.asarray(sizes).astype(np.int64).T
    short = math.floor(size / crop)
    rows = np.zeros((len(wide), COLUMNS), np.int32)
    rows[:, Column.RIGHT], rows[:, Column.BOTTOM] = wide, high
    upright = wide <= high
    # In integers; the result is that of the usual int(short * high / wide).
    width = np.where(upright, short, short * wide // high)
    height = np.where(upright, short * high // wide, short)
    rows[:, Column.WIDTH], rows[:, Column.HEIGHT] = width, height
    rows[:, Column.X] = np.rint((width - size) / 2)
    rows[:, Column.Y] = np.rint((height - size) / 2)
    return rows


def random_resized_crops(
    sizes: NDArray[np.integer], draws: NDArray[np.float64], scale: tuple[float, float] = FULL_SCALE
) -> NDArray[np.int32]:
    """Inception's crop as (n, 4) boxes: 8 to 100 % of the area unless `scale` says otherwise, aspect 3/4 to 4/3, the
    first of ten tries that fits, otherwise the centre. `draws` has four uniform numbers per try."""
    wide, high = np.asarray(sizes).astype(np.int64).T
    tries = draws.reshape(len(wide), ATTEMPTS, 4)
    least, greatest = scale
    area = (wide * high)[:, None] * (least + (greatest - least) * tries[:, :, 0])
    aspect = exp_small((2 * tries[:, :, 1] - 1) * _LOG_ASPECT)
    w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (w > 0) & (w <= wide[:, None]) & (h > 0) & (h <= high[:, None])
    chosen = np.arange(len(wide)), fits.argmax(axis=1)
    w, h = w[chosen], h[chosen]
    x = (tries[..., 2][chosen] * (wide - w + 1)).astype(np.int64)
    y = (tries[..., 3][chosen] * (high - h + 1)).astype(np.int64)
    none = ~fits.any(axis=1)
    if none.any():
        w[none], h[none] = _centre_of_last_resort(wide[none], high[none])
        x[none], y[none] = (wide - w)[none] // 2, (high - h)[none] // 2
    return np.stack([x, y, x + w, y + h], axis=1).astype(np.int32)


def mirrored(
    seed: int, epoch: int, samples: NDArray[np.integer], probability: float = 0.5
) -> NDArray[np.bool_]:
    """Which samples are mirrored."""
    return uniform(seed, epoch, samples, Purpose.FLIP, 1)[:, 0] < probability


def _centre_of_last_resort(
    wide: NDArray[np.int64], high: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The largest centre crop of an allowed aspect, for images so elongated that no try fits."""
    too_high, too_wide = wide / high < 1 / LARGEST_ASPECT, wide / high > LARGEST_ASPECT
    w = np.where(too_wide, np.rint(high * LARGEST_ASPECT).astype(np.int64), wide)
    h = np.where(too_high, np.rint(wide * LARGEST_ASPECT).astype(np.int64), high)
    return np.maximum(w, 1), np.maximum(h, 1)
