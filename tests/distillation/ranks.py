"""Every method on real processes over gloo: two optimizer steps, and what each rank found.

As a program (`python -m tests.distillation.ranks FOLDER`) it is one rank.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drumline.config.recipe import Data, Distill, Model, Optim, Recipe, Run, Train
from drumline.core.environment import read_rank_info
from drumline.distillation.methods import METHODS
from drumline.distillation.task import distillation_task
from drumline.guards.run.fingerprints import FingerprintMonitor
from drumline.models import create_model
from drumline.observe.display import make_display
from drumline.observe.run_log import RunLog
from drumline.parallel.process_group import init_world
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import World
from drumline.training.guards import state_tensors
from drumline.training.schedule import make_plan
from drumline.training.sets import normaliser, open_sets
from drumline.training.state import build_state
from drumline.training.step import TrainStep
from tests.distillation.nets import wakened
from tests.launch.ranks import results_of

BATCH = 26
"""Uneven over 4 processes."""
PAIRS = {"crd,rkd": ("crd", "rkd"), "hint,similarity": ("hint", "similarity"), "dkd,dist": ("dkd", "dist")}
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    **{name: ((name,), "") for name in METHODS if not METHODS[name].only_initial},
    **{name: (methods, "") for name, methods in PAIRS.items()},
    **{f"initial {name}": ((name,), name) for name in METHODS if METHODS[name].initial_epochs},
}


def recipe_of(folder: Path, methods: tuple[str, ...]) -> Recipe:
    """kd beside every method; a small bank, so that negatives repeat."""
    options = tuple(text for text in ("crd.K:64", "crd.dim:16") if text.partition(".")[0] in methods)
    return Recipe(
        run=Run(seed=3),
        data=Data(source="digits", batch=BATCH, workers=0),
        model=Model(name="tests.distillation.nets:alone"),
        optim=Optim(lr=0.02, momentum=0.9, warmup_epochs=0),
        train=Train(steps=2),
        distill=Distill(
            teacher=("resnet14",),
            teacher_weights=(str(folder / "teacher.safetensors"),),
            method=methods,
            a=0.5,
            options=options,
        ),
    )


def write_teacher(folder: Path) -> None:
    torch.manual_seed(11)
    state = wakened(create_model("resnet14", classes=10)).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "teacher.safetensors")


def two_steps(folder: Path, name: str, world: World) -> dict[str, Any]:
    """Builds the task as `drumline distill` does and takes its first two steps."""
    methods, phase = CASES[name]
    recipe = recipe_of(folder, methods)
    sets = open_sets(recipe, world)
    plan, strategy = make_plan(recipe, len(sets.train)), create_strategy(recipe, world)
    task = distillation_task(recipe, sets, plan, strategy, make_display(world.rank), phase)
    state = build_state(strategy, task.module, task.model)
    step = TrainStep(state, task.objective, normaliser(sets, recipe))
    found: dict[str, Any] = {}
    with closing(sets.training(recipe, strategy.batch_slice(), 0, 2)) as batches:
        first = next(batches)
        step.rehearse(first)
        idle = list(step.without_gradient)
        step(first, 0, 0.02)
        found["gradients"] = {
            key: parameter.grad.clone()
            for key, parameter in state.module.named_parameters()
            if parameter.grad is not None
        }
        found["meter"] = world.all_reduce(step.meter.sums.clone())
        step(next(batches), 1, 0.02)
    task.objective.check()
    monitor = FingerprintMonitor(lambda: state_tensors(state), world, RunLog(None))
    monitor.take(2, torch.tensor([world.rank]))
    assert not monitor.compare().findings
    groups = state.tensors()
    found["state"] = {
        f"{group}/{key}": tensor.clone() for group, each in groups.items() for key, tensor in each.items()
    }
    found["memory"] = task.objective.collect()
    return {**found, "idle": idle, "terms": list(task.objective.terms)}


def results(size: int) -> list[dict[str, Any]]:
    """What every rank of a world of `size` found, in rank order."""
    return results_of("tests.distillation.ranks", size, write_teacher, seconds=300)


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    world = init_world(read_rank_info(os.environ), "cpu", "auto", 60)
    found = {name: two_steps(folder, name, world) for name in names or CASES}
    torch.save(found, folder / f"{world.rank}.pt")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
