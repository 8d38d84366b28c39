"""Teachers from their names and weights.

Promises: a teacher's every tensor came from its weights, which bring the model's name along; its classes are matched
to the data's by name. Refuses a teacher without weights, and one whose classes are not the data's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from drumline.config.arguments import names_code
from drumline.config.recipe import Distill, Recipe
from drumline.config.toml import load_recipe
from drumline.core.errors import UserError
from drumline.data.classes import Classes
from drumline.models import create_model
from drumline.parallel.strategy import to_device
from drumline.parallel.world import World
from drumline.state.folder import run_of
from drumline.state.model_record import ModelRecord
from drumline.state.weights import WeightFields, load_weights, resolve_weights, weights_record
from drumline.train.model import model_record, refuse_nonfinite, verify_weights
from drumline.train.sets import Sets

FIELDS = WeightFields("distill.teacher_weights", "distill.teacher")


@dataclass(frozen=True)
class Loaded:
    """A teacher on this process's device, or on the host; not yet frozen."""

    name: str
    weights: str
    module: nn.Module
    record: ModelRecord | None = None
    """What its weights say about it."""
    notes: tuple[str, ...] = ()
    """How its classes were matched to the data's."""


def load_teachers(recipe: Recipe, classes: Classes, world: World, on_host: bool = False) -> list[Loaded]:
    """Every teacher of the recipe, in its order; those to be cut into stages stay `on_host`."""
    return [
        _load(recipe, name, path, classes, world, on_host)
        for name, path in zip(check_teachers(recipe.distill), recipe.distill.teacher_weights, strict=True)
    ]


def check_teachers(distill: Distill) -> tuple[str, ...]:
    """The name of each teacher's model. Refuses what can be seen to be wrong without building one."""
    names, weights = distill.teacher, distill.teacher_weights
    if not weights:
        raise UserError(
            "distill.teacher_weights is empty: an untrained teacher teaches nothing",
            "train one (drumline train) and give its run folder, or a weights file",
        )
    if names and len(names) != len(weights):
        raise UserError(
            f"distill.teacher names {len(names)} model(s), distill.teacher_weights has {len(weights)}",
            "give one weights file or run folder for each teacher, in the same order",
        )
    if distill.shares and len(distill.shares) != len(weights):
        raise UserError(
            f"distill.shares has {len(distill.shares)} weight(s), there are {len(weights)} teacher(s)",
            "give one for each, in their order, or none",
        )
    for path in weights:
        resolve_weights(path, FIELDS)
    return names or tuple(_vouched(teacher_name(path), path) for path in weights)


def _vouched(name: str, path: str) -> str:
    """A name that a teacher's recipe gives, if it names no code: the run folder may be a stranger's."""
    if names_code(name):
        raise UserError(
            f"{path}: its recipe names the model {name}, which runs the code of {name.partition(':')[0]}",
            f"if you wrote or trust that code, say so on the command line: distill.teacher={name}",
        )
    return name


def other_views(recipe: Recipe, sets: Sets, teachers: list[Loaded]) -> list[str]:
    """A warning for each teacher of a run of ours that was shown its images otherwise than they are shown here."""
    words = []
    for teacher in teachers:
        odd = teacher.record.other_images(model_record(recipe, sets)) if teacher.record else []
        if odd:
            words.append(
                f"WARNING: the teacher {teacher.weights} was trained on other images: {'; '.join(odd)}"
            )
    return words


def teacher_name(path: str) -> str:
    """The model's name, from the record in its weights, or the recipe of the run that a path belongs to."""
    if (record := weights_record(resolve_weights(path, FIELDS))) is not None:
        return record.model
    run = run_of(Path(path))
    if run is None:
        raise UserError(
            f"distill.teacher is empty, and {path} is not a run folder that could tell it",
            "give the model's name, such as --distill.teacher resnet34",
        )
    return load_recipe(str(run / "recipe.toml")).recipe.model.name


def _load(recipe: Recipe, name: str, path: str, classes: Classes, world: World, on_host: bool) -> Loaded:
    verify_weights(Path(path), FIELDS)
    wanted = len(classes) if recipe.model.classes == "auto" else recipe.model.classes
    module = create_model(name, classes=wanted)
    report = load_weights(module, path, classes=classes, fields=FIELDS)
    refuse_nonfinite(module, report.file, FIELDS)
    if not on_host:
        module = to_device(module, recipe, world.device)
    return Loaded(name, path, module, report.record, report.notes)
