"""Gradients through pipelines of every shape on gloo, against plain accumulation in one process.

As a program (`python -m tests.parallel.pipeline.equality_ranks FOLDER`) it forks eight ranks, so that torch is loaded
once, and lays every case over as many of them as it needs. What differs is left in FOLDER/0.pt.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.core.environment import read_rank_info
from drumline.core.precision import FP32
from drumline.data.feed.batch import Batch
from drumline.data.feed.sampler import bounds, rank_slice
from drumline.models.registry import create_model
from drumline.models.resnet import BasicBlock, ResNet
from drumline.parallel.norm import MODES, Mode, apply_norm_mode, commit_statistics, world_total
from drumline.parallel.pipeline.cut import trace
from drumline.parallel.pipeline.schedule import SCHEDULES, Shape, max_in_flight
from drumline.parallel.pipeline.split import even_cuts
from drumline.parallel.pipeline.stage import Segment, TensorSpec, boundaries
from drumline.parallel.pipeline.step import OwnStages, PipelineStep, Tail
from drumline.parallel.process_group import init_world
from drumline.parallel.world import Grid, World, make_grid, single_process

RANKS = 8
CPU = torch.device("cpu")
SAMPLES = {1: 11, 2: 21}
"""Of the global batch, by replicas: uneven micro-batches, and with two replicas uneven shares of 11 and 10."""
CLASSES, SIDE, MICRO = 5, 32, 4


class UNet(nn.Module):
    """Down and up again with skips over the middle, and a classifier: what crosses a cut is more than one tensor."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        widths = (width, 2 * width, 3 * width)
        self.down = nn.ModuleList(_unit(a, b, 2) for a, b in pairwise((3, *widths)))
        self.middle = _unit(widths[-1], widths[-1], 1)
        self.up = nn.ModuleList(_unit(a + b, b, 1) for a, b in pairwise(widths[::-1]))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down[0](images)
        second = self.down[1](first)
        x = self.middle(self.down[2](second))
        x = self.up[0](torch.cat([F.interpolate(x, scale_factor=2.0), second], 1))
        x = self.up[1](torch.cat([F.interpolate(x, scale_factor=2.0), first], 1))
        head: Tensor = self.head(x.mean((2, 3)))
        return head


class Grouped(nn.Module):
    """Norms that no other sample has a part in: micro-batches give the gradient of the batch."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 8, 12, 12, 16, 16, 16, 16)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 1 + (a < b), 1), nn.GroupNorm(4, b), nn.ReLU(inplace=True))
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        head: Tensor = self.head(self.blocks(images).mean((2, 3)))
        return head


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: ResNet(BasicBlock, (2, 2, 2, 2), CLASSES, widths=(8, 8, 12, 16, 24), stem="imagenet"),
    "resnet50": lambda: create_model("resnet50", CLASSES),
    "vgg8": lambda: create_model("vgg8", CLASSES),
    "mobilenet": lambda: create_model("mobilenet_v2_half", CLASSES),
    "unet": UNet,
    "groupnorm": Grouped,
}


@dataclass(frozen=True)
class Case:
    """One pipeline."""

    model: str
    schedule: str
    stages: int
    replicas: int
    mode: Mode = "micro"

    def __str__(self) -> str:
        return f"{self.model}-{self.schedule}-{self.stages}x{self.replicas}-{self.mode}"

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "interleaved" else 1

    @property
    def reference(self) -> str:
        """Cases of the same model, replicas and mode have the same gradients."""
        return f"{self.model}-{self.replicas}-{self.mode}"


EVERY = [Case("resnet18", *each) for each in product(SCHEDULES, (1, 2, 4), (1, 2), MODES)]
OTHERS = [
    Case("vgg8", "1f1b", 4, 1),
    Case("vgg8", "interleaved", 2, 2, "deferred"),
    Case("mobilenet", "1f1b", 2, 2),
    Case("mobilenet", "interleaved", 4, 1, "deferred"),
    Case("resnet50", "1f1b", 2, 1),
    *(Case("unet", schedule, stages, 2) for schedule in SCHEDULES for stages in (2, 4)),
    Case("unet", "1f1b", 4, 1, "sync"),
    *(Case("groupnorm", schedule, stages, 2) for schedule in SCHEDULES for stages in (1, 2, 4)),
]
CASES = [case for case in (*EVERY, *OTHERS) if not (case.model == "unet" and case.stages * case.chunks > 7)]


def _unit(given: int, made: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU(inplace=True)
    )


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().train()


def batch_of(replicas: int, replica: int) -> Batch:
    """A replica's share of the global batch."""
    total = SAMPLES[replicas]
    random = torch.Generator().manual_seed(4)
    images = torch.randint(0, 256, (total, SIDE, SIDE, 3), generator=random, dtype=torch.uint8)
    rows = rank_slice(total, replica, replicas)
    labels = torch.arange(total) % CLASSES
    everything = Batch(images, labels, torch.arange(total), torch.zeros(total, 0))
    return Batch(*(tensor[rows.start : rows.stop] for tensor in everything[:4]))


