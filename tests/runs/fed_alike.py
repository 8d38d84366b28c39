"""One rank of a run that feeds every rank the samples of the first: `python -m tests.runs.fed_alike FOLDER`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from drumline.config.recipe import Data, Model, Parallel, Recipe, Run, Train
from drumline.core.environment import read_rank_info
from drumline.core.errors import UserError
from drumline.observe.display import Display
from drumline.parallel.process_group import init_world
from drumline.parallel.strategy import Strategy
from drumline.training.loop import train
from drumline.training.schedule import Plan
from drumline.training.sets import Sets
from drumline.training.task import Task, classification


def alike(recipe: Recipe, sets: Sets, plan: Plan, strategy: Strategy, display: Display) -> Task:
    """A task that feeds every rank the samples of the first one."""
    task = classification(recipe, sets, plan, strategy, display)
    rows = strategy.batch_slice(0)
    return replace(task, extend_batches=lambda batches, requests: sets.training(recipe, rows, 0, plan.total))


def main(folder: Path) -> None:
    world = init_world(read_rank_info(os.environ), "cpu", "auto", 60)
    recipe = Recipe(
        run=Run(dir=str(folder), name="x", device="cpu"),
        data=Data(source="digits", batch=16, workers=0),
        model=Model(name="resnet8"),
        train=Train(steps=3),
        parallel=Parallel(threads=1),
    )
    try:
        train(recipe, world, alike)
        said = ""
    except UserError as error:
        said = str(error)
    torch.save({"said": said}, folder / f"{world.rank}.pt")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
