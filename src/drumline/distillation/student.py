"""The student and its helpers as one module with one forward, and how they are fitted to a teacher.

Promises: one DDP wraps the module, so every helper's gradient is exchanged. Features are returned, never stored. The
student inside is unchanged and is exported alone (`student`). `fit_networks` rejects networks that do not fit a
method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from drumline.config.layouts import layout_named
from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.distillation.method import Method, Needs, NetworkInfo, Taps, require_tap, stages_among
from drumline.distillation.own_method import own_code, title_of
from drumline.distillation.selection import Selection
from drumline.distillation.teacher import LoadedTeacher
from drumline.models.base import Output, VisionModel
from drumline.models.tapped import SECOND_HEAD, Tapped, norm_before, parse_taps, with_taps

_HELPER_SEED = 0x68656C70
"""Mixed into the seed, so that helpers do not start from the student's random numbers."""


class StudentOutput(NamedTuple):
    """The output of a student with helpers."""

    logits: Tensor
    taps: dict[str, Tensor]
    """The student's taps that a method needs."""
    helper_outputs: dict[str, dict[str, Tensor]]
    """Method to the output of its helper."""


class StudentWithHelpers(nn.Module):
    """`student` maps images to logits or, called with `taps=True`, to (logits, taps)."""

    def __init__(
        self,
        student: nn.Module,
        helpers: Mapping[str, nn.Module],
        needs: Mapping[str, Needs],
        reading_teacher: Collection[str] = (),
        runs_student: bool = True,
        classes: int = 0,
    ) -> None:
        super().__init__()
        self.student = student
        self.helpers = nn.ModuleDict(helpers)
        self.needs = {
            name: need if name in reading_teacher else Needs(need.student, ()) for name, need in needs.items()
        }
        """The taps that helpers read; the teacher's only for the methods in `reading_teacher`."""
        self.taps = _unique(tap for need in needs.values() for tap in need.student)
        self.runs_student, self.classes = runs_student, classes

    def forward(self, images: Tensor, teacher_taps: Taps) -> StudentOutput:
        """One forward of the student, then of each helper. If no helper reads the teacher, its taps may be
        missing."""
        if not self.runs_student:
            return self.after(images.new_zeros((len(images), self.classes)), teacher_taps)
        return self.after(
            self.student(images, taps=True) if self.taps else self.student(images), teacher_taps
        )

    def after(self, output: Output, teacher_taps: Taps) -> StudentOutput:
        """The output of the whole module, given the student's."""
        logits, taps = (output, {}) if isinstance(output, Tensor) else output
        helper_outputs = {
            name: helper(_only(taps, self.needs[name].student), _only(teacher_taps, self.needs[name].teacher))
            for name, helper in self.helpers.items()
        }
        return StudentOutput(logits, _only(taps, self.taps), helper_outputs)


@dataclass(frozen=True)
class FittedMethod:
    """A method and the teacher that it reads. With several teachers, a method on features occurs once for each."""

    name: str
    """Such as `hint`, or `hint_2` for the second of several teachers."""
    selected: str
    """Its name in the recipe."""
    method: Method
    needs: Needs
    """Taps of the second of several teachers have names such as `stage3@2`."""
    teacher: int = 0
    share: float = 1.0
    """Of its weight."""


