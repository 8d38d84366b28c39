"""The images on which an export is verified: the evaluation split of a run, or images that the user gives.

Promises: images are file bytes, so that the verification includes decoding. If there are more than needed, the chosen
ones are evenly spaced over the split, so that every class appears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from drumline.config.recipe import Recipe
from drumline.config.sources import names_code
from drumline.config.toml import load_recipe
from drumline.core.errors import UserError
from drumline.data.classes import Classes, OtherClasses, label_map
from drumline.data.sources import ArrayDataset, Dataset
from drumline.inference.classifier import Picture
from drumline.inference.images import find_images
from drumline.parallel.world import single_process
from drumline.state.folder import run_of
from drumline.training.sets import open_sets

GIVE = "give some with --images, such as --images photos/val"


@dataclass(frozen=True)
class Sample:
    """An image, and the index of the correct output if it is known."""

    name: str
    read: Callable[[], Picture]
    label: int | None = None


@dataclass(frozen=True)
class Samples:
    """The images to verify on."""

    samples: list[Sample]
    of: str
    """Their origin, for the report."""


def verification_samples(
    path: Path, classes: Classes, images: Sequence[str], most: int | Literal["all"], trust: bool
) -> Samples:
    """The images that the user gives, or else those of the run that `path` belongs to."""
    if images:
        found = find_images(images).images
        listed = [Sample(image.name, image.read) for image in found]
        return Samples(_some(listed, most), "images given")
    run = run_of(path)
    if run is None:
        raise UserError(f"{path} is not part of a run, so there are no images to verify the export on", GIVE)
    recipe = load_recipe(run / "recipe.toml").recipe
    if names_code(recipe.data.source) and not trust:
        raise UserError(
            f"the images of {run} are read by the code of {recipe.data.source}",
            "if you trust that code, add --trust; otherwise give images with --images",
            "untrusted-code",
        )
    if recipe.data.source == "synthetic":
        raise UserError(f"{run} was trained on synthetic images, which reveal no mistakes", GIVE)
    try:
        dataset = _evaluation_set(recipe)
    except (UserError, OSError) as error:
        what = error.what if isinstance(error, UserError) else str(error)
        raise UserError(
            f"the evaluation images of {run} cannot be opened, so the export cannot be verified: {what}",
            f"restore them, or {GIVE}",
        ) from error
    return Samples(_some(_listed(dataset, classes), most), f"evaluation images of {run.name}")


def _evaluation_set(recipe: Recipe) -> Dataset:
    """The set that `drumline eval` scores. No workers: nothing is measured to choose them."""
    recipe = replace(recipe, data=replace(recipe.data, workers=0))
    return open_sets(recipe, single_process(torch.device("cpu")), to_score=True).eval


def _listed(dataset: Dataset, classes: Classes) -> list[Sample]:
    labels: list[int | None] = dataset.labels.tolist()
    try:
        mapped, _ = label_map(classes, Classes.of(dataset), set(dataset.labels.tolist()))
        if mapped is not None:
            labels = mapped[dataset.labels].tolist()
    except OtherClasses:
        labels = [None] * len(dataset)
    return [
        Sample(_name(dataset, sample), partial(_read, dataset, sample), label)
        for sample, label in enumerate(labels)
    ]


def _name(dataset: Dataset, sample: int) -> str:
    return f"sample {sample}" if isinstance(dataset, ArrayDataset) else dataset.where(sample)


def _read(dataset: Dataset, sample: int) -> Picture:
    if isinstance(dataset, ArrayDataset):
        return dataset.take(np.array([sample]))[0]
    stored = dataset.decoded(sample)
    return dataset.read(sample) if stored is None else stored


def _some(samples: list[Sample], most: int | Literal["all"]) -> list[Sample]:
    if most == "all" or len(samples) <= most:
        return samples
    return [samples[index] for index in np.linspace(0, len(samples) - 1, most).round().astype(int)]