def pieces(batch: Batch) -> list[Batch]:
    return [
        Batch(*(tensor[first:last] for tensor in batch[:4]))
        for first, last in pairwise(bounds(len(batch.labels), MICRO))
    ]


@dataclass
class Passes:
    """What a step makes of a piece; the loss is a part of the global batch's mean."""

    model: nn.Module
    total: int

    def images(self, batch: Batch) -> Tensor:
        return batch.images.permute(0, 3, 1, 2).float().sub(127).div(64).contiguous()

    def loss(self, batch: Batch) -> Tensor:
        logits = self.model(self.images(batch))
        return F.cross_entropy(logits, batch.labels, reduction="sum") / self.total


class NoDraws:
    active = False

    def switch(self, place: int, device: torch.device | None = None) -> None:
        """Nothing is drawn."""


def accumulated(model: nn.Module, own: Sequence[Batch], total: int) -> dict[str, Tensor]:
    """One micro-batch after the other. Gradients, and what the buffers became."""
    passes = Passes(model, total)
    for piece in own:
        passes.loss(piece).backward()
    return state(model)


def state(model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**gradients, **{name: tensor.clone() for name, tensor in model.named_buffers()}}


def reference(case: Case) -> dict[str, Tensor]:
    """Plain torch, one process: each replica's micro-batches in turn, then the sum; buffers are averaged."""
    found = []
    for replica in range(case.replicas):
        model = built(case.model)
        if case.mode == "frozen":
            for part in model.modules():
                if isinstance(part, _BatchNorm):
                    part.eval()
        if case.mode == "deferred":
            apply_norm_mode(model, "deferred", None, MICRO)
        own = pieces(batch_of(case.replicas, replica))
        found.append(accumulated(model, own, SAMPLES[case.replicas]))
        if case.mode == "deferred":
            commit_statistics(model)
            found[-1] |= dict(model.named_buffers())
    if case.replicas == 1:
        return found[0]
    one, other = found
    return {
        name: one[name] + other[name]
        if name.endswith(".grad")
        else (one[name] + other[name]) / 2
        if one[name].is_floating_point()
        else one[name]
        for name in one
    }


@cache
def concatenated(model: str, replicas: int) -> dict[str, Tensor]:
    """What `sync` means: plain BatchNorm over the micro-batches of both replicas together."""
    both = [pieces(batch_of(replicas, replica)) for replica in range(replicas)]
    joined = [
        Batch(*(torch.cat(tensors) for tensors in zip(*own, strict=True))) for own in zip(*both, strict=True)
    ]
    return accumulated(built(model), joined, SAMPLES[replicas])


@cache
def whole_batch(model: str, replicas: int) -> dict[str, Tensor]:
    every = [batch_of(replicas, replica) for replica in range(replicas)]
    together = Batch(*(torch.cat(tensors) for tensors in zip(*every, strict=True)))
    return accumulated(built(model), [together], SAMPLES[replicas])


@cache
def cut_of(name: str, stages: int) -> tuple[Sequence[Segment], Callable[[int, int], Sequence[TensorSpec]]]:
    """The segments of a model, and what enters each; the same for all cases."""
    model = built(name)
    traced = _traced(name)
    segments = traced.split(even_cuts(traced, stages))

    @cache
    def of_size(size: int) -> list[tuple[TensorSpec, ...]]:
        return boundaries([each.bind(model) for each in segments], torch.zeros(size, 3, SIDE, SIDE))

    return segments, lambda stage, size: of_size(size)[stage]


@cache
def _traced(name: str) -> Any:
    return trace(built(name), {}, sample=torch.zeros(2, 3, SIDE, SIDE))


def pipelined(case: Case, grid: Grid, module: nn.Module) -> PipelineStep:
    """The exchange of a run, around a module that this process has whole."""
    over_processes = grid.world.size > 1
    shape = Shape(case.stages, case.chunks, MICRO, case.schedule, case.replicas, over_processes)
    segments, specs = cut_of(case.model, shape.stages)
    apply_norm_mode(module, case.mode, world_total(grid.peers) if grid.replicas > 1 else None, MICRO)
    module.train()
    own = [each for each in segments if not over_processes or each.number % shape.lanes == grid.place]
    named = dict(module.named_parameters())
    own = OwnStages(
        module=module,
        stages={each.number: each.bind(module) for each in own},
        parameters={each.number: [named[name] for name in each.parameters] for each in own},
        tail=Tail(lambda output: output),
        specs=specs,
        devices=[CPU] * (1 if over_processes else shape.lanes),
        precision=FP32,
        reads_images=False,
    )
    return PipelineStep(own, shape, grid)