@dataclass(frozen=True)
class FittedNetworks:
    """Student and teachers as the methods see them."""

    model: nn.Module
    """The student as it is evaluated and exported."""
    student: nn.Module
    """The same network, with the taps that the methods need."""
    teachers: tuple[LoadedTeacher, ...]
    """They can return the taps that the methods need."""
    student_info: NetworkInfo
    teacher_infos: tuple[NetworkInfo, ...]
    methods: tuple[FittedMethod, ...]
    warnings: tuple[str, ...] = ()
    """Warnings about taps that the recipe names but no method reads."""

    @property
    def student_taps(self) -> tuple[str, ...]:
        return _unique(tap for each in self.methods for tap in each.needs.student)

    @property
    def teacher_taps(self) -> tuple[str, ...]:
        return _unique(tap for each in self.methods for tap in each.needs.teacher)

    def taps_of(self, teacher: int) -> tuple[str, ...]:
        """The taps of one of the teachers that the methods need, by its own names."""
        own = (each for each in self.methods if each.teacher == teacher)
        return _unique(own_name(tap) for each in own for tap in each.needs.teacher)

    @property
    def foreign(self) -> bool:
        """Whether a teacher has classes of its own."""
        return any(each.foreign for each in self.teachers)

    @property
    def reading_teacher(self) -> tuple[str, ...]:
        """The methods whose helpers read the teacher's taps."""
        return tuple(each.name for each in self.methods if each.method.helper_reads_teacher)

    @property
    def messages(self) -> list[str]:
        """Which modules of third-party networks the taps come from."""
        networks = (
            ("student", self.student, self.student_taps),
            *(("teacher", each.module, self.taps_of(k)) for k, each in enumerate(self.teachers)),
        )
        read_from = [
            f"taps of the {role}: {', '.join(f'{tap} = {model.locations[tap]}' for tap in read)}"
            for role, model, taps in networks
            if isinstance(model, Tapped) and (read := [tap for tap in taps if tap in model.locations])
        ]
        return [*read_from, *self.warnings]

    def with_helpers(self, seed: int, runs_student: bool = True) -> StudentWithHelpers:
        """Student and helpers, on the student's device. The helpers' initial weights depend on the seed alone."""
        torch.manual_seed(seed ^ _HELPER_SEED)
        helpers = {}
        for each in self.methods:
            method = each.method
            with own_code(type(method), "building its helper"):
                helper = method.helper(self.student_info, self.teacher_infos[each.teacher])
            if not isinstance(helper, nn.Module | None):
                raise UserError(
                    f"{title_of(method)}: helper returned a {type(helper).__name__}",
                    "return an nn.Module or None",
                )
            if helper is not None and any(map(is_lazy, helper.parameters())):
                raise UserError(
                    f"{title_of(method)}: its helper has parameters without a shape",
                    'build it from the shapes, such as nn.Linear(student.shapes["pooled"][0], ...), not LazyLinear',
                )
            if helper is not None:
                helpers[each.name] = helper
        needs = {each.name: each.needs for each in self.methods}
        classes = self.student_info.classes
        module = StudentWithHelpers(self.student, helpers, needs, self.reading_teacher, runs_student, classes)
        return module.to(_device(self.student))


def fit_networks(
    recipe: Recipe, selection: Selection, student: nn.Module, teachers: list[LoadedTeacher], size: int
) -> FittedNetworks:
    """Finds the taps that the methods need. Raises a `UserError` if a network does not fit a method."""
    methods = {term.name: term.method for term in selection.methods}
    wants_taps = any(method.reads != "logits" for method in methods.values())
    tapped = student
    example = torch.zeros((1, 3, size, size))
    for key in ("student_taps", "teacher_taps"):
        if getattr(recipe.distill, key) and not wants_taps:
            raise UserError(
                f"distill.{key}: {', '.join(methods)} reads no taps", "remove it, or use a different method"
            )
    if wants_taps:
        tapped = _with_taps(student, "student_taps", recipe.distill.student_taps, example)
        text = recipe.distill.teacher_taps
        teachers = [
            replace(each, module=_with_taps(each.module, "teacher_taps", text, example)) for each in teachers
        ]
    student_info = network_info(tapped, recipe.model.name, example)
    teacher_infos = tuple(network_info(each.module, each.name, example) for each in teachers)
    shares = recipe.distill.shares or (1.0,) * len(teachers)
    fitted = [
        each
        for name, method in methods.items()
        for each in _fitted(name, method, student_info, teacher_infos, shares)
    ]
    if isinstance(tapped, Tapped) and any(SECOND_HEAD in each.needs.student for each in fitted):
        if layout_named(recipe.parallel.layout).staged:
            raise UserError(
                f"parallel.layout = {recipe.parallel.layout}: a student in stages does not return the logits of its "
                "distillation token",
                "use --parallel.layout ddp",
            )
        tapped.use_second_head()
    networks = FittedNetworks(student, tapped, tuple(teachers), student_info, teacher_infos, tuple(fitted))
    read = {
        "student_taps": networks.student_taps,
        "teacher_taps": tuple(own_name(tap) for tap in networks.teacher_taps),
    }
    unread = {
        key: [tap for tap in parse_taps(getattr(recipe.distill, key)) if tap not in taps]
        for key, taps in read.items()
    }
    warnings = (
        f"WARNING: distill.{key} names {', '.join(taps)}, which no method reads"
        for key, taps in unread.items()
        if taps and not selection.phase and not selection.initial  # each phase reads its own
    )
    return replace(networks, warnings=tuple(warnings))


