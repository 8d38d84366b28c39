"""A distillation run: the initial phases of its methods, then the main phase, each in the loop of `train`.

Promises: an initial phase is a run of its own inside the run folder (`initial-METHOD`), with checkpoints and logs. A
run that is stopped or killed during an initial phase resumes there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.data.sources import detect_source
from drumline.distillation.selection import select_methods
from drumline.distillation.task import distillation_task
from drumline.observe.display import make_display
from drumline.parallel.world import World
from drumline.state.checkpoint import checkpoints, is_checkpoint, newest_valid
from drumline.state.folder import UNSAVED, claim_name, found_of_run, remember
from drumline.training.loop import train
from drumline.training.output import TrainResult


def distill(recipe: Recipe, world: World) -> TrainResult:
    """Runs the recipe. Every rank calls it and gets the same result."""
    initial = [(name, epochs) for name, epochs in select_methods(recipe.distill).initial if epochs]
    done: tuple[Path, ...] = ()
    if initial and not world.broadcast_object(_is_past(recipe) if world.is_rank_zero else False):
        recipe = _named(recipe, world)
        if world.is_rank_zero:
            remember(recipe.run.name)
        for name, epochs in initial:
            phase = _phase_recipe(recipe, name, epochs)
            result = train(phase, world, partial(distillation_task, phase=name, previous=done))
            if not result.finished:
                make_display(world.rank).log(
                    f"stopped in the initial phase of {name}; to resume, repeat the command with "
                    f"run.name={recipe.run.name} checkpoint.resume=auto"
                )
                return replace(result, run=str(Path(result.run).parent))
            done = (*done, Path(phase.run.dir) / phase.run.name)
    return train(recipe, world, partial(distillation_task, previous=done))


def _is_past(recipe: Recipe) -> bool:
    """Whether the run resumes from a checkpoint of its main phase."""
    resume = recipe.checkpoint.resume
    if resume == "auto":
        folder = Path(recipe.run.dir) / recipe.run.name
        if newest_valid(folder / "checkpoints")[0] is not None:
            return True
        # Its checkpoints are gone. Opening the folder reports that; nothing must change before.
        return bool(found_of_run(folder)) and not (folder / UNSAVED).exists()
    if resume != "never" and _stopped_early(Path(resume)):
        raise UserError(
            f"checkpoint.resume = {resume}: was stopped in its initial phase",
            f"resume it under its own name: --run.name {Path(resume).name} --checkpoint.resume auto",
        )
    return resume != "never"


def _stopped_early(run: Path) -> bool:
    """Whether a run folder has an initial phase but no checkpoint of the main phase."""
    begun = not is_checkpoint(run) and any(run.glob("initial-*"))
    return begun and not checkpoints(run / "checkpoints")


def _named(recipe: Recipe, world: World) -> Recipe:
    """The recipe with the name of the run folder that contains the phases."""
    name = recipe.run.name
    if name == "auto":
        source = detect_source(recipe.data.source, recipe.data.path, labels=recipe.data.labels)
        name = world.broadcast_object(claim_name(recipe, source) if world.is_rank_zero else "")
    return replace(recipe, run=replace(recipe.run, name=name))


def _phase_recipe(recipe: Recipe, name: str, epochs: float) -> Recipe:
    lr = recipe.optim.lr if recipe.distill.initial_lr == "auto" else recipe.distill.initial_lr
    return replace(
        recipe,
        optim=replace(recipe.optim, lr=lr),
        run=replace(recipe.run, dir=str(Path(recipe.run.dir) / recipe.run.name), name=f"initial-{name}"),
        train=replace(recipe.train, epochs=epochs, steps=0, ema=0.0, patience=0, unfreeze_epoch=0.0),
        checkpoint=replace(recipe.checkpoint, best="top1"),
    )
