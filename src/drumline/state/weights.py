"""Loads weights into a model, and exports them as safetensors.

Promises: after `load_weights`, every tensor of the model comes from the file, except those that the report lists, and
the classifier's rows are in the order of the requested classes. `export_weights` is atomic. Rejects weights of a
different model, and names the model that they fit; and a classifier of different classes, unless it may be
re-initialised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drumline.core.errors import UserError
from drumline.core.files import CorruptError, write_file
from drumline.core.text import counted, either
from drumline.data.classes import Classes, OtherClasses, head_order
from drumline.models.base import VisionModel
from drumline.models.parts import head_name
from drumline.models.registry import CIFAR, IMAGENET, create_model
from drumline.state.manifest import MANIFEST, read_manifest
from drumline.state.model_record import ModelRecord, metadata_record, record_of
from drumline.state.pretrained import TORCHVISION, is_pretrained, pretrained_file, pretrained_record
from drumline.state.tensors import file_metadata, write_tensors
from drumline.state.weight_files import State, WeightFields, named_path, read_state, unwrapped_state

OTHER_CLASSES = "other-classes"
"""The code of the error about weights of different classes."""


@dataclass(frozen=True)
class WeightReport:
    """The result of `load_weights`."""

    file: Path
    loaded: int
    """Number of tensors loaded from the file."""
    reinitialised: tuple[str, ...]
    """Tensors of the classifier that were not loaded, because the file has different classes."""
    record: ModelRecord | None = None
    """The record of the model, if drumline wrote the file."""
    notes: tuple[str, ...] = ()
    """How its classes were matched, and why a classifier is re-initialised."""


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    strict_head: bool = True,
    classes: Classes | None = None,
    fields: WeightFields | None = None,
) -> WeightReport:
    """Loads weights into a model, in place, from a file, a checkpoint or a run folder (see `resolve_weights`).

    Accepts a state dict, also under `state_dict`, `model` or `model_state_dict` (or `model_ema` and the like, if
    there is nothing else), and prefixes that all keys share, such as those of DataParallel, DDP, torch.compile and
    Lightning. The model itself must not be wrapped. BatchNorm's batch counters may be missing, as in old files. The
    classifier must have as many classes as the model. If `classes` is given and the file has a record, they must be
    the same classes; rows in a different order are sorted by name. A classifier of different classes is rejected, or
    not loaded if `strict_head` is false.
    """
    file = resolve_weights(path, fields)
    record = weights_record(file)
    found = unwrapped_state(read_state(file, fields), model)
    fit = _fit(found, model)
    if not strict_head and _lacks_only_the_head(fit, model):
        fit.head.update(dict.fromkeys(fit.missing, "it has no classifier"))
        fit.missing.clear()
    if fit.missing or fit.unexpected or fit.misshapen:
        raise _misfit(file, found, model, fit, fields)
    other, order, note = "; ".join(dict.fromkeys(fit.head.values())), None, ""
    if record is not None and classes is not None:
        try:
            order, note = head_order(record.classes, classes)
        except OtherClasses as difference:
            other = str(difference)
    head = [key for key in _head_keys(model) if key in model.state_dict()]
    if other and strict_head:
        outputs = next((len(found[key]) for key in fit.head), 0)
        raise UserError(
            f"{file} has different classes: {other}",
            fix=_other_classes_fix(record, outputs, fields),
            code=OTHER_CLASSES,
        )
    if other:
        for key in head:
            fit.usable.pop(key, None)
        note = (
            f"the classifier ({', '.join(head)}) is re-initialised because {file} has different classes: {other}"
            + _shared_names(record, classes)
            if head
            else f"the classifier was not found, and {file} has different classes: {other}"
        )
    elif record is None and classes is not None:
        note = f"{file} has no record of its class names: its {len(classes):,} classes are matched by number"
    elif order is not None:
        _sort_head(fit.usable, head, order, file)
    model.load_state_dict(fit.usable, strict=False)
    return WeightReport(file, len(fit.usable), tuple(head) if other else (), record, (note,) if note else ())


def classifier_rows(path: str | Path, model: nn.Module, fields: WeightFields | None = None) -> int:
    """How many classes the weights of a model have; 0 if they have no classifier."""
    found = unwrapped_state(read_state(resolve_weights(path, fields), fields), model)
    found = _renamed(found, model, model.state_dict())
    return next((len(found[key]) for key in _head_keys(model) if key in found), 0)


def record_of_weights(path: str | Path, fields: WeightFields | None = None) -> ModelRecord | None:
    """The record of a value of `model.weights`; None if the weights do not have one."""
    if is_pretrained(str(path)):
        return pretrained_record(str(path))
    return weights_record(resolve_weights(path, fields))


def fitting_models(path: str | Path, fields: WeightFields | None = None) -> list[str]:
    """The built-in models that the tensors of a file fit, with any number of classes or without a classifier."""
    state = read_state(resolve_weights(path, fields), fields)
    return list(_fitting_names(unwrapped_state(state, nn.Identity()), headless=True))


def weights_record(file: Path) -> ModelRecord | None:
    """The record of the model in a weights file; None for files of other programs and of early versions."""
    if file.suffix != ".safetensors":
        return None
    try:
        if (file.parent / MANIFEST).exists():
            return record_of(read_manifest(file.parent).environment)
        return metadata_record(file_metadata(file.resolve()))
    except (CorruptError, ValueError) as reason:
        raise UserError(
            f"cannot load weights: {reason}",
            fix="the file may be truncated or damaged: copy or export it again",
        ) from reason


def resolve_weights(path: str | Path, fields: WeightFields | None = None) -> Path:
    """The weights file of a path: the file itself; of `torchvision:NAME` or `timm:NAME` the published one; or in a
    folder the first of `model.safetensors` (a checkpoint), `weights/best.safetensors`, `weights/last.safetensors`,
    the model of the newest `checkpoints/step-N` (a run), `best.safetensors` and `last.safetensors` (the `weights` of
    a run). A sharded model is represented by its first shard.
    """
    if is_pretrained(str(path)):
        return pretrained_file(str(path))
    path = Path(path)
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(
            f"{named_path(path, fields)}: no such file or folder",
            fix=f"did you mean torchvision:{path}?"
            if str(path) in TORCHVISION
            else "give a weights file, a checkpoint folder, a run folder, torchvision:NAME or timm:NAME",
        )
    plain = ("model.safetensors", "weights/best.safetensors", "weights/last.safetensors")
    inside = (path / "best.safetensors", path / "last.safetensors")
    steps = [
        (int(match[1]), folder)
        for folder in path.glob("checkpoints/step-*")
        if (match := re.fullmatch(r"step-(\d+)", folder.name))
    ]
    newest_first = [
        file
        for _, folder in sorted(steps, reverse=True)
        for file in (folder / "model.safetensors", *_first_shard(folder))
    ]
    for candidate in [*_first_shard(path), *(path / name for name in plain), *newest_first, *inside]:
        if candidate.is_file():
            return candidate
    raise UserError(
        f"{path} has no weights: no model.safetensors, no weights folder, no checkpoints/step-N",
        fix="give a weights file, a checkpoint folder or a run folder",
    )


def _first_shard(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("model.shard-0-of-*.safetensors"))[:1]


def export_weights(model: nn.Module, path: str | Path) -> None:
    """Writes the parameters and buffers of a model, without wrappers, as a safetensors file."""
    export_tensors(unwrap(model).state_dict(), path)


def export_tensors(
    tensors: Mapping[str, Tensor], path: str | Path, record: ModelRecord | None = None
) -> None:
    """Writes the state of a model as a safetensors file, with the model's record in its metadata."""
    # Copies: safetensors rejects tensors that share memory.
    state = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        write_tensors(temporary, state, metadata=record.metadata() if record else {"format": "pt"})

    write_file(Path(path), write)


