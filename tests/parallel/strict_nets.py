"""Small networks with everything that strict mode must keep in order."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block that is dropped at random, whole or by elements."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(8, 8, 3, padding=1), norm, nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            kept = x.new_empty((len(x), 1, 1, 1)).bernoulli_(0.8)
            return x + kept * self.drop(self.norm(self.conv(x)))
        return x + self.norm(self.conv(x))


class Net(nn.Module):
    def __init__(self, classes: int, norm: nn.Module | None = None, **blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = Block(norm or nn.BatchNorm2d(8))
        self.blocks = nn.ModuleDict(blocks)
        self.head = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.block(self.stem(images))
        for each in self.blocks.values():
            x = each(x)
        return self.head(x.relu().mean((2, 3)))


def dropping(classes: int) -> nn.Module:
    return Net(classes)


def cumulative(classes: int) -> nn.Module:
    """Running statistics that are the mean of all steps."""
    return Net(classes, nn.BatchNorm2d(8, momentum=None))


def synced(classes: int) -> nn.Module:
    """torch's own SyncBatchNorm, as users convert to it."""
    return Net(classes, nn.SyncBatchNorm(8), second=nn.SyncBatchNorm(8))


class Odd(nn.Module):
    """A table that stays, a counter that depends on the data, a parameter that is never used, one in fp64."""

    table: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(8, 1, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.never = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(8, 1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += (x.detach() > 0).sum()
        return x * self.table * self.scale.float()


def odd(classes: int) -> nn.Module:
    return Net(classes, odd=Odd())


class Level(nn.Module):
    """Follows the mean of what it sees, writing to its buffer or putting another in its place."""

    level: Tensor

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))
        self.replaces = replaces

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.replaces:
            self.level = self.level * 0.5 + x.detach().mean() * 0.5
        elif self.training:
            self.level.copy_(self.level * 0.5 + x.detach().mean() * 0.5)
        return x - self.level


def replacing(classes: int) -> nn.Module:
    return Net(classes, level=Level(True))


def writing(classes: int) -> nn.Module:
    return Net(classes, level=Level(False))


class Late(nn.Module):
    """A parameter that some steps use and some do not: not the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x * self.scale if self.forwards > 9 else x


def late(classes: int) -> nn.Module:
    return Net(classes, late=Late())


class Unkeyed(nn.Module):
    """Stochastic depth by Python's own generator, as it is often written."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training and random.random() < 0.5 else x


def unkeyed(classes: int) -> nn.Module:
    return Net(classes, unkeyed=Unkeyed())


class Frozen(nn.BatchNorm2d):
    """Stays in evaluation mode, whatever is asked."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def frozen(classes: int) -> nn.Module:
    return Net(classes, Frozen(8))
