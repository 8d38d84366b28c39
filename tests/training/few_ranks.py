"""Whole runs of four real processes whose evaluation set is smaller than a batch: three ranks have nothing to score.

As a program (`python -m tests.training.few_ranks FOLDER`) it is one rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.core.environment import read_rank_info
from drumline.distillation.run import distill
from drumline.parallel.process_group import init_world
from drumline.state.checkpoint import read_checkpoint
from drumline.training.evaluate import evaluate_weights
from drumline.training.loop import train
from tests.launch.ranks import results_of

RANKS, SCORED = 4, 5
WORDS = (
    "data.source=tests.training.few_ranks:load",
    "model.name=tests.training.few_ranks:blocks",
    "data.batch=16",
    "data.workers=0",
    "train.steps=3",
    "train.eval_every=0.25",
    "checkpoint.every_steps=1",
    "checkpoint.keep=9",
    "train.ema=0.9",
    "parallel.threads=1",
    "run.device=cpu",
)
"""Evaluated after every step."""
LAYOUTS = {
    "ddp": ("parallel.layout=ddp",),
    "strict": ("run.strict=true", "run.shards=8"),
    "fsdp": ("parallel.layout=fsdp", "checkpoint.sharded=true"),
    "pipeline": ("parallel.layout=pipeline", "parallel.split=even", "parallel.micro_batches=4"),
    "data-x-pipeline": (
        "parallel.layout=pipeline",
        "parallel.split=even",
        "parallel.stages=2",
        "parallel.micro_batches=2",
    ),
}


def results() -> list[dict[str, Any]]:
    """What every rank found."""
    return results_of("tests.training.few_ranks", RANKS)


def load(path: str, split: str) -> SimpleNamespace:
    """64 samples to train on, a few to evaluate."""
    draw, count = np.random.default_rng(len(split)), 64 if split == "train" else SCORED
    labels = draw.integers(0, 3, count)
    return SimpleNamespace(images=draw.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8), labels=labels)


def blocks(classes: int) -> nn.Module:
    """A model all of whose matrices lie in blocks, so that FSDP gathers none of them with the whole."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(6 if layers else 3, 6, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes))


def recipe_of(folder: Path, name: str, *words: str) -> Recipe:
    return Recipe.from_args((*WORDS, f"run.dir={folder}", f"run.name={name}", *words))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = init_world(read_rank_info(os.environ), "cpu", "auto", 60)
    found: dict[str, Any] = {}
    for name, words in LAYOUTS.items():
        result = train(recipe_of(folder, name, *words), world)
        found[name] = _counted(result.metrics)
    middle = folder / "fsdp" / "checkpoints" / "step-1"
    train(recipe_of(folder, "resumed", *LAYOUTS["fsdp"], f"checkpoint.resume={middle}"), world)
    found["resumed"] = world.broadcast_object(
        _same(*(folder / name / "checkpoints" / "step-3" for name in ("fsdp", "resumed")))
    )
    # A finished run is scored before it takes any step.
    again = train(recipe_of(folder, "fsdp", *LAYOUTS["fsdp"], "checkpoint.resume=auto"), world)
    found["finished fsdp"] = _counted(again.metrics)
    weights = folder / "fsdp" / "weights" / "last.safetensors"
    taught = distill(
        recipe_of(
            folder,
            "taught",
            *LAYOUTS["fsdp"],
            "distill.teacher=tests.training.few_ranks:blocks",
            f"distill.teacher_weights={weights}",
        ),
        world,
    )
    found["taught"], found["teacher"] = taught.metrics["samples"], taught.metrics["teacher_top1"]
    scored = evaluate_weights(recipe_of(folder, "scored", f"model.weights={weights}"), world)
    found["scored"] = _counted(scored.as_dict())
    torch.save(found, folder / f"{world.rank}.pt")
    world.close()


def _counted(metrics: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(metrics[name] for name in ("samples", "correct", "loss"))


def _same(*checkpoints: Path) -> bool:
    """Whether two checkpoints hold the same bits."""
    one, other = (read_checkpoint(each)[1] for each in checkpoints)
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[group][name]) for group in one for name, tensor in one[group].items()
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