class Room:
    """One of the eight ranks, and the grids it takes part in."""

    PAIRS: ClassVar = [[0, 1], [2, 3], [4, 5], [6, 7]]
    HALVES: ClassVar = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.found: dict[str, list[str]] = {}
        none = single_process(CPU)
        halves, pairs = world.split(self.HALVES), world.split(self.PAIRS)
        down, up = world.split(self.PAIRS), world.split(self.PAIRS)
        peers = world.split([[0, 2], [1, 3], [4, 6], [5, 7]])
        self.grids = {
            (1, 1): make_grid(none),
            (1, 2): make_grid(pairs),
            (2, 1): Grid(pairs, 2, none, down, up),
            (2, 2): Grid(halves, 2, peers, down, up),
            (4, 1): Grid(halves, 4, none, world.split(self.HALVES), world.split(self.HALVES)),
            (4, 2): make_grid(world, 4),
        }

    def run(self) -> None:
        """References first, each by one rank; then the cases, several at a time where they need few ranks."""
        wanted = {case.reference: case for case in CASES}
        for case in list(wanted.values())[self.world.rank :: RANKS]:
            torch.save(reference(case), self.folder / f"{case.reference}.ref")
        self.world.broadcast_object(None)
        self.world.all_gather_object(None)
        for (stages, replicas), grid in self.grids.items():
            mine = [case for case in CASES if (case.stages, case.replicas) == (stages, replicas)]
            group = self.world.rank // (stages * replicas)
            for case in mine[group :: RANKS // (stages * replicas)]:
                self.found[str(case)] = list(self.differences(case, grid))

    def differences(self, case: Case, grid: Grid) -> Iterator[str]:
        """What is not as promised, on this rank."""
        module = built(case.model)
        exchange = pipelined(case, grid, module)
        passes = Passes(exchange.own.tail, SAMPLES[case.replicas])
        batch = batch_of(case.replicas, grid.replica)
        exchange.gradients(batch, passes, NoDraws())
        exchange.buffers()
        mine = state(module)
        theirs = torch.load(self.folder / f"{case.reference}.ref", weights_only=True)
        if case.mode == "sync" and case.replicas == 2:
            yield from _near(
                mine,
                concatenated(case.model, case.replicas),
                2e-4,
                grid,
                "plain BatchNorm over both replicas",
            )
            theirs = self._both_at_once(case, grid, batch)
        used = {id(p) for group in exchange.own.parameters.values() for p in group}
        names = [f"{name}.grad" for name, p in module.named_parameters() if id(p) in used]
        own = {
            name
            for stage in exchange.own.stages
            for name in cut_of(case.model, exchange.shape.stages)[0][stage].buffers
        }
        for name in (*names, *sorted(own)):
            if name not in mine:
                yield f"{name} is missing on rank {grid.world.rank}"
            elif not torch.equal(mine[name], theirs[name]):
                yield f"{name} differs on rank {grid.world.rank} by {(mine[name] - theirs[name]).abs().max():.1e}"
        if case.model == "groupnorm":
            yield from _near(mine, whole_batch(case.model, case.replicas), 1e-6, grid, "the whole batch")
        for lane, each in enumerate(exchange.lanes):
            place = grid.place if exchange.shape.over_processes else lane
            promised = max_in_flight(case.schedule, case.stages, case.chunks, MICRO, place)
            if each.peak.micro_batches != promised:
                yield f"holds {each.peak.micro_batches} micro-batches on rank {place}, promised {promised}"

    def _both_at_once(self, case: Case, grid: Grid, batch: Batch) -> dict[str, Tensor]:
        """Accumulation by one process for each replica, which meet in the norms."""
        path = self.folder / f"{case}.ref"
        if grid.ends:
            model = built(case.model)
            apply_norm_mode(model, "sync", world_total(grid.peers), MICRO)
            found = accumulated(model.train(), pieces(batch), SAMPLES[case.replicas])
            for name, tensor in found.items():
                if tensor.is_floating_point():
                    grid.peers.all_reduce(tensor)
                    found[name] = tensor if name.endswith(".grad") else tensor / case.replicas
            if grid.replica == 0:
                torch.save(found, path)
        grid.world.all_gather_object(None)
        theirs: dict[str, Tensor] = torch.load(path, weights_only=True)
        return theirs


def _near(
    mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], limit: float, grid: Grid, what: str
) -> Iterator[str]:
    for name, tensor in mine.items():
        if name.endswith(".grad") and not torch.allclose(tensor, theirs[name], rtol=limit, atol=limit):
            yield f"{name} is far from {what} by {(tensor - theirs[name]).abs().max():.1e}, rank {grid.world.rank}"


def rank_main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = init_world(read_rank_info(os.environ), "cpu", "gloo", 60)
    room = Room(world, folder)
    room.run()
    torch.save(room.found, folder / f"rank-{world.rank}.pt")
    world.close()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for case in CASES:  # cut once, before the fork
        _, specs = cut_of(case.model, case.stages * case.chunks)
        for replica in range(case.replicas):
            for piece in pieces(batch_of(case.replicas, replica)):
                specs(0, len(piece.labels))
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(RANKS),
            }
            try:
                rank_main(folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * RANKS, codes
    merged: dict[str, list[str]] = {str(case): [] for case in CASES}
    ran: set[str] = set()
    for rank in range(RANKS):
        for name, differences in torch.load(folder / f"rank-{rank}.pt", weights_only=True).items():
            merged[name] += differences
            ran.add(name)
    assert ran == set(merged)
    torch.save(merged, folder / "0.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
