"""Sharded training on real processes over gloo, and what came of it.

As a program (`python -m tests.parallel.fsdp_ranks FOLDER`) it is one rank.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.config.recipe import Data, Optim, Parallel, Recipe, Run, Train
from drumline.core.environment import read_rank_info
from drumline.core.precision import BF16, FP32, Precision
from drumline.data.feed.batch import Batch
from drumline.data.feed.sampler import rank_slice
from drumline.guards.run.fingerprints import FingerprintMonitor
from drumline.guards.run.nonfinite import NonFiniteGate
from drumline.models import create_model
from drumline.observe.run_log import RunLog
from drumline.parallel.fsdp import FSDPStrategy, exchange_by_host, gathered, kept_whole
from drumline.parallel.process_group import init_world
from drumline.parallel.sharded import local_shard
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import World, single_process
from drumline.state.checkpoint import read_checkpoint, write_checkpoint
from drumline.state.manager import CheckpointManager
from drumline.state.manifest import Position
from drumline.state.shards import ShardWriter
from drumline.training.guards import state_tensors
from drumline.training.state import build_state, recompute_blocks
from drumline.training.step import TrainStep
from drumline.training.task import Classification
from tests.launch.ranks import one_thread, results_of
from tests.training import tiny

BATCH, STEPS = 12, 3
OPTIMS = {
    "sgd": Optim(lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": Optim(name="adamw", lr=0.01, weight_decay=0.01),
    "lars": Optim(name="lars", trust=0.02, weight_decay=1e-3),
    "lamb": Optim(name="lamb", lr=0.01, weight_decay=0.01),
}
FEW = ("sgd", "lamb")
"""Tried on three processes too."""
RECIPE = "[run]\nseed = 1\n"
POSITION = Position(step=3, per_epoch=4)


def results(size: int) -> list[dict[str, Any]]:
    """Of ranks that find the checkpoint of an earlier world in their folder: of one process, or of one fewer."""
    return results_of("tests.parallel.fsdp_ranks", size, {2: one_before_two, 3: two_before_three}[size], 200)


def one_before_two(folder: Path) -> None:
    with one_thread():
        step = plain_step(Odd(), single_process(tiny.CPU), OPTIMS["adamw"], ema=0.7)
        take(step)
    write_checkpoint(folder / "earlier", step.state.tensors(), POSITION, RECIPE, {})


def two_before_three(folder: Path) -> None:
    made = Path(results(2)[0]["folder"]) / "checkpoints" / "step-3"
    shutil.copytree(made, folder / "earlier" / "step-3")


def batch_normed() -> nn.Module:
    torch.manual_seed(1)
    return create_model("resnet8", classes=tiny.CLASSES)


class Odd(nn.Module):
    """Nothing in it looks at more than one sample. Fewer rows than processes, a matrix that is no layer's, a shared
    one and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem = nn.Conv2d(3, 6, 3)
        self.body = nn.Sequential(*(self._block() for _ in range(2)))
        self.narrow = nn.Conv2d(6, 1, 1)
        self.map = nn.Parameter(0.1 * torch.randn(1, 36))
        self.one, self.two = nn.Linear(36, 36), nn.Linear(36, 36)
        self.two.weight = self.one.weight
        self.fixed = nn.Linear(36, 36).requires_grad_(False)
        self.head = nn.Linear(36, tiny.CLASSES)

    @staticmethod
    def _block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(self.body(self.stem(x))).flatten(1) + self.map
        return self.head(self.fixed(self.two(torch.relu(self.one(x)))))


def step_under(
    layout: str,
    model: nn.Module,
    world: World,
    optim: Optim,
    *,
    ema: float = 0.0,
    clip: float = 0.0,
    accumulate: int = 1,
    precision: Precision = FP32,
) -> TrainStep:
    recipe = Recipe(
        run=Run(seed=5),
        data=Data(batch=BATCH),
        optim=replace(optim, clip=clip),
        train=Train(ema=ema, accumulate=accumulate, precision=precision.name),
        parallel=Parallel(layout=layout),  # type: ignore[arg-type]
    )
    state = build_state(create_strategy(recipe, world), model)
    finite = NonFiniteGate(state.module, state.optimizer, world.device, action="stop", scaled=False)
    return TrainStep(state, Classification(0.1), tiny.NORMALISE, finite)


sharded_step = partial(step_under, "fsdp")
plain_step = partial(step_under, "auto")
"""The same alone, or under DDP."""


def images(seed: int) -> Batch:
    return tiny.make(BATCH, seed)


def take(step: TrainStep, first: int = 0, last: int = STEPS, rehearse: bool = True) -> None:
    world = step.world
    mine = rank_slice(BATCH, world.rank, world.size)
    if rehearse:
        step.rehearse(tiny.part(images(77), mine))
    for index in range(first, last):
        step(tiny.part(images(index), mine), index, 0.05 * (index + 1))


