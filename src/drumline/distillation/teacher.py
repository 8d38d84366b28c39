"""Teachers: loaded from their weights and run beside the student; one, or an ensemble.

Promises: every tensor of a teacher comes from its weights, which also name the model. Its classes are matched to
those of the data by name. If no method reads logits, it may have classes of its own. A teacher runs in inference
mode, without gradients, in its own precision, on this process's device (in stages: each tensor on the device of its
stage), without making the host wait. `check` verifies this, and that no bit has changed since loading. Rejects a
teacher without weights, and one whose classes differ from the data's if a method reads its logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from drumline.config.recipe import Distill, Recipe
from drumline.config.sources import names_code
from drumline.config.toml import load_recipe
from drumline.core.errors import UserError
from drumline.core.precision import FP32, Precision, autocast
from drumline.data.classes import Classes
from drumline.data.feed.batch import Batch
from drumline.distillation.selection import select_methods
from drumline.models import create_model
from drumline.parallel.strategy import to_device
from drumline.parallel.world import World
from drumline.state.fingerprint import fingerprints_of
from drumline.state.folder import run_of
from drumline.state.model_record import ModelRecord
from drumline.state.weights import (
    OTHER_CLASSES,
    WeightFields,
    classifier_rows,
    load_weights,
    resolve_weights,
    weights_record,
)
from drumline.training.model import reject_nonfinite, verify_weights

Forward = Callable[[Sequence[tuple[int, ...]], Callable[[int], Tensor]], Sequence[Any]]
"""Runs a module on several batches. It receives their shapes and a function that returns the images of each, and
returns the module's output on each, or nothing if a different process has it."""
EnsembleRule = Literal["probabilities", "logits"]
FIELDS = WeightFields("distill.teacher_weights", "distill.teacher")
_AUTOCAST_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


class TeacherOutput(NamedTuple):
    """A teacher's output on a batch: ordinary tensors without gradient."""

    logits: Tensor
    taps: dict[str, Tensor]


@dataclass
class Teacher:
    """One or more frozen networks, called on normalised images."""

    modules: Sequence[nn.Module]
    """The networks themselves, for state and checks."""
    device: torch.device
    taps: Sequence[tuple[str, ...]] = ()
    """The taps that are read from each module; empty: none. With several, they are returned as `stage3@2`."""
    precision: Precision = FP32
    rule: EnsembleRule = "probabilities"
    shares: tuple[float, ...] = (1.0,)
    temperature: float = 1.0
    compiled: bool = False
    _forwards: Sequence[Forward] = field(init=False)
    _devices: dict[tuple[int, str], torch.device] = field(init=False, default_factory=dict)
    """The device of each tensor of a teacher in stages."""
    _identity: Tensor = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.modules) == len(self.shares)
        self.taps = self.taps or [()] * len(self.modules)
        for module in self.modules:
            module.eval().requires_grad_(False)
            if (dtype := self.precision.autocast_dtype) is not None:
                # Casts once what autocast would cast at every step. Norms stay in fp32, as under autocast.
                for layer in module.modules():
                    # Not subclasses: one may compute its weights from stored tensors, in fp32 under autocast.
                    if type(layer) in _AUTOCAST_LAYERS:
                        layer.to(dtype)
            if self.compiled:
                # Evaluation and training batches differ in length: one graph for each instead of a dynamic one.
                module.compile(dynamic=False)
        self._forwards = [
            partial(_run_whole, module, bool(taps))
            for module, taps in zip(self.modules, self.taps, strict=True)
        ]
        self._identity = self._fingerprints()

    def __call__(self, images: Tensor) -> TeacherOutput:
        (output,) = self.outputs_of([tuple(images.shape)], lambda number: images)
        return output

    def outputs_of(
        self, shapes: Sequence[tuple[int, ...]], images_of: Callable[[int], Tensor]
    ) -> list[TeacherOutput]:
        """The outputs on several batches of these shapes; empty in processes without the teacher's last stage."""
        with torch.inference_mode(), autocast(self.device, self.precision):
            outputs = [forward(shapes, images_of) for forward in self._forwards]
            combined = [self._combined(each) for each in zip(*outputs, strict=True)]
        # Backward must not save an inference tensor, but may save its copy.
        return [
            TeacherOutput(logits.clone(), {name: tap.clone() for name, tap in taps.items()})
            for logits, taps in combined
        ]

    def use_stages(self, forwards: Sequence[Forward]) -> None:
        """Runs the modules with these functions from now on. Tensors stay on their present devices; those on the meta
        device belong to other processes. The tensors of this process must be those that were loaded."""
        assert len(forwards) == len(self.modules)
        loaded, here = self._identity, [not tensor.is_meta for _, _, tensor in self._named()]
        self._forwards = forwards
        self._devices = {(number, name): tensor.device for number, name, tensor in self._named()}
        self._identity = self._fingerprints()
        assert torch.equal(self._identity.cpu(), loaded.cpu()[torch.tensor(here)]), (
            "the move changed a tensor"
        )

    def release(self) -> None:
        """Frees the memory, in processes that do not run the teacher."""
        for module in self.modules:
            module.to("meta")

    def check_ranks(self, world: World) -> None:
        """Raises a `UserError` if the ranks have different teachers."""
        ranks = world.all_gather_integers(self._identity.to(self.device))
        different = [rank for rank in range(world.size) if not torch.equal(ranks[rank], ranks[0])]
        if different:
            raise UserError(
                f"distill.teacher_weights: rank(s) {different} have a different teacher from rank 0",
                "give every machine the same weights",
            )

    def check(self) -> None:
        """Raises a `UserError` if a teacher is in training mode, takes gradients, is on a wrong device or has
        changed."""
        for module in self.modules:
            for name, child in module.named_modules():
                if child.training:
                    raise _wrong(f"{name or type(child).__name__} is in training mode", "call eval() on it")
        for number, name, tensor in self._named():
            if tensor.requires_grad or tensor.grad is not None:
                raise _wrong(f"{name} requires gradients", "call requires_grad_(False) on it")
            expected = self._devices.get((number, name), self.device)
            if tensor.device != expected:
                owner = "stage" if self._devices else "process"
                raise _wrong(
                    f"{name} is on {tensor.device}, but its {owner} computes on {expected}",
                    f"move it to the device of its {owner}",
                )
        if (self._fingerprints() != self._identity).any():
            raise _wrong(
                "weights or statistics have changed since they were loaded",
                "find the code that writes to them",
            )

    def _combined(self, outputs: Sequence[Any]) -> TeacherOutput:
        """Combines the outputs of all modules on a batch."""
        pairs = [output if isinstance(output, tuple) else (output, {}) for output in outputs]
        several = len(pairs) > 1
        taps = {
            f"{name}@{number}" if several else name: found[name]
            for number, ((_, found), names) in enumerate(zip(pairs, self.taps, strict=True), start=1)
            for name in names
        }
        logits = [each for each, _ in pairs]
        if len({each.shape for each in logits}) > 1 or not several:
            return TeacherOutput(logits[0], taps)  # nobody reads the logits of teachers of different classes
        return TeacherOutput(ensemble(logits, self.shares, self.rule, self.temperature), taps)

    def _named(self) -> list[tuple[int, str, Tensor]]:
        """Every tensor with the number of its module and its name."""
        return [
            (number, name, tensor)
            for number, module in enumerate(self.modules)
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        ]

    def _fingerprints(self) -> Tensor:
        """The fingerprints of this process's tensors."""
        return fingerprints_of([tensor for _, _, tensor in self._named() if not tensor.is_meta])


