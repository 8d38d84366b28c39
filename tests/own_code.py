"""Augmentations, losses, models and optimizers as a user would write them, right and wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

Image = NDArray[np.uint8]
_OWN = np.random.default_rng(0)


def noisy(image: Image, rng: np.random.Generator) -> Image:
    return np.clip(image.astype(np.int16) + rng.integers(-20, 21, image.shape), 0, 255).astype(np.uint8)


class Shade:
    def __call__(self, image: Image, rng: np.random.Generator) -> Image:
        image[:] = (image * rng.uniform(0.3, 1)).astype(np.uint8)
        return image


def by_random(image: Image, rng: np.random.Generator) -> Image:
    return np.roll(image, random.randrange(9), 0)


def by_numpy(image: Image, rng: np.random.Generator) -> Image:
    return np.roll(image, np.random.randint(9), 0)


def by_torch(image: Image, rng: np.random.Generator) -> Image:
    return np.roll(image, int(torch.randint(9, ())), 0)


def by_its_own(image: Image, rng: np.random.Generator) -> Image:
    return np.roll(image, int(_OWN.integers(9)), 0)


def cut_off(image: Image, rng: np.random.Generator) -> Image:
    return image[:4]


def scaled(image: Image, rng: np.random.Generator) -> Any:
    return image / 255


def empty(image: Image, rng: np.random.Generator) -> None:
    image[:] = 0


def failing(image: Image, rng: np.random.Generator) -> Image:
    raise KeyError("a mistake")


def without_generator(image: Image) -> Image:
    return image


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** gamma * losses


class Weighted(nn.Module):
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 10))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, self.weights[: logits.shape[1]], reduction="none")


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return focal(self.scale * logits, labels)


class Remembering(Weighted):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.weights.mul_(0.9)
        return super().forward(logits, labels)


def averaged(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def detached(logits: Tensor, labels: Tensor) -> Tensor:
    return focal(logits.detach(), labels)


def of_three(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return focal(logits, labels) * weights
