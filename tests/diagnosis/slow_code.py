"""Sources, transforms, losses and models as a user would write them, some of them slow. Copied beside a run as
`slow_code.py`."""

from __future__ import annotations

import io
import os
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

Pixels = NDArray[np.uint8]


# ---- sources: JPEG files in memory


class Files:
    """Some images, each of them many times."""

    classes = ("a", "b", "c", "d")

    def __init__(self, split: str, side: int = 32, count: int = 320) -> None:
        draw = np.random.default_rng(0)
        self.files = []
        for _ in range(8):
            stream = io.BytesIO()
            coarse = draw.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(coarse).resize((side, side)).save(stream, "JPEG", quality=90)
            self.files.append(stream.getvalue())
        self.labels = np.arange(count if split == "train" else 32) % 4
        self.train = split == "train"

    def read(self, sample: int) -> bytes:
        return self.files[sample % len(self.files)]


class SlowFiles(Files):
    def read(self, sample: int) -> bytes:
        if self.train:
            time.sleep(0.004)
        return super().read(sample)


class SlowerFiles(Files):
    def read(self, sample: int) -> bytes:
        if self.train:
            time.sleep(0.02 if sample % 8 == 0 else 0.001)
        return super().read(sample)


class ColdFiles(Files):
    """Slow when a file is read for the first time."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        self.seen: set[int] = set()

    def read(self, sample: int) -> bytes:
        if self.train and sample not in self.seen:
            time.sleep(0.008)
        self.seen.add(sample)
        return super().read(sample)


def files(path: str, split: str) -> Files:
    return Files(split)


def slow_files(path: str, split: str) -> Files:
    return SlowFiles(split)


def slower_files(path: str, split: str) -> Files:
    return SlowerFiles(split)


def cold_files(path: str, split: str) -> Files:
    return ColdFiles(split)


def large_files(path: str, split: str) -> Files:
    return Files(split, side=900, count=160)


def larger_files(path: str, split: str) -> Files:
    return Files(split, side=1600, count=64)


# ---- transforms


def bright(image: Pixels, rng: np.random.Generator) -> Pixels:
    return image // 2 + 60


def slow_transform(image: Pixels, rng: np.random.Generator) -> Pixels:
    time.sleep(0.001)
    return image


def busy_transform(image: Pixels, rng: np.random.Generator) -> Pixels:
    for _ in range(40):
        np.sort(image, axis=None)
    return image


# ---- losses


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def sleeping_loss(logits: Tensor, labels: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        time.sleep(0.03)
    return plain_loss(logits, labels)


def writing_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Writes each loss to a disk that takes its time."""
    losses = plain_loss(logits, labels)
    with tempfile.TemporaryFile() as stream:
        stream.write(str(losses.mean().item()).encode())
        stream.flush()
        os.fsync(stream.fileno())
        time.sleep(0.02)
    return losses


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def slow_on_rank_1(logits: Tensor, labels: Tensor) -> Tensor:
    if _rank() == 1:
        time.sleep(0.04)
    return plain_loss(logits, labels)


def logging_on_rank_0(logits: Tensor, labels: Tensor) -> Tensor:
    if _rank() == 0:
        _send(logits.detach().mean().item())
    return plain_loss(logits, labels)


def _send(value: float) -> None:
    """As to a slow tracker."""
    time.sleep(0.04)


KEPT: list[Any] = []


def keeping_loss(logits: Tensor, labels: Tensor) -> Tensor:
    losses = plain_loss(logits, labels)
    if torch.is_grad_enabled():
        KEPT.append(torch.zeros(1 << 18).fill_(1.0))
    return losses


def keeping_graphs(logits: Tensor, labels: Tensor) -> Tensor:
    """The usual mistake: the losses are kept with their graph and its activations."""
    losses = plain_loss(logits, labels)
    if torch.is_grad_enabled():
        KEPT.append(
            losses.mean() + torch.ones(1 << 18).sum() + torch.ones(1 << 18, requires_grad=True).exp().sum()
        )
    return losses


def opening_loss(logits: Tensor, labels: Tensor) -> Tensor:
    KEPT.append(os.open(os.devnull, os.O_RDONLY))
    return plain_loss(logits, labels)


CALLS = 0


def ageing_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Looks through a list that grows."""
    global CALLS
    if torch.is_grad_enabled():
        CALLS += 1
        sum(number * number for number in range(2000 * CALLS))
    return plain_loss(logits, labels)


# ---- models


class Small(nn.Module):
    """Takes images of any size."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))  # type: ignore[no-any-return]


def small(classes: int) -> nn.Module:
    return Small(classes)


def convolutions(classes: int) -> nn.Module:
    """Some milliseconds for each image, in few and large operations."""
    return Small(classes, width=160)


class Wide(nn.Module):
    """Many parameters, few operations."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3 * 64, width), nn.Linear(width, classes)
        self.table = nn.Linear(width, width)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.table(self.first(images.flatten(1)).relu()).relu())  # type: ignore[no-any-return]


def wide(classes: int) -> nn.Module:
    return Wide(classes, 1500)


def wider(classes: int) -> nn.Module:
    return Wide(classes, 2200)