@dataclass(frozen=True)
class LiveTeacher:
    """A teacher that runs at every step."""

    teacher: Teacher

    def __call__(self, images: Tensor, batch: Batch) -> TeacherOutput:
        return self.teacher(images)


def _run_whole(
    module: nn.Module, taps: bool, shapes: Sequence[tuple[int, ...]], images_of: Callable[[int], Tensor]
) -> list[Any]:
    """A whole module's outputs, one batch after the other."""
    return [
        module(images_of(each), taps=True) if taps else module(images_of(each)) for each in range(len(shapes))
    ]


def nonfinite_outputs(images: str) -> UserError:
    """The error for a teacher whose weights are finite but whose outputs are not."""
    return UserError(
        f"distill.teacher_weights: the teacher's outputs for {images} are NaN or infinite",
        "use --distill.teacher_precision fp32, or a different teacher; `drumline eval` tests one",
    )


def _wrong(what: str, fix: str) -> UserError:
    return UserError(f"the teacher's {what}; it must stay as it was loaded", fix)


def ensemble(
    logits: Sequence[Tensor], shares: Sequence[float], rule: EnsembleRule, temperature: float
) -> Tensor:
    """Combines the logits of several teachers, in fp32.

    `logits`: Σ wₖ zₖ. `probabilities`: z = T · log Σ wₖ softmax(zₖ / T), so that softmax(z / T) is exactly the
    weighted mean of the softened probabilities. The weights w are the shares, scaled to sum to 1.
    """
    weights = [share / sum(shares) for share in shares]
    if rule == "logits":
        return torch.stack([w * z.float() for w, z in zip(weights, logits, strict=True)]).sum(0)
    logs = [
        torch.log_softmax(z.float() / temperature, dim=-1) + math.log(w)
        for w, z in zip(weights, logits, strict=True)
    ]
    return temperature * torch.logsumexp(torch.stack(logs), dim=0)