@dataclass(frozen=True)
class _Fit:
    """How the tensors of a file match those of a model. The dicts map a key to what differs."""

    usable: dict[str, Tensor]
    head: dict[str, str]
    misshapen: dict[str, str]
    missing: list[str]
    unexpected: list[str]


def _fit(found: State, model: nn.Module) -> _Fit:
    wanted = model.state_dict()
    found = _renamed(found, model, wanted)
    head_keys = _head_keys(model)
    fit = _Fit({}, {}, {}, [], [key for key in found if key not in wanted])
    for key, ours in wanted.items():
        theirs = found.get(key)
        if theirs is None:
            if not key.endswith("num_batches_tracked"):
                fit.missing.append(key)
        elif theirs.shape == ours.shape:
            fit.usable[key] = theirs
        else:
            only_classes = key in head_keys and theirs.shape[1:] == ours.shape[1:]
            difference = f"{key} is {_shape(theirs)} in the file and {_shape(ours)} in the model"
            (fit.head if only_classes else fit.misshapen)[key] = difference
    return fit


def _lacks_only_the_head(fit: _Fit, model: nn.Module) -> bool:
    """Whether the classifier is all that the file does not have."""
    return fit.missing == [key for key in _head_keys(model) if key in model.state_dict()]


def _shared_names(record: ModelRecord | None, classes: Classes | None) -> str:
    """A note about classes that weights and data share if each also has others."""
    shared = (
        set(record.classes.names) & set(classes.names) if record is not None and classes is not None else ()
    )
    if not shared or record is None or not record.classes.named:
        return ""
    return f"; so are the rows of {counted(len(shared), 'class', 'classes')} that both have"


