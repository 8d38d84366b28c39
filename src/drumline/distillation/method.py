"""The interface of a distillation method: a pure loss, a declaration of what it needs, and functions on taps.

Promises: a loss does not depend on processes, precision or modules. It receives plain tensors of one floating type
(fp32 in training). It returns one value per sample (scope `sample`), or one value for the global batch (scope
`global_batch`), whose rows have been gathered from all processes. `helper` builds the modules that are trained beside
the student from probed shapes; they run inside the single forward of `StudentWithHelpers`. Stages are paired from the
last one backwards. Maps of different sizes are averaged down to the smaller height and the smaller width. Rejects
networks that lack a tap or have too few stages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from drumline.config.fields import Field, fields_of
from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.models.base import pool_to
from drumline.parallel.world import World

Taps = Mapping[str, Tensor]
Scope = Literal["sample", "global_batch"]
Variant = Literal["paper", "repdistiller"]
"""Whose variant of a method. The accuracies published for CIFAR-100 often come from RepDistiller's."""


@dataclass(frozen=True)
class Weights:
    """Default weights: r for the cross-entropy with the labels, a for kd, b for the method; T is the temperature."""

    r: float = 1.0
    a: float = 0.0
    b: float = 1.0
    T: float = 4.0


@dataclass(frozen=True)
class NetworkInfo:
    """A network as a method sees it: its taps and their shapes, found by one forward of one image."""

    name: str
    """The model's name, for messages."""
    shapes: Mapping[str, tuple[int, ...]]
    """Tap to shape without the batch: (C, H, W) for a map, (C,) for `pooled`."""
    classes: int
    norms: Mapping[str, nn.Module] = field(default_factory=dict)
    """Tap to the BatchNorm directly before its activation, where it is known."""

    @property
    def stages(self) -> tuple[str, ...]:
        """`stage1` to `stageN`."""
        return tuple(f"stage{n}" for n in range(1, len(self.shapes) + 1) if f"stage{n}" in self.shapes)


@dataclass(frozen=True)
class Needs:
    """The names of the taps that a method reads. Logits are always available."""

    student: tuple[str, ...] = ()
    teacher: tuple[str, ...] = ()


@dataclass(frozen=True)
class LossInputs:
    """The outputs of both networks on a batch: this process's micro-batch or, for scope `global_batch`, the rows of
    all processes in the order of the global batch, equal on every process."""

    logits: Tensor
    teacher_logits: Tensor
    taps: Taps
    """The student's taps that the method needs."""
    teacher_taps: Taps
    """The teacher's taps, without gradient."""
    helper_outputs: Taps
    """The output of the method's helper."""
    labels: Tensor
    """Class numbers; -1 for an image without a label."""
    samples: Tensor
    """Sample ids."""
    memory: Memory | None = None
    """The method's state between steps."""
    epoch: Tensor | None = None
    """The epoch, counted from 0; one number on the device."""

    def rows(self) -> list[Tensor]:
        """All tensors with one row per sample, in a fixed order."""
        groups = [self.taps, self.teacher_taps, self.helper_outputs]
        return [
            self.logits,
            self.teacher_logits,
            *(taps[name] for taps in groups for name in taps),
            self.labels,
            self.samples,
        ]

    def with_rows(self, rows: Sequence[Tensor]) -> LossInputs:
        """A copy with these tensors, in the order of `rows()`."""
        logits, teacher_logits, *rest, labels, samples = rows
        left = iter(rest)
        taps, teacher_taps, helper_outputs = (
            {name: next(left) for name in each}
            for each in (self.taps, self.teacher_taps, self.helper_outputs)
        )
        return LossInputs(
            logits,
            teacher_logits,
            taps,
            teacher_taps,
            helper_outputs,
            labels,
            samples,
            self.memory,
            self.epoch,
        )


class Memory(Protocol):
    """State that a method keeps beside the weights, such as CRD's banks. Whether it is sharded over the processes or
    not, its effect does not depend on their number."""

    def at(self, step: int) -> None:
        """Called on the host before each optimizer step; never waits for the device."""

    def live(self) -> list[Tensor]:
        """The tensors of this process that a step writes; they are restored after a rehearsal."""

    def collect(self) -> dict[str, Tensor]:
        """On rank 0, the whole state on the host, independent of the number of processes. A collective: all processes
        call it."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Loads what `collect` returned; each process takes its shard."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that `collect` returns."""


