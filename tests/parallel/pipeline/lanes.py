"""A small model in hand-cut stages with everything that is hard at a boundary, and its lanes; for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumline.data.feed.sampler import bounds
from drumline.parallel.pipeline.lane import Lane
from drumline.parallel.pipeline.schedule import instruction_lists
from drumline.parallel.pipeline.stage import TensorSpec
from drumline.parallel.pipeline.transport import StageTransport

CPU = torch.device("cpu")
UNITS = 8


class First(nn.Module):
    """Gives what the next stage changes in place, a skip for all behind, whole numbers, and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        skip = self.stem(images)
        return self.norm(skip), skip, images.flatten(1).argmax(1) % 5, images.mean((2, 3))


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, skip: Tensor, index: Tensor, plain: Tensor) -> tuple[Tensor, ...]:
        x = F.relu(x, inplace=True)
        return self.norm(self.conv(x)) + skip, skip, index, plain


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(7, 6)

    def forward(self, x: Tensor, skip: Tensor, index: Tensor, plain: Tensor) -> Tensor:
        pooled = (F.relu(x, inplace=True) * skip).mean((2, 3)) + self.table(index)
        return self.head(torch.cat([pooled, plain], 1))


class Chain(nn.Module):
    """Units one after the other: a stage, or all of the model."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        given: Tensor | tuple[Tensor, ...] = values
        for unit in self.units:
            given = unit(*given)
        return given


def model(channels_last: bool = False) -> Chain:
    torch.manual_seed(1)
    whole = Chain([First(), *(Middle() for _ in range(UNITS - 2)), Last()])
    if channels_last:
        whole.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return whole


def cut(whole: Chain, stages: int) -> list[Chain]:
    units = list(whole.units)
    return [Chain(units[first:last]) for first, last in pairwise(bounds(len(units), stages))]


def micro_batches(count: int, channels_last: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Uneven where they cannot be even."""
    random = torch.Generator().manual_seed(2)
    images, labels = torch.randn(10, 3, 6, 6, generator=random), torch.arange(10) % 6
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    return [(images[a:b], labels[a:b]) for a, b in pairwise(bounds(10 - (count == 5), count))]


def loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), labels, reduction="sum") / 10


def accumulate(whole: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The reference: one process, one micro-batch after the other."""
    for images, labels in batches:
        loss(whole(images), labels).backward()


def boundaries(
    stages: Sequence[nn.Module], images: Sequence[Tensor]
) -> Callable[[int, int], list[TensorSpec]]:
    """By running a copy."""
    specs = {}
    for micro, batch in enumerate(images):
        given: tuple[Tensor, ...] = (batch,)
        for number, stage in enumerate(deepcopy(list(stages))):
            specs[number, micro] = [TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in given]
            given = stage(*given)
    return lambda stage, micro: specs[stage, micro]


def lane(
    schedule: str,
    ranks: int,
    rank: int,
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    transport: StageTransport,
    device: torch.device = CPU,
) -> Lane:
    chunks = len(stages) // ranks
    return Lane(
        instruction_lists(schedule, ranks, chunks, len(batches), reduces=True)[rank],
        {number: stages[number] for number in range(rank, len(stages), ranks)},
        len(stages) - 1,
        boundaries(stages, [images for images, _ in batches]),
        transport,
        device,
    )


def state(module: nn.Module) -> dict[str, Tensor]:
    """Gradients and buffers by name; all there is to compare."""
    grads = {f"{name}.grad": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {**grads, **dict(module.named_buffers())}


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The names whose bits are not the same."""
    a, b = state(one), state(other)
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a or name not in b or not torch.equal(a[name], b[name])
    )
