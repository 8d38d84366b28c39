"""The objective of a distillation: r · cross-entropy + a · kd + Σ b · method.

Promises: losses are computed in fp32, outside any autocast. A weight of 0 costs nothing. The teacher is live, cached
(read from the batch's `extra`) or in stages, and is checked after the first step and after every epoch. Nothing waits
for the device.

Methods that relate samples see the rows of the whole global batch (`GlobalBatch`). Every process computes the same
number and needs only the gradient of its own rows, so backward exchanges nothing. The factors are such that a loss
counted once per own sample, as the step counts all losses, has the gradient of the global loss on any number of
processes. In strict mode the loss is computed once per process, between the forwards and the backwards of its shards.
The loss must be a deterministic function of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drumline.core.account import TEACHER, within
from drumline.core.errors import UserError
from drumline.core.precision import FP32, autocast
from drumline.data.feed.batch import Batch
from drumline.distillation.method import LossInputs, Memory, Method, Needs, with_temperature
from drumline.distillation.methods.logits import standardised
from drumline.distillation.own_method import check_loss, own_code
from drumline.distillation.schedules import CONSTANT, TermSchedule
from drumline.distillation.student import StudentOutput, own_name
from drumline.distillation.teacher import LiveTeacher, Teacher, TeacherOutput
from drumline.parallel.strict.lockstep import Lockstep
from drumline.parallel.world import World
from drumline.training.task import Classification, LossSums, Objective, check_logits

RunTeacher = Callable[[Tensor, Batch], TeacherOutput]
"""From normalised images, or the batch that they came in, to the teacher's output."""


@dataclass(frozen=True)
class LossTerm:
    """One method in the loss."""

    name: str
    method: Method
    weight: float
    needs: Needs
    has_helper: bool = False
    """Whether it has a helper, which then reads the student's taps instead of the loss."""
    memory: Memory | None = None
    schedule: TermSchedule = CONSTANT

    @property
    def reads(self) -> Needs:
        """The taps that the loss itself reads."""
        return Needs(
            () if self.has_helper else self.needs.student,
            () if self.method.helper_reads_teacher else self.needs.teacher,
        )


