"""A recipe's model, with the weights to start from or to score.

Promises: every rank builds the same model (weights come from the seed alone, or from one verified file). A classifier
of different classes is re-initialised in training, which is logged, and rejected elsewhere. Weights that are not
finite are rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.config.fields import recipe_fields, value_of
from drumline.config.learning import Data
from drumline.config.limits import keyword_arguments
from drumline.config.recipe import Recipe
from drumline.config.sources import names_code
from drumline.core.errors import UserError
from drumline.core.files import CorruptError
from drumline.core.text import either
from drumline.data.classes import Classes
from drumline.data.sources import ArrayDataset
from drumline.models import create_model
from drumline.models.registry import canonical_name, is_cifar
from drumline.parallel.world import World
from drumline.state.checkpoint import read_live, verify_checkpoint, verify_checksums
from drumline.state.manifest import MANIFEST
from drumline.state.model_record import PREPARED, ModelRecord
from drumline.state.pretrained import is_pretrained
from drumline.state.weights import (
    WeightFields,
    fitting_models,
    load_weights,
    record_of_weights,
    resolve_weights,
)
from drumline.training.defaults import FINE_TUNING
from drumline.training.sets import Sets

FIELDS = WeightFields()


def initial_model(recipe: Recipe, classes: Classes, world: World) -> tuple[nn.Module, tuple[str, ...]]:
    """The model that training starts from, on the host, and messages about its weights. A classifier of different
    classes is re-initialised."""
    module = build_model(recipe, len(classes))
    if not recipe.model.weights:
        return module, ()
    path = recipe.model.weights
    file = shared_weights(path, world)
    report = load_weights(module, file, strict_head=False, classes=classes, fields=FIELDS)
    reject_nonfinite(module, file)
    named = f" ({file})" if is_pretrained(path) else ""
    record = record_of_weights(path, FIELDS) if is_pretrained(path) else report.record
    return module, (
        f"weights from {path}{named}: {report.loaded} tensors",
        *report.notes,
        *_other_images(recipe.data, record),
    )


NEW_HEAD = 1 / FINE_TUNING
"""What `optim.head_lr = auto` means for a new classifier on trained weights: the rate of a run from scratch."""


def choose_head_rate(recipe: Recipe, classes: Classes, world: World) -> tuple[Recipe, str]:
    """The recipe with a number for `optim.head_lr = auto`, and a line about it; empty if the recipe has a number."""
    if recipe.optim.head_lr != "auto":  # not chosen yet
        return recipe, ""
    kept = False
    if recipe.model.weights:
        file = shared_weights(recipe.model.weights, world)
        module = build_model(recipe, len(classes))
        kept = not load_weights(module, file, strict_head=False, classes=classes, fields=FIELDS).reinitialised
    rate = NEW_HEAD if recipe.model.weights and not kept else 1.0
    why = "is kept, because the weights have the data's classes" if kept else "is new"
    chosen = replace(recipe, optim=replace(recipe.optim, head_lr=rate))
    return chosen, f"optim.head_lr={rate:g}: the classifier {why}"


DEFAULT_MODEL = "resnet18"
"""The model of a recipe that names neither a model nor weights."""


def resolve_model(recipe: Recipe, images: bool = True, given: Collection[str] = ()) -> dict[str, Any]:
    """The fields that the weights of a recipe decide, by name: `model.name` if it is auto; `model.args` of the same
    model if none are given; and with `images`, the fields of `data` that prepare images and have their defaults,
    except those that are `given` as a value. Also the canonical spelling of names of models. Rejects weights of a
    different model."""
    name, weights = canonical_name(recipe.model.name), recipe.model.weights
    found: dict[str, Any] = {
        "model.name": name,
        "distill.teacher": tuple(map(canonical_name, recipe.distill.teacher)),
    }
    record = record_of_weights(weights, FIELDS) if weights else None
    if record is None:
        if name == "auto":
            found["model.name"] = _fitting_model(weights) if weights else DEFAULT_MODEL
        return _changed(found, recipe)
    if name == "auto":
        if names_code(record.model):
            raise UserError(
                f"{FIELDS.weights} = {weights}: building the model {record.model} runs the code of "
                f"{record.model.partition(':')[0]}",
                f"if you wrote or trust that code, add {FIELDS.name}={record.model}",
            )
        found["model.name"] = record.model
        found["model.args"] = recipe.model.args or record.args
    elif not _may_be(name, record.model):
        raise UserError(
            f"{FIELDS.name} = {name}, but {FIELDS.weights} = {weights} holds weights of {record.model}",
            f"remove {FIELDS.name}, or give weights of {name}",
        )
    elif name == record.model and not recipe.model.args:
        found["model.args"] = record.args
    if images:
        known, kept = recipe_fields(), set(given) - {"data.size", "data.mean", "data.std"}  # auto or empty
        unset = [
            each
            for each in PREPARED
            if getattr(recipe.data, each) == known[f"data.{each}"].default and f"data.{each}" not in kept
        ]
        # A mean belongs to its standard deviation.
        both = {"mean", "std"} <= set(unset)
        found |= {
            f"data.{each}": getattr(record, each) for each in unset if both or each not in ("mean", "std")
        }
    return _changed(found, recipe)


def _changed(values: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Those of the values that the recipe does not have already."""
    return {field: value for field, value in values.items() if value != value_of(recipe, field)}


