"""A recipe's model, with the weights to start from or to score.

Promises: every rank builds the same model (weights come from the seed alone, or from one verified file). A classifier
of different classes is re-initialised in training, which is logged, and rejected elsewhere. Weights that are not
finite are rejected.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from drumline.config.limits import keyword_arguments
from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.core.files import CorruptError
from drumline.data.classes import Classes
from drumline.data.sources import ArrayDataset
from drumline.models import create_model
from drumline.parallel.world import World
from drumline.state.checkpoint import read_live, verify_checkpoint, verify_checksums
from drumline.state.manifest import MANIFEST
from drumline.state.model_record import ModelRecord
from drumline.state.weights import WeightFields, load_weights, resolve_weights
from drumline.training.sets import Sets

FIELDS = WeightFields()


def initial_model(recipe: Recipe, classes: Classes, world: World) -> tuple[nn.Module, tuple[str, ...]]:
    """The model that training starts from, on the host, and messages about its weights. A classifier of different
    classes is re-initialised."""
    module = build_model(recipe, len(classes))
    if not recipe.model.weights:
        return module, ()
    file = shared_weights(recipe.model.weights, world)
    report = load_weights(module, file, strict_head=False, classes=classes, fields=FIELDS)
    reject_nonfinite(module, file)
    return module, (f"weights from {recipe.model.weights}: {report.loaded} tensors", *report.notes)


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
    file = Path(world.broadcast_object(str(resolve_weights(path, FIELDS)) if world.is_rank_zero else ""))
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
