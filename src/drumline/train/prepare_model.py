"""From a recipe to its model, with the weights to start from or to score.

Promises: builds the same model on every rank (weights come from the seed alone, or from one verified file); a
classifier of other classes is re-initialised in training, which is said, and is refused elsewhere; so are weights
that are not finite.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from drumline.config.layouts import STAGED
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
from drumline.train.prepare import Sets, channels_last

FIELDS = WeightFields()


def prepare_model(recipe: Recipe, classes: Classes, world: World) -> tuple[nn.Module, tuple[str, ...]]:
    """The bare model on this rank's device, and what to say about the weights it started from. A classifier of other
    classes is re-initialised."""
    module = build_model(recipe, len(classes))
    words: tuple[str, ...] = ()
    if recipe.model.weights:
        file = shared_weights(recipe.model.weights, world)
        report = load_weights(module, file, strict_head=False, classes=classes, fields=FIELDS)
        refuse_nonfinite(module, file)
        words = (f"weights from {recipe.model.weights}: {report.loaded} tensors", *report.notes)
    if recipe.parallel.layout in STAGED:
        return module, words  # each process takes its stages of it to its device
    return to_device(module, recipe, world), words


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
        return create_model(name, classes=wanted)
    except UserError as error:
        raise UserError(f"model.name: {error.what}", error.fix, error.code) from error


def shared_weights(path: str, world: World) -> Path:
    """The verified weights file that a path means, the same one on every rank: the run whose folder it is may go on,
    and save a newer one meanwhile."""
    file = Path(world.broadcast_object(str(resolve_weights(path, FIELDS)) if world.is_rank_zero else ""))
    verify_weights(file)
    return file


def refuse_nonfinite(
    module: nn.Module,
    file: Path,
    fields: WeightFields = FIELDS,
) -> None:
    """Weights of a run that diverged teach and score nothing. (Infinite buffers may be masks.)"""
    odd = [name for name, tensor in module.named_parameters() if not tensor.isfinite().all()]
    odd += [name for name, tensor in module.named_buffers() if tensor.isnan().any()]
    if odd:
        some = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
        verb = "contains" if len(odd) == 1 else "contain"
        raise UserError(
            f"{fields.weights} = {file}: {some} {verb} NaN or infinity: the run they come from diverged",
            "give an earlier checkpoint of that run, or other weights",
        )


def to_device(module: nn.Module, recipe: Recipe, world: World) -> nn.Module:
    """On this rank's device, in the recipe's memory layout."""
    module = module.to(world.device)
    if channels_last(recipe, world):
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def model_record(recipe: Recipe, sets: Sets) -> ModelRecord:
    """What is stored with the model that this run trains."""
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
    )


def verify_weights(path: Path, fields: WeightFields = FIELDS) -> None:
    """Weights of ours are checked against the checksums that lie beside them before they are used."""
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
