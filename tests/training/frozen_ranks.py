"""Whole runs of two real processes with frozen modules that start to train in the middle, under every layout.

As a program (`python -m tests.training.frozen_ranks FOLDER`) it is one rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.config.recipe import Recipe
from drumline.core.environment import read_rank_info
from drumline.parallel.process_group import init_world
from drumline.parallel.world import World
from drumline.state.checkpoint import read_checkpoint
from drumline.training.loop import train
from tests.launch.ranks import results_of

RANKS, STEPS, UNFROZEN = 2, 5, 2
WORDS = (
    "data.source=tests.training.few_ranks:load",
    "model.name=tests.training.frozen_ranks:net",
    "data.batch=16",
    "data.workers=0",
    f"train.steps={STEPS}",
    "train.eval_every=0",
    "train.freeze=layer1,norm",
    "train.unfreeze_epoch=0.5",
    "checkpoint.every_steps=1",
    "checkpoint.every_epochs=0",
    "checkpoint.keep=9",
    "train.ema=0.9",
    "optim.name=adamw",
    "optim.head_lr=4",
    "optim.layer_decay=0.5",
    "parallel.threads=1",
    "run.device=cpu",
)
"""4 steps per epoch: all of it trains from step 2 on."""
LAYOUTS = {
    "ddp": ("parallel.layout=ddp",),
    "strict": ("run.strict=true", "run.shards=4", "train.sync_bn=true"),
    "fsdp": ("parallel.layout=fsdp", "checkpoint.sharded=true"),
    "pipeline": ("parallel.layout=pipeline", "parallel.split=even", "parallel.micro_batches=2"),
    "own-optimizer-in-pipeline": (
        "parallel.layout=pipeline",
        "parallel.split=even",
        "parallel.micro_batches=2",
        "optim.name=torch.optim:Adam",
        "optim.lr=0.001",
    ),
    "data-x-pipeline": (
        "parallel.layout=pipeline",
        "parallel.stages=1",
        "parallel.micro_batches=2",
        "parallel.batchnorm=sync",
    ),
}
IN_ONE = {
    "single": ("parallel.layout=single",),
    "dp": ("parallel.layout=dp",),
    "model": ("parallel.layout=model", "parallel.virtual=true", "parallel.stages=2", "parallel.split=even"),
}
"""Layouts of one process."""


class Net(nn.Module):
    """`layer1` is the beginning of the name `layer10`."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer1 = self._block(3)
        self.norm = nn.BatchNorm2d(6, affine=False)
        self.layer10 = self._block(6)
        self.layer2 = self._block(6)
        self.fc = nn.Linear(6, classes)

    @staticmethod
    def _block(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(width, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())

    def blocks(self) -> list[nn.Module]:
        return [self.layer1, self.layer10, self.layer2]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer10(self.norm(self.layer1(x)))).mean((2, 3)))


def net(classes: int) -> Net:
    return Net(classes)


def half_frozen(classes: int) -> Net:
    """Frozen by `requires_grad` alone: BatchNorm's statistics still move."""
    model = Net(classes)
    model.layer1.requires_grad_(False)
    return model


def results() -> dict[str, Any]:
    """What rank 0 found."""
    found: dict[str, Any] = results_of("tests.training.frozen_ranks", RANKS)[0]
    return found


def recipe_of(folder: Path, name: str, *words: str) -> Recipe:
    return Recipe.from_args((*WORDS, f"run.dir={folder}", f"run.name={name}", *words))


def trained(folder: Path, name: str, words: tuple[str, ...], world: World) -> dict[str, Any]:
    """Runs to the end, and again from before, at and after the step from which all of it trains."""
    train(recipe_of(folder, name, *words), world)
    for step in (UNFROZEN - 1, UNFROZEN, UNFROZEN + 1):
        resumed = f"checkpoint.resume={saved(folder, name, step)}"
        train(recipe_of(folder, f"{name}-{step}", *words, resumed), world)
    if not world.is_rank_zero:
        return {}
    states = {step: read_checkpoint(saved(folder, name, step))[1] for step in range(1, STEPS + 1)}
    last = states[STEPS]
    return {
        "resumed": [
            same(last, read_checkpoint(saved(folder, f"{name}-{step}", STEPS))[1])
            for step in (UNFROZEN - 1, UNFROZEN, UNFROZEN + 1)
        ],
        "moved": {step: changed(states[step - 1], states[step]) for step in range(2, STEPS + 1)},
        "optimizer": {step: sorted(states[step]["optimizer"]) for step in states},
        "last": {
            f"{group} {key}": each.clone() for group, named in last.items() for key, each in named.items()
        },
    }


def saved(folder: Path, name: str, step: int) -> Path:
    return folder / name / "checkpoints" / f"step-{step}"


def same(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> bool:
    return all(
        one[group].keys() == other[group].keys()
        and all(torch.equal(tensor, other[group][name]) for name, tensor in one[group].items())
        for group in one.keys() | other.keys()
    )


def changed(before: dict[str, dict[str, Tensor]], after: dict[str, dict[str, Tensor]]) -> list[str]:
    """The tensors of model and average that a step has changed."""
    return sorted(
        f"{group} {name}"
        for group in ("model", "average")
        for name, tensor in after[group].items()
        if not torch.equal(tensor, before[group][name])
    )


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = init_world(read_rank_info(os.environ), "cpu", "auto", 60)
    found = {name: trained(folder, name, words, world) for name, words in LAYOUTS.items()}
    torch.save(found, folder / f"{world.rank}.pt")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