class Method:
    """One way to learn from a teacher. Subclasses with options are frozen dataclasses. Their fields are the options
    (`--distill.options NAME:VALUE`), with the paper's values as defaults and limits beside the types."""

    name: ClassVar[str]
    """Its name in the loss, in options and in messages. Default: the name of the class."""
    reads: ClassVar[str] = "logits"
    """What it reads of both networks, separated by commas: `logits`, taps such as `pooled` or `stage2`, `last stage`,
    and `stages` for all pairs of stages. A method that overrides `needs` describes here what it reads."""
    weights: ClassVar[Weights] = Weights()
    """The weights of the paper."""
    standardised: ClassVar[Weights | None] = None
    """The weights for standardised logits, if the authors of the standardisation changed them."""
    scope: ClassVar[Scope] = "sample"
    least_samples: ClassVar[int] = 1
    """The smallest batch that it can use, over all processes."""
    on_logits: ClassVar[bool] = False
    """Whether it compares logits. Logit standardisation applies only then."""
    mixes: ClassVar[bool] = True
    """Whether it is defined for images without one class: mixed ones (mixup, cutmix), and those without a label
    (`distill.unlabelled`)."""
    helper_reads_teacher: ClassVar[bool] = False
    """Whether its helper reads the teacher's taps. If no helper does, student and teacher run concurrently on a
    GPU."""
    initial_epochs: ClassVar[float] = 0.0
    """Length of its initial phase in the paper, which trains `initial_method` alone before the main phase. 0: it has
    none."""
    only_initial: ClassVar[bool] = False
    """Whether it takes no part in the main phase."""
    warmup: ClassVar[float] = 0.0
    """The warm-up of its weight in the paper, in epochs. Every method takes the options of `TermSchedule`."""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __post_init__(self) -> None:
        """Raises a `UserError` if an option is outside its limits, or is not a finite number."""
        for name, option in options_of(type(self)).items():
            check_option(self.name, option, getattr(self, name))

    @property
    def reads_logits(self) -> bool:
        """Whether it reads the teacher's logits, so that the teacher needs the data's classes."""
        return self.on_logits or "logits" in self.reads

    @classmethod
    def initial_method(cls) -> type[Method]:
        """The method that its initial phase trains."""
        return cls

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        """The taps that it reads. Raises a `UserError` with the reason if the two networks do not fit the method."""
        if self.reads_logits:
            require_same_classes(self.name, student, teacher)
        pairs: list[Pair] = []
        for each in map(str.strip, self.reads.split(",")):
            if each == "stages":
                pairs += require_pairs(self.name, student, teacher)
            elif each == "last stage":
                pairs.append((last_stage(self.name, student), last_stage(self.name, teacher)))
            elif each != "logits":
                pairs.append((require_tap(self.name, student, each), require_tap(self.name, teacher, each)))
        return needs_of(pairs)

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module | None:
        """The module that it trains beside the student, or None. `helper(student_taps, teacher_taps)` returns a dict
        of tensors."""
        return None

    def memory(self, labels: Tensor, seed: int, world: World) -> Memory | None:
        """Its state between steps, or None. `labels`: one per sample id, on the device."""
        return None

    def loss(self, inputs: LossInputs) -> Tensor:
        """(n,) losses for scope `sample`, one number for scope `global_batch`."""
        raise NotImplementedError


def options_of(kind: type[Method]) -> Mapping[str, Field]:
    """The options of a method by name, without those of its schedule."""
    return fields_of(kind) if is_dataclass(kind) else {}


def with_temperature(method: Method, T: Tensor) -> Method:
    """A copy of the method whose temperature is a tensor, which a schedule fills."""
    changed = copy.copy(method)
    object.__setattr__(changed, "T", T)
    return changed


def check_option(method: str, option: Field, value: Any) -> None:
    """Raises a `UserError` if the value of an option is outside its limits, or is not a finite number."""
    finite = Range().check(value) if isinstance(value, int | float) else None
    if wrong := option.check(value) or finite:
        raise UserError(
            f"distill.options: {method}.{option.name} = {value:g}: {wrong.what}",
            f"{wrong.fix} ({method}.{option.name} takes {option.takes()})",
        )


Pair = tuple[str, str]
"""A tap of the student, and the teacher's tap that it is compared with."""


def stages_among(names: Iterable[str]) -> list[str]:
    """The taps named `stageN`, ordered by N."""
    numbers = [name.removeprefix("stage") for name in names if name.startswith("stage")]
    return [f"stage{number}" for number in sorted(int(number) for number in numbers if number.isdecimal())]