def _may_be(name: str, other: str) -> bool:
    """Whether two names may mean the same model: torchvision's are also built in, and code may have any name."""
    if names_code(name) or names_code(other):
        return True
    plain = [each.removeprefix("torchvision/").removeprefix("timm/") for each in (name, other)]
    return plain[0] == plain[1]


def _fitting_model(weights: str) -> str:
    """The one built-in model that weights without a record fit."""
    names = fitting_models(weights, FIELDS)
    if len(names) != 1:
        what = f"fits {either(names)}" if names else "fits no built-in model"
        raise UserError(
            f"{FIELDS.name} = auto: {FIELDS.weights} = {weights} does not name its model and {what}",
            f"add {FIELDS.name}=NAME (`drumline doctor --models` lists them)",
        )
    return names[0]


def _other_images(data: Data, record: ModelRecord | None) -> list[str]:
    """A warning if images are prepared differently from those that the weights were trained on."""
    if record is None:
        return []
    theirs = {each: getattr(data, each) for each in PREPARED if getattr(data, each) not in ("auto", ())}
    if not (changes := record.other_images(replace(record, **theirs))):
        return []
    return [f"WARNING: images are prepared differently from those of the weights: {'; '.join(changes)}"]


def size_warning(recipe: Recipe, size: int) -> list[str]:
    """A warning if a CIFAR network gets images of a size that nobody chose for it."""
    name, most = recipe.model.name, 64
    if recipe.data.size != "auto" or size <= most or not is_cifar(name):
        return []
    return [
        f"WARNING: {name} was designed for 32 px, and {size} px take {(size / 32) ** 2:.0f} times as long; set "
        f"data.size={most} (or model.name={DEFAULT_MODEL})"
    ]


def build_model(recipe: Recipe, classes: int) -> nn.Module:
    """The recipe's model, its weights from the seed alone, with at least as many outputs as there are classes."""
    wanted = classes if recipe.model.classes == "auto" else recipe.model.classes
    if wanted < classes:
        raise UserError(
            f"model.classes = {wanted}, but the data has {classes} classes", "give at least as many, or auto"
        )
    torch.manual_seed(recipe.run.seed)
    name = recipe.model.name
    try:
        return create_model(name, classes=wanted, **keyword_arguments(recipe.model.args))
    except UserError as error:
        field = "" if error.what.startswith("model.args") else "model.name: "
        raise UserError(f"{field}{error.what}", error.fix, error.code) from error


def shared_weights(path: str, world: World) -> Path:
    """The verified weights file that a path means, the same one on every rank: the run that owns the folder
    may save a newer one meanwhile."""
    found = resolve_weights(path, FIELDS) if world.is_rank_zero else None
    file = Path(world.broadcast_object(str(found or "")))
    if is_pretrained(path):
        return found or resolve_weights(path, FIELDS)  # each machine has its own cache
    verify_weights(file)
    return file


def reject_nonfinite(
    module: nn.Module,
    file: Path,
    fields: WeightFields = FIELDS,
) -> None:
    """Rejects the weights of a run that diverged. (Infinite buffers may be masks.)"""
    odd = [name for name, tensor in module.named_parameters() if not tensor.isfinite().all()]
    odd += [name for name, tensor in module.named_buffers() if tensor.isnan().any()]
    if odd:
        some = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
        verb = "contains" if len(odd) == 1 else "contain"
        raise UserError(
            f"{fields.weights} = {file}: {some} {verb} NaN or infinity: the run they come from diverged",
            "give an earlier checkpoint of that run, or other weights",
        )


def model_record(recipe: Recipe, sets: Sets) -> ModelRecord:
    """The record that is stored with the trained model."""
    classes, transform = Classes.of(sets.train), sets.transform
    return ModelRecord(
        model=recipe.model.name,
        outputs=len(classes) if recipe.model.classes == "auto" else recipe.model.classes,
        classes=classes,
        size=transform.size,
        mean=tuple(sets.mean),
        std=tuple(sets.std),
        eval_crop=transform.eval_crop,
        resize=transform.resize,
        interpolation=transform.interpolation,
        exif=transform.exif,
        fit="stretch" if isinstance(sets.train, ArrayDataset) else "crop",
        args=recipe.model.args,
    )


def verify_weights(path: Path, fields: WeightFields = FIELDS) -> None:
    """Checks weights that Drumline wrote against the checksums stored with them."""
    folder = resolve_weights(path, fields).parent
    try:
        if (folder / MANIFEST).exists() and read_live(folder, verify_checkpoint) is None:
            raise UserError(
                f"{fields.weights} = {path}: {folder} was deleted by its run just now",
                "give the command again: it takes the newest checkpoint then",
            )
        verify_checksums(folder)
    except CorruptError as reason:
        raise UserError(
            f"{fields.weights} = {path}: {reason}", "give a checkpoint of the run that verifies"
        ) from reason
