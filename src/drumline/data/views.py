"""From stored samples to the uint8 batch a model sees: crop, resize, flip, mixing plans.

Promises: a batch is a pure function of (source, view, seed, request); which worker or rank makes it changes
nothing. Geometry is decided by pure functions of draws (`random_resized_crop`, `shift_offsets`), pixels come
from Pillow. Refuses broken images with the file's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from drumline.data.decode import decode
from drumline.data.draws import Purpose, symmetric_beta, uniform
from drumline.data.order import Request
from drumline.data.sources import ArraySource, EncodedSource, Source

Box = tuple[int, int, int, int]
Augment = Literal["none", "shift", "shift-flip", "crop-flip"]
_ATTEMPTS = 10
MIX_COLUMNS = 6
"""Per sample: pixel share, label share, and the box (x0, y0, x1, y1) that takes the partner's pixels."""


class Batch(NamedTuple):
    """What travels from the loader to the step."""

    images: torch.Tensor
    """(n, height, width, channels) uint8."""
    labels: torch.Tensor
    """(n,) int64."""
    samples: torch.Tensor
    """(n,) int64, the sample ids."""
    mix: torch.Tensor
    """(n, MIX_COLUMNS) float32, or (n, 0) when nothing is mixed."""


@dataclass(frozen=True)
class View:
    """How samples are looked at."""

    size: int
    augment: Augment
    eval_crop: float = 0.875
    exif: Literal["ignore", "apply"] = "ignore"
    mixup: float = 0.0
    cutmix: float = 0.0

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def for_evaluation(self) -> View:
        """The same look without anything random."""
        return replace(self, augment="none", mixup=0.0, cutmix=0.0)


def make_batch(source: Source, view: View, seed: int, request: Request) -> Batch:
    """The batch that a request asks for."""
    pixels = (
        _array_pixels(source, view, seed, request)
        if isinstance(source, ArraySource)
        else _file_pixels(source, view, seed, request)
    )
    mix = mixing_plan(view, seed, request) if view.mixes else np.empty((len(request.samples), 0), np.float32)
    return Batch(
        images=torch.from_numpy(pixels),
        labels=torch.from_numpy(source.labels[request.samples]),
        samples=torch.from_numpy(request.samples.copy()),
        mix=torch.from_numpy(mix),
    )


