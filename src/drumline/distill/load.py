"""Teachers from their names and weights.

Promises: a teacher's every tensor came from its weights; a run folder brings the model's name along. Refuses a
teacher without weights, and one whose classes are not the data's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from drumline.arguments import names_code
from drumline.errors import UserError
from drumline.launch.world import World
from drumline.models import create_model, load_weights
from drumline.models.weights import WeightFields, resolve_weights
from drumline.recipe import Distill, Recipe
from drumline.recipe_file import load_recipe
from drumline.state.checkpoint import is_checkpoint
from drumline.train import prepare

SHOWN = ("size", "mean", "std", "resize", "interpolation", "exif")
"""Fields of `data` that decide what an evaluated image looks like to a network."""
FIELDS = WeightFields("distill.teacher_weights", "distill.teacher")


@dataclass(frozen=True)
class Loaded:
    """A teacher on this process's device, or on the host; not yet frozen."""

    name: str
    weights: str
    module: nn.Module


def load_teachers(recipe: Recipe, classes: int, world: World, on_host: bool = False) -> list[Loaded]:
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


def other_views(recipe: Recipe, teachers: list[Loaded]) -> list[str]:
    """A warning for each teacher of a run of ours that was shown its images otherwise than they are shown here."""
    words = []
    for teacher in teachers:
        known = _recipe_of(teacher.weights)
        theirs = load_recipe(str(known)).recipe.data if known else recipe.data
        odd = [
            f"data.{name} = {getattr(theirs, name)!r} then, {getattr(recipe.data, name)!r} now"
            for name in SHOWN
            if getattr(theirs, name) != getattr(recipe.data, name)
        ]
        if odd:
            words.append(
                f"WARNING: the teacher {teacher.weights} was trained on other images: {'; '.join(odd)}"
            )
    return words


def teacher_name(path: str) -> str:
    """The model's name, from the recipe of the run that a path belongs to."""
    recipe = _recipe_of(path)
    if recipe is None:
        raise UserError(
            f"distill.teacher is empty, and {path} is not a run folder that could tell it",
            "give the model's name, such as --distill.teacher resnet34",
        )
    return load_recipe(str(recipe)).recipe.model.name


def _recipe_of(path: str) -> Path | None:
    """The recipe of the run that a folder, a checkpoint or an exported file belongs to."""
    place = Path(path)
    inside = is_checkpoint(place) or (place.is_file() and place.parent.name == "weights")
    recipe = (place.parent.parent if inside else place) / "recipe.toml"
    return recipe if recipe.is_file() else None


def _load(recipe: Recipe, name: str, path: str, classes: int, world: World, on_host: bool) -> Loaded:
    prepare.verify_weights(Path(path), FIELDS)
    wanted = classes if recipe.model.classes == "auto" else recipe.model.classes
    module = create_model(name, classes=wanted)
    load_weights(module, path, strict_head=True, fields=FIELDS)
    if on_host:
        return Loaded(name, path, module)
    module = module.to(world.device)
    if prepare.channels_last(recipe, world):
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Loaded(name, path, module)
