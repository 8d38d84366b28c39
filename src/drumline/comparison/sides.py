"""What the arguments of a comparison mean: runs, models by name, or weights.

Promises: a name of a model means the model even if a folder has that name (write `./NAME` for the folder). Weights
that name their model are built and loaded; others are compared with the model on the other side. Rejects code that
only a file names, unless it is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from drumline.comparison.measure import Side
from drumline.config.sources import LIBRARIES, names_code
from drumline.core.errors import UserError
from drumline.models.registry import canonical_name, create_model, model_names, usual_size
from drumline.state.pretrained import is_pretrained
from drumline.state.weight_files import read_state, unwrapped_state
from drumline.state.weights import classifier_rows, load_weights, record_of_weights, resolve_weights

Kind = Literal["folder", "weights", "model"]
_USUAL_SIZE, _CLASSES = 224, 1000


def kind_of(argument: str) -> Kind:
    """Whether an argument is a folder (a run or a checkpoint), a weights file or the name of a model."""
    if is_pretrained(argument):
        return "weights"
    library = argument.partition("/")[0] in LIBRARIES and "/" in argument
    if canonical_name(argument) in model_names() or library or names_code(argument):
        return "model"
    path = Path(argument)
    if path.is_dir():
        return "folder"
    if path.exists() and not path.suffix:
        raise UserError(
            f"{argument} is a file without weights", "give a run folder, a checkpoint or a weights file"
        )
    if path.exists():
        return "weights"
    if "/" in argument or path.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt"):
        raise UserError(
            f"{argument} does not exist",
            "give a run folder, a checkpoint, a weights file or the name of a model",
        )
    return "model"


@dataclass(frozen=True)
class Foreign:
    """Weights that do not record their model."""

    label: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Sides:
    """Both sides, and the size of images that they are made for."""

    a: Side | Foreign
    b: Side | Foreign
    size: int


def open_sides(a: str, b: str, classes: int | Literal["auto"], trust: bool) -> Sides:
    """Builds the models and reads the weights."""
    arguments = (a, b)
    kinds = [kind_of(each) for each in arguments]
    records = [
        record_of_weights(each) if kind != "model" else None
        for each, kind in zip(arguments, kinds, strict=True)
    ]
    outputs = next((record.outputs for record in records if record is not None), _CLASSES)
    sides: list[Side | Foreign | None] = []
    sizes = []
    for argument, kind, record in zip(arguments, kinds, records, strict=True):
        if record is not None:
            if names_code(record.model) and not trust and record.model not in arguments:
                raise UserError(
                    f"{argument} holds a model that is built by the code of {record.model}",
                    "if you trust that code, add --trust",
                    code="untrusted-code",
                )
            model = create_model(record.model, classes=record.outputs, **record.arguments)
            load_weights(model, resolve_weights(argument))
            sides.append(Side(f"{argument} ({record.model})", model, trained=True))
            sizes.append(record.size)
        elif kind == "model":
            sides.append(None)
        else:
            sides.append(Foreign(argument, read_state(resolve_weights(argument), None)))
    for place, argument in enumerate(arguments):
        if sides[place] is not None:
            continue
        other = sides[1 - place]
        torch.manual_seed(0)
        model = create_model(argument, classes=outputs if classes == "auto" else classes)
        if isinstance(other, Foreign):
            rows = classifier_rows(other.label, model) if classes == "auto" else 0
            model = create_model(argument, classes=rows) if rows else model
            sides[1 - place] = Foreign(other.label, unwrapped_state(other.tensors, model))
        sides[place] = Side(argument, model)
        sizes.append(usual_size(argument, model))
    one, two = sides
    assert one is not None
    assert two is not None
    return Sides(one, two, min(sizes, default=_USUAL_SIZE))


def tensors_of(side: Side | Foreign) -> Mapping[str, Tensor]:
    """Parameters and buffers by name."""
    return side.tensors if isinstance(side, Foreign) else side.model.state_dict()
