"""What the cases share: a registry, a small network, learnable data, a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import drumline


@dataclass(frozen=True)
class Case:
    """A training loop. `codes` are the guards that may report its mistake; none for a healthy loop."""

    name: str
    run: Callable[[], None]
    codes: tuple[str, ...]
    held_out: bool


CASES: dict[str, Case] = {}


def mistake(*codes: str, held_out: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(run: Callable[[], None]) -> Callable[[], None]:
        CASES[run.__name__] = Case(run.__name__, run, codes, held_out)
        return run

    return register


def healthy(run: Callable[[], None]) -> Callable[[], None]:
    CASES[run.__name__] = Case(run.__name__, run, (), False)
    return run


def healthy_held_out(run: Callable[[], None]) -> Callable[[], None]:
    CASES[run.__name__] = Case(run.__name__, run, (), True)
    return run


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


class Net(nn.Module):
    def __init__(self, drop: float = 0.0, classes: int = 4, norm: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.GroupNorm(2, 4)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(4 * 36, classes)

    def features(self, x):
        return F.relu(self.norm(self.conv(x))).flatten(1)

    def forward(self, x):
        return self.head(self.drop(self.features(x)))


def data(count: int = 64) -> TensorDataset:
    """Four classes, each with a pattern of its own and some noise."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (count,), generator=generator)
    patterns = torch.randn(4, 1, 8, 8, generator=generator)
    return TensorDataset(patterns[labels] + 0.3 * torch.randn(count, 1, 8, 8, generator=generator), labels)


def sampled(dataset=None, batch: int = 8, **options) -> DataLoader:
    dataset = dataset or data()
    return DataLoader(dataset, batch_size=batch, sampler=DistributedSampler(dataset, **options))


def made(drop: float = 0.0, lr: float = 0.05, **options):
    torch.manual_seed(0)
    model = DDP(Net(drop), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    torch.manual_seed(100 + rank())
    return model, optimizer


def train(model, optimizer, loader=None, epochs=3, loss=None, after=None, before_step=None, scheduler=None):
    loader = loader if loader is not None else sampled()
    step = 0
    for epoch in range(epochs):
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            step += 1
            optimizer.zero_grad()
            (loss(model, x, y) if loss else F.cross_entropy(model(x), y)).backward()
            if before_step:
                before_step(step)
            optimizer.step()
            if scheduler:
                scheduler.step()
            if after:
                after(step)


guard = drumline.guard