def random_resized_crop(width: int, height: int, draws: NDArray[np.float64]) -> Box:
    """Inception's crop: 8 to 100 % of the area, aspect 3/4 to 4/3, the first of ten tries that fits, else the
    centre. `draws` holds four uniform numbers per try."""
    for area_draw, aspect_draw, x_draw, y_draw in draws.reshape(_ATTEMPTS, 4):
        area = width * height * (0.08 + 0.92 * area_draw)
        aspect = math.exp(math.log(3 / 4) + aspect_draw * (math.log(4 / 3) - math.log(3 / 4)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(x_draw * (width - w + 1)), int(y_draw * (height - h + 1))
            return (x, y, x + w, y + h)
    w, h = width, height
    if width / height < 3 / 4:
        h = round(width / (3 / 4))
    elif width / height > 4 / 3:
        w = round(height * (4 / 3))
    x, y = (width - w) // 2, (height - h) // 2
    return (x, y, x + w, y + h)


def centre_view(width: int, height: int, size: int, crop: float) -> tuple[tuple[int, int], Box]:
    """Evaluation: the size to resize to (short side = size / crop), and the centre box to cut from it."""
    short = math.floor(size / crop)
    scaled = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    x, y = round((scaled[0] - size) / 2), round((scaled[1] - size) / 2)
    return scaled, (x, y, x + size, y + size)


def shift_offsets(seed: int, request: Request, pad: int) -> NDArray[np.int64]:
    """Where the crop starts in the padded image: (n, 2) of x, y in 0..2*pad."""
    draws = uniform(seed, request.epoch, request.samples, Purpose.SHIFT, 2)
    return (draws * (2 * pad + 1)).astype(np.int64)


def flips(seed: int, request: Request) -> NDArray[np.bool_]:
    """Which samples are mirrored."""
    return uniform(seed, request.epoch, request.samples, Purpose.FLIP, 1)[:, 0] < 0.5


def mixing_plan(view: View, seed: int, request: Request) -> NDArray[np.float32]:
    """How each sample is mixed with its neighbour in the batch (slot 2i with 2i + 1). Each sample's share and
    box come from its own id; pairs never straddle two processes, so the plan is the same on any world."""
    epoch, samples, size = request.epoch, request.samples, view.size
    plan = np.zeros((len(samples), MIX_COLUMNS), np.float32)
    plan[:, :2] = 1.0
    if view.mixup and view.cutmix:
        cut = uniform(seed, epoch, samples, Purpose.MIX_CHOICE, 1)[:, 0] < 0.5
    else:
        cut = np.full(len(samples), view.cutmix > 0)
    if view.mixup:
        plan[~cut, :2] = symmetric_beta(seed, epoch, samples[~cut], Purpose.MIX_SHARE, view.mixup)[:, None]
    if view.cutmix and cut.any():
        share = symmetric_beta(seed, epoch, samples[cut], Purpose.MIX_SHARE, view.cutmix)
        half = np.sqrt(1.0 - share) * size / 2
        centre = uniform(seed, epoch, samples[cut], Purpose.MIX_BOX, 2) * size
        low = np.clip(np.rint(centre - half[:, None]), 0, size)
        high = np.clip(np.rint(centre + half[:, None]), 0, size)
        plan[cut, 1] = 1.0 - (high - low).prod(axis=1) / size**2
        plan[cut, 2:4], plan[cut, 4:6] = low, high
    return plan


def resize_array(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """A whole array set at another side length, by Pillow, once."""
    if images.shape[1:3] == (size, size):
        return images
    grey = images.shape[3] == 1
    resized = [
        np.asarray(
            Image.fromarray(image[..., 0] if grey else image).resize((size, size), Image.Resampling.BILINEAR)
        )
        for image in images
    ]
    stacked = np.stack(resized)
    return stacked[..., None] if grey else stacked


def _array_pixels(source: ArraySource, view: View, seed: int, request: Request) -> NDArray[np.uint8]:
    stored = source.take(request.samples)
    if view.augment == "crop-flip":
        grey = stored.shape[3] == 1
        pictures = (Image.fromarray(image[..., 0] if grey else image) for image in stored)
        pixels = np.stack([np.asarray(image) for image in _cropped(pictures, view, seed, request)])
        return pixels[..., None] if grey else pixels
    images = resize_array(stored, view.size)
    if view.augment == "none":
        return np.ascontiguousarray(images)
    count, height, width, _ = images.shape
    pad = max(1, view.size // 8)
    offsets = shift_offsets(seed, request, pad)
    rows = offsets[:, 1, None] + np.arange(height)
    columns = offsets[:, 0, None] + np.arange(width)
    if view.augment == "shift-flip":
        mirrored = flips(seed, request)
        columns[mirrored] = columns[mirrored, ::-1]
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _file_pixels(source: EncodedSource, view: View, seed: int, request: Request) -> NDArray[np.uint8]:
    pictures: Iterator[Image.Image] = (
        decode(source.read(int(i)), source.where(int(i)), view.exif) for i in request.samples
    )
    if view.augment == "crop-flip":
        pictures = _cropped(pictures, view, seed, request)
    else:
        assert view.augment == "none", view.augment
        pictures = (_centred(image, view) for image in pictures)
    pixels = np.empty((len(request.samples), view.size, view.size, 3), np.uint8)
    for slot, image in enumerate(pictures):
        pixels[slot] = np.asarray(image)
    return pixels


def _cropped(
    pictures: Iterable[Image.Image], view: View, seed: int, request: Request
) -> Iterator[Image.Image]:
    draws = uniform(seed, request.epoch, request.samples, Purpose.CROP, 4 * _ATTEMPTS)
    mirrored = flips(seed, request)
    for slot, image in enumerate(pictures):
        box = random_resized_crop(image.width, image.height, draws[slot])
        image = image.crop(box).resize((view.size, view.size), Image.Resampling.BILINEAR)
        yield image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored[slot] else image


def _centred(image: Image.Image, view: View) -> Image.Image:
    scaled, box = centre_view(image.width, image.height, view.size, view.eval_crop)
    return image.resize(scaled, Image.Resampling.BILINEAR).crop(box)
