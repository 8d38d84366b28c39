"""Distillation by a pipeline of real processes over gloo: whole runs, and where each process then has its teacher.

As a program (`python -m tests.distillation.layout_ranks FOLDER`) it is one rank.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drumline.config.recipe import Checkpoint, Data, Distill, Model, Parallel, Recipe, Run, Train
from drumline.core.environment import read_rank_info
from drumline.core.errors import UserError
from drumline.distillation.objective import Distillation
from drumline.distillation.staged_teacher import PipelinedTeacher
from drumline.distillation.task import distillation_task
from drumline.distillation.teacher import LiveTeacher, Teacher
from drumline.models import create_model
from drumline.parallel.process_group import init_world
from drumline.parallel.world import World
from drumline.training.loop import train
from drumline.training.task import Task
from tests.distillation.nets import wakened
from tests.launch.ranks import results_of

MICRO_BATCHES, STEPS = 3, 3
CASES: dict[str, tuple[tuple[str, ...], str, int]] = {
    "whole-logits": (("dkd",), "single", 1),
    "whole-taps": (("attention",), "auto", 1),
    "staged-taps": (("hint",), "pipeline", 1),
    "helpers-norm": (("ofd",), "pipeline", 1),
    "staged-two-teachers": (("kd",), "pipeline", 2),
}
"""Methods, the teacher's layout, and the number of teachers."""


def recipe_of(folder: Path, name: str, **parallel: Any) -> Recipe:
    """resnet14 teaches resnet8 for a few steps. Without `parallel`: plain accumulation in one process."""
    methods, layout, count = CASES[name]
    return Recipe(
        run=Run(seed=3, dir=str(folder), name=name, device="cpu"),
        data=Data(source="digits", batch=24, workers=0),
        model=Model(name="resnet8"),
        train=Train(steps=STEPS, accumulate=1 if parallel else MICRO_BATCHES),
        distill=Distill(
            teacher=("resnet14",) * count,
            teacher_weights=tuple(str(folder / f"{number}.safetensors") for number in range(count)),
            method=methods,
            teacher_layout=layout if parallel else "auto",  # type: ignore[arg-type]
        ),
        parallel=Parallel(threads=1, **parallel),
        checkpoint=Checkpoint(every_steps=2),
    )


def write_teachers(folder: Path) -> None:
    for number in range(2):
        torch.manual_seed(number)
        state = wakened(create_model("resnet14", classes=10)).state_dict()
        save_file({name: t.contiguous() for name, t in state.items()}, folder / f"{number}.safetensors")


def learn(recipe: Recipe, world: World) -> tuple[dict[str, Any], Task]:
    """A whole run; what it found, and its task."""
    built: list[Task] = []

    def build(*given: Any) -> Task:
        built.append(distillation_task(*given))
        return built[0]

    result = train(recipe, world, build)
    return {name: result.metrics[name] for name in ("agreement", "teacher_top1", "top1")}, built[0]


def teacher_in(task: Task) -> tuple[Teacher, bool]:
    """The teacher that the run began with, and whether the objective still has it."""
    assert isinstance(task.objective, Distillation)
    assert isinstance(task.objective.run_teacher, LiveTeacher | PipelinedTeacher)
    return task.objective.run_teacher.teacher, task.objective.teacher is not None


def pipelined(folder: Path, name: str) -> Recipe:
    return recipe_of(folder, name, layout="pipeline", processes=2, micro_batches=MICRO_BATCHES, split="even")


def found(folder: Path, name: str, world: World) -> dict[str, Any]:
    recipe = pipelined(folder, name)
    scores, task = learn(recipe, world)
    teacher, has = teacher_in(task)
    tensors = [tensor for module in teacher.modules for tensor in module.state_dict().values()]
    error_text = ""
    if has:
        teacher.check()
        with torch.no_grad():
            next(t for t in tensors if not t.is_meta).add_(1)
        try:
            teacher.check()
        except UserError as error:
            error_text = error.what
    return {
        "scores": scores,
        "has": has,
        "held": sum(not tensor.is_meta for tensor in tensors),
        "all": len(tensors),
        "error_text": error_text,
        "words": list(task.messages),
    }


def results() -> list[dict[str, Any]]:
    """What both ranks found in each case, and the folder with the runs."""
    return results_of("tests.distillation.layout_ranks", 2, write_teachers)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = init_world(read_rank_info(os.environ), "cpu", "auto", 60)
    recipe = pipelined(folder, "staged-taps")
    made = {name: found(folder, name, world) for name in CASES}
    half = str(folder / "staged-taps" / "checkpoints" / "step-2")
    again = replace(
        recipe,
        run=replace(recipe.run, name="resumed"),
        checkpoint=replace(recipe.checkpoint, resume=half),
    )
    learn(again, world)
    torch.save({"folder": str(folder), **made}, folder / f"{world.rank}.pt")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