def gradients(step: TrainStep) -> dict[str, torch.Tensor]:
    named = step.state.module.named_parameters()
    return {name: each.grad for name, each in named if each.grad is not None}


def state_of(step: TrainStep) -> dict[str, dict[str, torch.Tensor]]:
    """On rank 0, what a checkpoint holds of it."""
    found = step.strategy.gather(step.state.tensors())
    return {group: {n: t.detach().clone() for n, t in each.items()} for group, each in found.items()}


def assert_waited(event: threading.Event) -> None:
    assert event.wait(60)


def whole_state(step: TrainStep) -> dict[str, dict[str, torch.Tensor]]:
    """On rank 0, with the gradients."""
    groups = {**step.state.tensors(), "gradient": gradients(step)}
    found = step.strategy.gather(groups)
    return {group: {n: t.detach().clone() for n, t in each.items()} for group, each in found.items()}


def reference(model: nn.Module, optim: Optim, **options: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Three steps in this process alone."""
    step = plain_step(model, single_process(tiny.CPU), optim, **options)
    take(step)
    return whole_state(step)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = init_world(read_rank_info(os.environ), "cpu", "auto", 60)
    found: dict[str, Any] = {}
    for job in (
        steps,
        norms,
        trouble,
        saving,
        uneven,
        *((against_ddp, mixed, left_out) if world.size == 2 else ()),
    ):
        found.update(job(world, folder))
    torch.save(found, folder / f"{world.rank}.pt")
    world.close()


def steps(world: World, folder: Path) -> dict[str, Any]:
    """A model of one sample at a time, with each optimizer; clipped, averaged, in micro-batches."""
    found: dict[str, Any] = {}
    for name in OPTIMS if world.size == 2 else FEW:
        step = sharded_step(Odd(), world, OPTIMS[name], ema=0.7, clip=0.1, accumulate=2)
        take(step)
        found[name] = whole_state(step)
    assert isinstance(step.strategy, FSDPStrategy)
    held = step.strategy.held
    found["sharded"] = {name: tuple(held.parameters[name].shape) for name in held.sharded}
    found["idle"] = step.without_gradient
    return found


def against_ddp(world: World, folder: Path) -> dict[str, Any]:
    """BatchNorm looks at a process's own samples, so DDP is the measure."""
    sharded = sharded_step(batch_normed(), world, OPTIMS["sgd"], ema=0.7)
    ddp = plain_step(batch_normed(), world, OPTIMS["sgd"], ema=0.7)
    take(sharded)
    take(ddp)
    third = whole_state(sharded)
    again = batch_normed()
    recompute_blocks(again)
    recomputed = sharded_step(again, world, OPTIMS["sgd"], ema=0.7)
    take(recomputed)
    by_host = sharded_step(batch_normed(), world, OPTIMS["sgd"], ema=0.7)
    exchange_by_host(by_host.state.model, world)
    take(by_host)
    # Uneven numbers of forwards, as in an evaluation.
    model = sharded.state.model.eval()
    with gathered(model), torch.no_grad():
        scores = [model(tiny.normalised(images(9).images)) for _ in range(1 + world.rank)]
    with torch.no_grad():
        expected = ddp.state.model.eval()(tiny.normalised(images(9).images))
    model.train()
    take(sharded, 3, 4, rehearse=False)
    ddp.state.model.train()
    take(ddp, 3, 4, rehearse=False)
    return {
        "fsdp": whole_state(sharded),
        "ddp": whole_state(ddp),
        "third": third,
        "recomputed": whole_state(recomputed),
        "by host": whole_state(by_host),
        "scored": [float((score - expected).abs().max()) for score in scores],
    }


def uneven(world: World, folder: Path) -> dict[str, Any]:
    """A model whose matrices all lie in its blocks, scored before the first step and between steps by all ranks but
    the first, which has no batch; and the same steps without a score."""
    scored, plain = (sharded_step(tiny.normed(), world, OPTIMS["sgd"], ema=0.7) for _ in range(2))
    take(plain, 0, 2, rehearse=False)
    for index in range(2):
        for module in (scored.state.model, scored.state.average.module):  # type: ignore[union-attr]
            was = module.training
            module.eval()
            with gathered(module), torch.no_grad():
                for _ in range(world.rank):
                    module(tiny.normalised(images(9).images))
            module.train(was)
        take(scored, index, index + 1, rehearse=False)
    return {"uneven": whole_state(scored), "not scored": whole_state(plain)}


def mixed(world: World, folder: Path) -> dict[str, Any]:
    """bf16, against DDP under autocast: the same arithmetic, but for the order of additions."""
    found: dict[str, Any] = {}
    for name, make in (("bf16 norm", batch_normed), ("bf16 odd", Odd)):
        sharded = sharded_step(make(), world, OPTIMS["sgd"], precision=BF16, accumulate=2)
        take(sharded, 0, 1)
        ddp = plain_step(make(), world, OPTIMS["sgd"], precision=BF16, accumulate=2)
        take(ddp, 0, 1)
        found[name] = (whole_state(sharded), whole_state(ddp))
        kinds = {group: {str(t.dtype) for t in each.values()} for group, each in found[name][0].items()}
        found[f"{name} kinds"] = kinds
    return {**found, "whole": len(kept_whole(Odd(), BF16)) - len(kept_whole(Odd(), FP32))}


def norms(world: World, folder: Path) -> dict[str, Any]:
    """What the sharded tensors measure, against the joined ones."""
    step = sharded_step(Odd(), world, OPTIMS["sgd"])
    take(step, 0, 1)
    length = step.strategy.gradient_norm()
    whole = step.strategy.gather({"gradient": gradients(step)})
    joined = nn.utils.get_total_norm(list(whole["gradient"].values())) if world.is_rank_zero else length
    return {"norm": float(length), "joined norm": float(joined)}


class Choosy(nn.Module):
    """One process leaves a bias out that the others use."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head, self.extra = nn.Linear(3, tiny.CLASSES), nn.Parameter(torch.zeros(tiny.CLASSES))
        self.unused = nn.Parameter(torch.zeros(tiny.CLASSES))
        self._rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.head(x.mean((2, 3)))
        return given + self.extra if self._rank else given


def left_out(world: World, folder: Path) -> dict[str, Any]:
    """A parameter that not all processes use moves alike on all of them."""
    model = Choosy(world.rank)
    take(sharded_step(model, world, OPTIMS["sgd"]))
    return {"extra": model.extra.detach().clone(), "unused": model.unused.grad}


def trouble(world: World, folder: Path) -> dict[str, Any]:
    """A gradient that is not finite in the part of one process alone: nobody may move."""
    step = sharded_step(Odd(), world, OPTIMS["lars"])
    take(step, 0, 1)
    before = [local_shard(each).clone() for each in step.state.module.parameters()]
    step.gate.found.zero_()  # type: ignore[union-attr]
    strategy = step.strategy
    assert isinstance(strategy, FSDPStrategy)
    exchange = strategy._exchange_whole

    def spoiled() -> None:
        if world.rank == world.size - 1:
            strategy.held.parameters["stem.weight"].grad.fill_(torch.inf)  # type: ignore[union-attr]
        exchange()

    strategy._exchange_whole = spoiled  # type: ignore[method-assign]
    take(step, 1, 2, rehearse=False)
    after = [local_shard(each) for each in step.state.module.parameters()]
    return {
        "found": float(step.gate.found),  # type: ignore[union-attr]
        "moved": any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)),
    }


def saving(world: World, folder: Path) -> dict[str, Any]:
    """A checkpoint in pieces, written in the background; then loaded into another model."""
    step = sharded_step(Odd(), world, OPTIMS["adamw"], ema=0.7)
    take(step)
    groups = step.state.tensors()
    whole = state_of(step)
    memory = {"memory": {"bank": torch.arange(7.0)}}
    moved = threading.Event()
    manager = (
        CheckpointManager(folder / "checkpoints", 3, RECIPE, {"threads": 1}, lambda: assert_waited(moved))
        if world.is_rank_zero
        else None
    )
    writer = ShardWriter()
    temporary = world.broadcast_object(manager.begin_sharded(POSITION) if manager else None)
    pieces = step.strategy.shards(groups)
    if manager is not None:
        manager.save_sharded(temporary, pieces, world.size, POSITION, memory)
    else:
        writer.save(temporary, pieces, world.rank, world.size)
    take(step, 3, 4, rehearse=False)  # goes on meanwhile
    moved.set()
    records: list[str] = []
    book = RunLog(None)
    book.record = lambda text, chain: records.append(text)  # type: ignore[method-assign]
    monitor = FingerprintMonitor(lambda: state_tensors(step.state), world, book)
    monitor.take(4, torch.arange(world.rank, BATCH, world.size), record="full")
    seen = monitor.compare()
    if manager is not None:
        manager.close()
    writer.close()
    world.barrier()
    other = sharded_step(Odd(), world, OPTIMS["adamw"], ema=0.7)
    take(other, 0, 1)
    resumed = {}
    for place in ("earlier", "checkpoints"):
        checkpoint = folder / place / "step-3"
        loaded = read_checkpoint(checkpoint)[1] if world.is_rank_zero else None
        other.strategy.scatter(loaded, other.state.tensors(), checkpoint)
        resumed[place] = (loaded, state_of(other))
    take(other, 3, 4, rehearse=False)
    return {
        "saved": whole,
        "resumed": resumed,
        "went on": whole_state(step),
        "went on, resumed": whole_state(other),
        "findings": [finding.what for finding in seen.findings],
        "record": "".join(records),
        "folder": str(folder),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
