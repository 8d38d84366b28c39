"""What a distillation method is: a pure loss, and a declaration of what the loss needs.

Promises: losses know nothing of processes, precision or modules. They are given plain tensors, all of one
floating type (fp32 in training), and return one value per sample (scope `sample`) or one value for the whole
global batch (scope `global_batch`), whose tensors were gathered from every process before. Whatever is trained
beside the student is built by `helper` from probed shapes and runs inside the bundle's one forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from torch import Tensor, nn

from drumline.parallel.world import World

Taps = Mapping[str, Tensor]
Scope = Literal["sample", "global_batch"]


@dataclass(frozen=True)
class Weights:
    """The literature's weights: r of the labels' cross-entropy, a of kd, b of the method, and kd's temperature T."""

    r: float = 1.0
    a: float = 0.0
    b: float = 1.0
    T: float = 4.0


@dataclass(frozen=True)
class Anatomy:
    """A network as a method sees it: the taps that it has, found by running it once on one image."""

    name: str
    """The model's name, for messages."""
    shapes: Mapping[str, tuple[int, ...]]
    """Tap to shape without the batch: (C, H, W) of a map, (C,) of `pooled`."""
    classes: int
    norms: Mapping[str, nn.Module] = field(default_factory=dict)
    """Tap to the BatchNorm right before its activation, where one is known."""

    @property
    def stages(self) -> tuple[str, ...]:
        """`stage1` to `stageN`."""
        return tuple(f"stage{n}" for n in range(1, len(self.shapes) + 1) if f"stage{n}" in self.shapes)


@dataclass(frozen=True)
class Needs:
    """The taps that a method reads, by name. Logits are always there."""

    student: tuple[str, ...] = ()
    teacher: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """A batch as both networks saw it: the micro-batch of this process, or (scope `global_batch`) the rows of all
    processes in the order of the global batch, the same on each of them."""

    logits: Tensor
    teacher_logits: Tensor
    taps: Taps
    """The student's, as far as the method needs them."""
    teacher_taps: Taps
    """The teacher's, without gradient."""
    helped: Taps
    """What the method's helper returned."""
    labels: Tensor
    samples: Tensor
    """Sample ids."""
    memory: Memory | None = None
    """What the method keeps from step to step."""

    def rows(self) -> list[Tensor]:
        """Everything that has a row for each sample, in a fixed order."""
        taken = [self.taps, self.teacher_taps, self.helped]
        return [
            self.logits,
            self.teacher_logits,
            *(taps[name] for taps in taken for name in taps),
            self.labels,
            self.samples,
        ]

    def with_rows(self, rows: Sequence[Tensor]) -> Seen:
        """The same of other samples; `rows` as `rows()` gives them."""
        logits, teacher_logits, *rest, labels, samples = rows
        left = iter(rest)
        taps, teacher_taps, helped = (
            {name: next(left) for name in each} for each in (self.taps, self.teacher_taps, self.helped)
        )
        return Seen(logits, teacher_logits, taps, teacher_taps, helped, labels, samples, self.memory)


class Memory(Protocol):
    """State that a method keeps beside the weights, such as CRD's banks. Spread over the processes or not, its
    effect is the same on any number of them."""

    def at(self, step: int) -> None:
        """Called before each optimizer step, on the host; never waits for the device."""

    def live(self) -> list[Tensor]:
        """The tensors that a step writes, on this process; put back after a rehearsal."""

    def collect(self) -> dict[str, Tensor]:
        """The whole state, on the host, equal on every process whatever their number. All processes call it."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The opposite: each process takes its part of what `collect` gave."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what `collect` gives."""


class Method:
    """One way to learn from a teacher. Subclasses are frozen dataclasses; their fields are the method's options
    (`--distill.options NAME:VALUE`), defaults as in the paper."""

    weights: ClassVar[Weights] = Weights()
    """The paper's."""
    scope: ClassVar[Scope] = "sample"
    on_logits: ClassVar[bool] = False
    """Whether it compares logits, so that logit standardisation applies."""
    mixes: ClassVar[bool] = True
    """Whether it makes sense on mixed images (mixup, cutmix)."""
    helper_asks_teacher: ClassVar[bool] = False
    """Whether its helper reads the teacher's taps. Where none does, the student need not wait for the teacher."""
    initial: ClassVar[str] = ""
    """The method of an initial stage that is trained before, alone; its own name where it has only that stage."""
    initial_epochs: ClassVar[float] = 0.0
    """How long the initial stage takes in the paper."""
    warmup: float = 0.0
    """Epochs over which its weight rises linearly; a field in methods that have one."""

    def needs(self, student: Anatomy, teacher: Anatomy) -> Needs:
        """Which taps it reads. Raises `UserError` where the two networks cannot serve it, saying why."""
        return Needs()

    def helper(self, student: Anatomy, teacher: Anatomy) -> nn.Module | None:
        """Its trainables, or None. Called as `helper(student_taps, teacher_taps)` it returns a dict of tensors."""
        return None

    def memory(self, labels: Tensor, seed: int, world: World) -> Memory | None:
        """What it keeps from step to step, or None. `labels`: of all samples, by sample id, on the device."""
        return None

    def loss(self, seen: Seen) -> Tensor:
        """(n,) losses for scope `sample`, one number for scope `global_batch`."""
        raise NotImplementedError