class Distillation(Objective):
    """Calls a `StudentWithHelpers`. `r` is the weight of the labels; each method has its own weight (kd's is `a`)."""

    def __init__(
        self,
        terms: Sequence[LossTerm],
        r: float,
        classification: Classification,
        run_teacher: RunTeacher,
        global_batch: GlobalBatch,
        device: torch.device,
        per_epoch: int,
        teacher: Teacher | None = None,
        standardise: bool = False,
        concurrent: bool = False,
        agreement: bool = True,
        total: int = 1,
    ) -> None:
        """`agreement`: report how often both networks predict the same class. `total`: the steps of the run, for
        schedules. `concurrent`: a GPU runs teacher and student at the same time, on two streams, because no helper
        reads the teacher's taps. Measured on an H200: 1.06 times as fast for ResNet-34 and ResNet-18 at 224 px, 1.07
        to 1.20 times for small CIFAR networks."""
        self._changing = {term.name: _Changing(term, device) for term in terms}
        self.loss_terms = tuple(self._changing[term.name].term for term in terms)
        self.r, self.classification = r, classification
        self.run_teacher = run_teacher
        self.global_batch, self.teacher = global_batch, teacher
        if teacher is not None and isinstance(run_teacher, LiveTeacher):
            self.teachers = tuple(teacher.modules)
        self.standardise, self.per_epoch, self.total = standardise, per_epoch, total
        self.agreement = agreement
        self.terms = ("ce", *(term.name for term in terms), *(("teacher_agreement",) if agreement else ()))
        self.meets = global_batch.world.size > 1 and any(
            term.method.scope == "global_batch" or term.memory is not None for term in terms
        )
        # In a fixed order (not a set), because it determines the order in which backward adds gradients.
        self._student_taps = tuple(dict.fromkeys(tap for term in terms for tap in term.reads.student))
        self._teacher_taps = tuple(dict.fromkeys(tap for term in terms for tap in term.reads.teacher))
        self._epoch, self._filled = torch.zeros((), device=device), 0
        self._side = torch.cuda.Stream(device) if concurrent and device.type == "cuda" else None

    def __call__(self, model: nn.Module, images: Tensor, batch: Batch) -> LossSums:
        teacher, student = self._forward(model, images, batch)
        check_logits(student.logits, self.classification.classes)
        with autocast(images.device, FP32):
            return self._loss_sums(*self._in_fp32(student, teacher), batch)

    def at(self, step: int) -> None:
        if (epoch := step // self.per_epoch) != self._filled:
            self._filled = epoch
            self._epoch.fill_(epoch)
        for term in self.loss_terms:
            self._changing[term.name].at(step, self.per_epoch, self.total)
            if term.memory is not None:
                term.memory.at(step)

    def check(self) -> None:
        self.classification.check()
        if self.teacher is not None:
            self.teacher.check()

    def live(self) -> list[Tensor]:
        return [
            tensor for term in self.loss_terms if term.memory is not None for tensor in term.memory.live()
        ]

    def collect(self) -> dict[str, Tensor]:
        return {
            f"{term.name}.{name}": tensor
            for term in self.loss_terms
            if term.memory is not None
            for name, tensor in term.memory.collect().items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for term in self.loss_terms:
            if term.memory is not None:
                term.memory.restore(
                    {
                        name: self._from_rank_0(state.get(f"{term.name}.{name}"), shape, term.name)
                        for name, shape in term.memory.shapes().items()
                    }
                )

    def _from_rank_0(self, tensor: Tensor | None, shape: tuple[int, ...], name: str) -> Tensor:
        world = self.global_batch.world
        if not world.broadcast_object(tensor is not None and tensor.shape == shape):
            raise UserError(
                f"the checkpoint has no state of {name} for this data",
                "resume with the methods and the data that the run started with",
            )
        if tensor is None:
            tensor = torch.empty(shape)
        return world.broadcast(tensor.to(world.device))

    def _forward(self, model: nn.Module, images: Tensor, batch: Batch) -> tuple[TeacherOutput, StudentOutput]:
        """Runs both networks on the batch: one after the other, or on two streams that fork and join here."""
        if self._side is None:
            with within(TEACHER):
                teacher = self.run_teacher(images, batch)
            return teacher, model(images, teacher.taps)
        current = torch.cuda.current_stream(images.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side), within(TEACHER):
            teacher = self.run_teacher(images, batch)
        student = model(images, {})
        current.wait_stream(self._side)
        for tensor in (teacher.logits, *teacher.taps.values()):
            tensor.record_stream(current)
        return teacher, student

    def _loss_sums(self, student: StudentOutput, teacher: TeacherOutput, batch: Batch) -> LossSums:
        labels = self.classification.loss_sums(student.logits, batch)
        total, sums = self.r * labels.loss, [labels.loss.detach()]
        for term in self.loss_terms:
            value = self._loss(term, student, teacher, batch)
            total = total + term.weight * self._changing[term.name].factor * value
            sums.append(value.detach())
        if self.agreement:
            with torch.no_grad():
                sums.append((student.logits.argmax(1) == teacher.logits.argmax(1)).sum().to(total.dtype))
        return LossSums(total, labels.correct, torch.stack(sums), labels.unlabelled)

    def _in_fp32(self, student: StudentOutput, teacher: TeacherOutput) -> tuple[StudentOutput, TeacherOutput]:
        """The tensors that the losses read, in fp32."""
        helper_outputs = {
            name: {key: value.float() for key, value in each.items()}
            for name, each in student.helper_outputs.items()
        }
        student_taps = {name: student.taps[name].float() for name in self._student_taps}
        teacher_taps = {name: teacher.taps[name].float() for name in self._teacher_taps}
        return (
            StudentOutput(student.logits.float(), student_taps, helper_outputs),
            TeacherOutput(teacher.logits.float(), teacher_taps),
        )

    def _loss(self, term: LossTerm, student: StudentOutput, teacher: TeacherOutput, batch: Batch) -> Tensor:
        """A method's loss, as a sum over the samples of the micro-batch."""
        logits, teacher_logits = student.logits, teacher.logits
        if self.standardise and term.method.on_logits:
            logits, teacher_logits = standardised(logits), standardised(teacher_logits)
        inputs = LossInputs(
            logits=logits,
            teacher_logits=teacher_logits,
            taps={name: student.taps[name] for name in term.reads.student},
            teacher_taps={own_name(name): teacher.taps[name] for name in term.reads.teacher},
            helper_outputs=student.helper_outputs.get(term.name, {}),
            labels=batch.labels,
            samples=batch.samples,
            memory=term.memory,
            epoch=self._epoch,
        )
        with own_code(type(term.method), "its loss"):
            if term.method.scope == "global_batch":
                loss = check_loss(
                    term.method, self.global_batch.loss(inputs, term.method.loss), len(batch.labels)
                )
                return loss * len(batch.labels)
            return check_loss(term.method, term.method.loss(inputs), len(batch.labels)).sum()


class _Changing:
    """The numbers of a term that its schedule changes: tensors that are filled between the steps, so that a captured
    step reads the new values."""

    def __init__(self, term: LossTerm, device: torch.device) -> None:
        self.schedule, self.factor = term.schedule, torch.ones((), device=device)
        self._values: tuple[float, float] | None = None
        self._start, self._temperature = 0.0, torch.ones((), device=device)
        if term.schedule.T_schedule != "constant":
            self._start = term.method.T  # type: ignore[attr-defined]
            term = replace(term, method=with_temperature(term.method, self._temperature))
        self.term = term

    def at(self, step: int, per_epoch: int, total: int) -> None:
        values = (
            self.schedule.weight_factor(step, per_epoch, total),
            self.schedule.temperature(self._start, step, total),
        )
        if values != self._values:
            self._values = values
            self.factor.fill_(values[0])
            self._temperature.fill_(values[1])


Loss = Callable[[LossInputs], Tensor]


class GlobalBatch(Protocol):
    """Computes losses over the global batch."""

    world: World

    def loss(self, inputs: LossInputs, loss: Loss) -> Tensor:
        """The loss over the global batch, given this process's (or shard's) rows. All call it, in the same order."""


class AcrossRanks:
    """Gathers rows from all processes, in the order of the global batch."""

    def __init__(self, world: World, counts: Sequence[int]) -> None:
        self.world, self.counts = world, tuple(counts)

    def loss(self, inputs: LossInputs, loss: Loss) -> Tensor:
        return loss(inputs.with_rows([self(rows) for rows in inputs.rows()]))

    def __call__(self, rows: Tensor) -> Tensor:
        if self.world.size == 1:
            return rows
        return _GatherRows.apply(rows, self.world, self.counts)


class AcrossShards:
    """Gathers rows from all shards, in strict mode."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep, self.world = lockstep, lockstep.world
        lockstep.needed = True

    def loss(self, inputs: LossInputs, loss: Loss) -> Tensor:
        rows = inputs.rows()
        value, gradients = self.lockstep.exchange(
            rows, lambda brought: self._loss_and_gradients(brought, inputs, loss)
        )
        # Each shard's loss counts 1 / shards, and only this shard has the gradients of its rows.
        return _Precomputed.apply(value, gradients, float(self.lockstep.shards), *rows)

    def _loss_and_gradients(
        self, brought: list[list[Tensor]], inputs: LossInputs, loss: Loss
    ) -> list[tuple[Tensor, list[Tensor | None]]]:
        """The loss over all rows and, for each shard of this process, the gradients of its rows."""
        size, counts = len(brought[0][0]), self.lockstep.counts
        wanted = [rows.requires_grad for rows in brought[0]]
        gathered = [
            self.world.all_gather_rows(
                torch.cat([rows.detach() for rows in column]), [size * count for count in counts]
            )
            for column in zip(*brought, strict=True)
        ]
        with torch.enable_grad():
            leaves = [rows.detach().requires_grad_(yes) for rows, yes in zip(gathered, wanted, strict=True)]
            value = loss(inputs.with_rows(leaves))
        gradients = iter(
            torch.autograd.grad(value, [leaf for leaf in leaves if leaf.requires_grad], allow_unused=True)
        )
        of_all = [next(gradients) if yes else None for yes in wanted]
        return [
            (
                value.detach(),
                [
                    None if gradient is None else gradient[size * shard : size * (shard + 1)]
                    for gradient in of_all
                ],
            )
            for shard in self.lockstep.own
        ]


class _Precomputed(torch.autograd.Function):
    """A loss whose value and gradients are already known."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: list[Tensor | None], factor: float, *rows: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.factor = gradients, factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = [
            None if gradient is None else gradient * (grads[0] * ctx.factor) for gradient in ctx.gradients
        ]
        return None, None, None, *given


class _GatherRows(torch.autograd.Function):
    """The step multiplies a loss L by own/global · processes, and DDP divides by processes. This process would get
    own/global of the gradient of its rows, and no other process has the rest. Hence the factor global/own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World, counts: tuple[int, ...]) -> Tensor:
        first = sum(counts[: world.rank])
        ctx.own = slice(first, first + counts[world.rank])
        ctx.factor = sum(counts) / counts[world.rank]
        return world.all_gather_rows(rows, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.own] * ctx.factor, None, None