@dataclass(frozen=True)
class LoadedTeacher:
    """A teacher on this process's device, or on the host; not yet frozen."""

    name: str
    weights: str
    module: nn.Module
    record: ModelRecord | None = None
    """What its weights file records about it."""
    messages: tuple[str, ...] = ()
    """How its classes were matched to the data's."""
    foreign: bool = False
    """Its classes differ from the data's, so only its features are used."""


def load_teachers(
    recipe: Recipe, classes: Classes, world: World, on_host: bool = False
) -> list[LoadedTeacher]:
    """Every teacher of the recipe, in order. Teachers that will be cut into stages stay `on_host`."""
    names, paths = check_teachers(recipe.distill), recipe.distill.teacher_weights
    reading_logits = select_methods(recipe.distill).reading_logits
    loaded = [
        _load(recipe, name, path, classes, reading_logits) for name, path in zip(names, paths, strict=True)
    ]
    if on_host:
        return loaded
    return [replace(each, module=to_device(each.module, recipe, world.device)) for each in loaded]


def check_teachers(distill: Distill) -> tuple[str, ...]:
    """The model name of each teacher. Rejects invalid settings without building a model."""
    names, weights = distill.teacher, distill.teacher_weights
    if distill.self_taught:
        if initial := [name for name, epochs in select_methods(distill).initial if epochs]:
            raise UserError(
                f"distill.method = {', '.join(initial)}: has an initial phase, which needs a trained teacher",
                f"use a different method with distill.teacher={distill.self_taught}, such as kd",
            )
        return ()
    if not weights:
        raise UserError(
            "distill.teacher_weights is empty: distillation needs a trained teacher",
            "train one (drumline train) and give its run folder, or give a weights file; without a teacher, use "
            "distill.teacher=ema or distill.teacher=peer",
        )
    if names and len(names) != len(weights):
        raise UserError(
            f"distill.teacher names {len(names)} model(s), but distill.teacher_weights has {len(weights)}",
            "give one weights file or run folder per teacher, in the same order",
        )
    if distill.shares and len(distill.shares) != len(weights):
        raise UserError(
            f"distill.shares has {len(distill.shares)} weight(s), but there are {len(weights)} teacher(s)",
            "give one weight per teacher, in their order, or none",
        )
    for path in weights:
        resolve_weights(path, FIELDS)
    return names or tuple(_without_code(teacher_name(path), path) for path in weights)


def teacher_name(path: str) -> str:
    """The model's name, from the record in its weights or from the recipe of its run."""
    if (record := weights_record(resolve_weights(path, FIELDS))) is not None:
        return record.model
    run = run_of(Path(path))
    if run is None:
        raise UserError(
            f"distill.teacher is empty, and {path} is not a run folder that names its model",
            "give the model's name, such as --distill.teacher resnet34",
        )
    return load_recipe(str(run / "recipe.toml")).recipe.model.name


def _without_code(name: str, path: str) -> str:
    """A model name from a teacher's recipe. Rejects one that would run code: the run folder may be untrusted."""
    if names_code(name):
        raise UserError(
            f"{path}: its recipe names the model {name}, which runs the code of {name.partition(':')[0]}",
            f"if you trust that code, name the model on the command line: distill.teacher={name}",
        )
    return name


def _load(
    recipe: Recipe, name: str, path: str, classes: Classes, reading_logits: Sequence[str]
) -> LoadedTeacher:
    """A teacher on the host. Without methods that read logits, it keeps classes of its own, or has none."""
    verify_weights(Path(path), FIELDS)
    count = len(classes) if recipe.model.classes == "auto" else recipe.model.classes
    record = weights_record(resolve_weights(path, FIELDS))
    arguments = record.arguments if record is not None and record.model == name else {}
    module = create_model(name, classes=count, **arguments)
    try:
        report = load_weights(module, path, strict_head=bool(reading_logits), classes=classes, fields=FIELDS)
    except UserError as error:
        if error.code != OTHER_CLASSES:
            raise
        reads = "reads" if len(reading_logits) == 1 else "read"
        raise UserError(
            error.what,
            f"{', '.join(reading_logits)} {reads} the teacher's logits: give a teacher that was trained on the "
            "data's classes, or use only methods on features, such as hint, attention or crd",
            error.code,
        ) from error
    notes, foreign = report.notes, bool(report.reinitialised)
    if foreign:
        rows = classifier_rows(path, module, FIELDS)
        if rows:
            module = create_model(name, classes=rows, **arguments)
            load_weights(module, path, fields=FIELDS)
        else:
            for key in report.reinitialised:
                nn.init.zeros_(module.get_parameter(key))
        own = f"its {rows:,} classes are not the data's" if rows else "it has no classifier"
        notes = (f"teacher {name} ({path}): {own}, so only its features are used",)
    reject_nonfinite(module, report.file, FIELDS)
    return LoadedTeacher(name, path, module, report.record, notes, foreign)