def paired_stages(student: Iterable[str], teacher: Iterable[str]) -> list[Pair]:
    """Pairs the stages of two networks, last with last and so on backwards; returns them in forward order."""
    mine, theirs = stages_among(student), stages_among(teacher)
    count = min(len(mine), len(theirs))
    return list(zip(mine[len(mine) - count :], theirs[len(theirs) - count :], strict=True))


def require_pairs(method: str, student: NetworkInfo, teacher: NetworkInfo, least: int = 1) -> list[Pair]:
    """`paired_stages`; raises a `UserError` if there are fewer than `least`."""
    pairs = paired_stages(student.shapes, teacher.shapes)
    if len(pairs) < least:
        counts = " and ".join(f"{network.name} has {len(network.stages)}" for network in (student, teacher))
        raise UserError(
            f"distill.method = {method}: needs at least {least} named stage{'s' * (least > 1)} in each network; "
            f"{counts}",
            "name stages with distill.student_taps and distill.teacher_taps, or use a method on logits such as kd",
        )
    return pairs


def require_tap(method: str, network: NetworkInfo, tap: str) -> str:
    """The tap; raises a `UserError` if the network lacks it."""
    if tap not in network.shapes:
        raise UserError(
            f"distill.method = {method}: reads the tap `{tap}`, which {network.name} does not have (its taps: "
            f"{', '.join(network.shapes) or 'none'})",
            "name the module with distill.student_taps or distill.teacher_taps, or use a method on logits such as kd",
        )
    return tap


def last_stage(method: str, network: NetworkInfo) -> str:
    """The deepest stage; raises a `UserError` if there is none."""
    return require_tap(method, network, network.stages[-1] if network.stages else "stage1")


def require_same_classes(method: str, student: NetworkInfo, teacher: NetworkInfo) -> None:
    """Raises a `UserError` if the logits of the two networks cannot be compared."""
    if student.classes != teacher.classes:
        raise UserError(
            f"distill.method = {method}: compares logits, but the teacher {teacher.name} has {teacher.classes} "
            f"classes and the student {student.name} has {student.classes}",
            "use a teacher with the same classes, or a method that compares features",
        )


def needs_of(pairs: list[Pair]) -> Needs:
    """The taps of all pairs."""
    return Needs(tuple(mine for mine, _ in pairs), tuple(theirs for _, theirs in pairs))


def common_grid(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int]:
    """The smaller height and the smaller width of two shapes (..., H, W)."""
    return min(one[-2], other[-2]), min(one[-1], other[-1])


def at_common_size(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both maps, averaged down to the common grid."""
    grid = common_grid(one.shape, other.shape)
    return pool_to(one, grid), pool_to(other, grid)


def convolution_to(entry: tuple[int, ...], goal: tuple[int, ...]) -> nn.Conv2d | nn.ConvTranspose2d | None:
    """RepDistiller's convolution from maps of one shape (C, H, W) to another: 1×1 for equal sizes, 3×3 with stride 2
    to half the size, transposed 4×4 with stride 2 to twice the size. None for other sizes. There is no bias, because
    a BatchNorm follows and removes it."""
    (mine, *size), (theirs, *wanted) = entry, goal
    if size == wanted:
        return nn.Conv2d(mine, theirs, 1, bias=False)
    if size == [2 * side for side in wanted]:
        return nn.Conv2d(mine, theirs, 3, stride=2, padding=1, bias=False)
    if [2 * side for side in size] == wanted:
        return nn.ConvTranspose2d(mine, theirs, 4, stride=2, padding=1, bias=False)
    return None


def sum_of(losses: list[Tensor]) -> Tensor:
    """The sum of a non-empty list of (n,) losses."""
    return torch.stack(losses).sum(0)


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ over the last axis. A vector with ‖x‖² below the smallest normal number becomes zero and gets no
    gradient, instead of an infinite one."""
    square = x.square().sum(-1, keepdim=True)
    some = square > torch.finfo(x.dtype).tiny
    return torch.where(some, x, 0) / torch.where(some, square, 1).sqrt()


class Embeddings(nn.Module):
    """One linear layer per network, from its pooled vector to a common width."""

    def __init__(self, student: NetworkInfo, teacher: NetworkInfo, dim: int) -> None:
        super().__init__()
        self.student = nn.Linear(student.shapes["pooled"][0], dim)
        self.teacher = nn.Linear(teacher.shapes["pooled"][0], dim)

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        """`student` and `teacher`, both N x dim."""
        return {"student": self.student(student["pooled"]), "teacher": self.teacher(teacher["pooled"])}