def _head_keys(model: nn.Module) -> tuple[str, str]:
    """The keys of the classifier."""
    name = head_name(model)
    return f"{name}.weight", f"{name}.bias"


def _sort_head(usable: dict[str, Tensor], head: list[str], order: NDArray[np.int64], file: Path) -> None:
    """Sorts the classifier's rows by the data's classes. Outputs beyond the classes stay."""
    rows = torch.from_numpy(order)
    if not head or any(len(usable[key]) < len(rows) for key in head):
        raise UserError(
            f"{file} has its classes in a different order from the data, and its classifier was not found",
            fix="give the data's classes in the order of the weights' classes",
        )
    for key in head:
        usable[key] = torch.cat([usable[key][rows], usable[key][len(rows) :]])


def _other_classes_fix(record: ModelRecord | None, outputs: int, fields: WeightFields | None) -> str:
    if fields is None:
        build = f"build the model with create_model(..., classes={outputs}), or " if outputs else ""
        return f"{build}load everything but the classifier with strict_head=False"
    if record is None:
        return "give weights of the same classes, or set model.classes to the number in the file"
    return (
        f"give {fields.weights} that were trained on the data's classes, or rename the data's class folders to the "
        "names of the weights' classes"
    )


def _renamed(found: State, model: nn.Module, wanted: State) -> State:
    """The same tensors under our names, where published weights of this model use others."""
    if not isinstance(model, VisionModel):
        return found
    result = {}
    for key, tensor in found.items():
        ours = key
        for theirs, spelling in model.published_names:
            ours = ours.replace(theirs, spelling)
        result[ours if ours in wanted and key not in wanted else key] = tensor
    return result


def unwrap(model: nn.Module) -> nn.Module:
    """The model without the wrappers of torch.compile, DataParallel and DDP."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        inner = model.module
    return model if inner is None else unwrap(inner)


def _misfit(file: Path, found: State, model: nn.Module, fit: _Fit, fields: WeightFields | None) -> UserError:
    parts = [
        f"{counted(len(names), 'tensor')} {one if len(names) == 1 else several} ({_a_few(names)})"
        for one, several, names in (
            ("is missing", "are missing", fit.missing),
            ("is unknown to the model", "are unknown to the model", fit.unexpected),
            ("has a different shape", "have different shapes", list(fit.misshapen.values())),
        )
        if names
    ]
    names = list(_fitting_names(found))
    how = f"set {fields.name} to that" if fields else "create that model"
    fix = f"the file fits {either(names)}: {how}" if names else "give this model's own weights"
    return UserError(f"{file} does not fit this {type(model).__name__}: {'; '.join(parts)}", fix=fix)


def _fitting_names(found: State, headless: bool = False) -> Iterator[str]:
    """Our models that the tensors fit, with any number of classes; with `headless`, also without a classifier."""
    for name in (*IMAGENET, *(f"cifar/{name}" for name in CIFAR)):
        with torch.device("meta"):
            candidate = create_model(name)
        fit = _fit(found, candidate)
        missing = fit.missing and not (headless and _lacks_only_the_head(fit, candidate))
        if not (missing or fit.unexpected or fit.misshapen):
            yield name


def _a_few(names: list[str]) -> str:
    names = sorted(names, key=lambda name: name.endswith("num_batches_tracked"))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"