def own_name(tap: str) -> str:
    """The name of a teacher's tap within that teacher: `stage3` for `stage3@2`."""
    return tap.partition("@")[0]


def _fitted(
    name: str,
    method: Method,
    student: NetworkInfo,
    teachers: Sequence[NetworkInfo],
    shares: Sequence[float],
) -> list[FittedMethod]:
    """A method with the teacher, or with each of several whose features it reads."""
    needs = _needs(method, student, teachers[0])
    if len(teachers) == 1 or not needs.teacher:
        return [FittedMethod(name, name, method, needs)]
    fitted = []
    for number, (teacher, share) in enumerate(zip(teachers, shares, strict=True), start=1):
        needs = _needs(method, student, teacher)
        needs = replace(needs, teacher=tuple(f"{tap}@{number}" for tap in needs.teacher))
        part = share / sum(shares)
        fitted.append(FittedMethod(f"{name}_{number}", name, method, needs, number - 1, part))
    return fitted


def _needs(method: Method, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
    """The taps that a method reads. Rejects those that a network does not have."""
    with own_code(type(method), "its needs"):
        needs = method.needs(student, teacher)
    if not isinstance(needs, Needs):
        raise UserError(
            f"{title_of(method)}: needs returned a {type(needs).__name__}",
            "return Needs(student=..., teacher=...)",
        )
    for network, taps in ((student, needs.student), (teacher, needs.teacher)):
        for tap in taps:
            require_tap(method.name, network, tap)
    return needs


def network_info(model: nn.Module, name: str, example: Tensor) -> NetworkInfo:
    """A network's taps and their shapes, from one forward in evaluation mode that leaves the model unchanged."""
    was_training = model.training
    model.eval()
    taps: Mapping[str, Tensor] = {}
    example = example.to(_device(model))
    with torch.no_grad():
        if isinstance(model, VisionModel | Tapped):
            logits, taps = model(example, taps=True)
        else:
            logits = model(example)
    model.train(was_training)
    for tap, value in taps.items():
        dims, form = (2, "N x C") if tap == "pooled" else (4, "N x C x H x W")
        if value.ndim != dims:
            location = model.locations.get(tap) if isinstance(model, Tapped) else None
            raise UserError(
                f"{tap}{f' ({location})' if location else ''} of {name} has shape "
                f"{' x '.join(map(str, value.shape))}; it must be {form}",
                "name a different module with distill.student_taps or distill.teacher_taps",
            )
    stages = stages_among(taps)
    for number, stage in enumerate(stages, start=1):
        if stage != f"stage{number}":
            raise UserError(
                f"{name} has {', '.join(stages)}: without stage{number}, stages would be paired with the wrong "
                "ones of the other network",
                f"name the module stage{number} in distill.student_taps or distill.teacher_taps",
            )
    norms = {tap: norm for tap in taps if (norm := norm_before(model, tap)) is not None}
    shapes = {tap: tuple(value.shape[1:]) for tap, value in taps.items()}
    if isinstance(model, Tapped) and model.has_second_head:
        shapes[SECOND_HEAD] = (logits.shape[1],)
    return NetworkInfo(name, shapes, logits.shape[1], norms)


def _with_taps(model: nn.Module, key: str, text: str, example: Tensor) -> nn.Module:
    try:
        return with_taps(model, text, example.to(_device(model)))
    except UserError as error:
        raise UserError(f"distill.{key}: {error.what}", error.fix, error.code) from error


def _device(model: nn.Module) -> torch.device:
    """The device of a model that has not been cut into stages."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def _only(taps: Taps, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {own_name(name): taps[name] for name in names}


def _unique(taps: Iterable[str]) -> tuple[str, ...]:
    """Without repetitions, in order of appearance."""
    return tuple(dict.fromkeys(taps))
