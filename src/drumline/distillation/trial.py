"""Tries the user's own methods before a run starts: calls their helper and loss on a few random images.

Promises: student, helpers, teacher and random numbers are as before. A `UserError` names what is wrong: taps that
are not declared, outputs of the wrong type or shape, a loss or gradient that is not finite, a loss that does not
depend on the student, a loss of one sample that depends on the others, random numbers or a state in the loss, and
parameters that change by themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, nn

from drumline.core.arithmetic import leave_no_trace
from drumline.core.contents import contents
from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, Method, with_temperature
from drumline.distillation.own_method import check_loss, is_own, own_code, title_of
from drumline.distillation.selection import Selection
from drumline.distillation.student import FittedNetworks, StudentWithHelpers, own_name
from drumline.models.base import VisionModel
from drumline.models.tapped import Tapped

SAMPLES = 4
"""Images of the trial, or twice as many as the method needs, because half of them are also tried alone."""


def try_own_methods(
    networks: FittedNetworks, module: StudentWithHelpers, selection: Selection, size: int
) -> None:
    """Calls each of the user's own methods as a step does. Skips methods with a memory."""
    schedules = {each.name: each.schedule for each in selection.methods}
    own = [
        each
        for each in networks.methods
        if is_own(type(each.method)) and type(each.method).memory is Method.memory
    ]
    if not own:
        return
    student, teachers = module.student, [each.module for each in networks.teachers]
    device = next(tensor.device for tensor in (*module.parameters(), *module.buffers()))
    count = max(SAMPLES, *(2 * each.method.least_samples for each in own))
    images = torch.randn((count, 3, size, size), generator=torch.Generator().manual_seed(0))
    with leave_no_trace(module, *teachers, devices=[device]):
        with torch.no_grad():
            outputs = _outputs(student.train(), images)
            of_teachers = [_outputs(teacher.eval(), images) for teacher in teachers]
        for each in own:
            method = each.method
            if schedules[each.selected].T_schedule != "constant":
                method = with_temperature(method, torch.tensor(2.0, device=device))
            needs, of_teacher = each.needs, of_teachers[each.teacher]
            helper = dict(module.helpers.items()).get(each.name)
            trial = _Trial(method, helper)
            taps = {tap: outputs[1][tap].to(device) for tap in needs.student}
            teacher_taps = {tap: of_teacher[1][tap].to(device) for tap in map(own_name, needs.teacher)}
            logits = outputs[0].to(device), of_teacher[0].to(device)
            trial.run(*logits, taps, teacher_taps, trains_student=not selection.phase)


def _outputs(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits and taps of a network, in fp32."""
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), images.device)
    images = images.to(device)
    if not isinstance(model, VisionModel | Tapped):
        return model(images).float(), {}
    logits, taps = model(images, taps=True)
    return logits.float(), {name: value.float() for name, value in taps.items()}


class _Declared(dict[str, Tensor]):
    """Taps by name. Those that are missing were not declared."""

    def __init__(self, taps: dict[str, Tensor], title: str, what: str, fix: str) -> None:
        super().__init__(taps)
        self._title, self._what, self._fix = title, what, fix

    def __missing__(self, tap: str) -> Tensor:
        fix = self._fix.format(tap=tap)
        if self and tap in ("last stage", "stages"):
            fix = f"use the names of the taps, or {self._what}.values()"
        raise UserError(
            f"{self._title}: {self._what}[{tap!r}] does not exist; it has {', '.join(self) or 'nothing'}", fix
        )


class _Trial:
    """The trial of one method."""

    def __init__(self, method: Method, helper: nn.Module | None) -> None:
        self.method, self.helper, self.title = method, helper, title_of(method)
        self.fix = f'add it to `reads`, as in `reads = "{method.reads}, {{tap}}"`'

    def run(
        self,
        logits: Tensor,
        teacher_logits: Tensor,
        taps: dict[str, Tensor],
        teacher_taps: dict[str, Tensor],
        trains_student: bool,
    ) -> None:
        """Calls helper and loss, the loss three times."""
        leaves = {tap: value.detach().requires_grad_() for tap, value in taps.items()}
        logits = logits.detach().requires_grad_()
        parameters = dict(self.helper.named_parameters()) if self.helper is not None else {}
        versions = {name: each._version for name, each in parameters.items()}
        with torch.enable_grad():
            helped = self._helped(leaves, teacher_taps) if self.helper is not None else {}
            inputs = self._inputs(logits, teacher_logits, leaves, teacher_taps, helped)
            loss, held = self._loss(inputs), contents(self.method)
            again, held_again = self._loss(inputs), contents(self.method)
        # Not by their bits: a run may allow kernels that round differently each time.
        if held != held_again or not torch.allclose(loss, again, equal_nan=True):
            raise UserError(
                f"{self.title}: its loss gives two results for the same inputs, because it draws random numbers or "
                "keeps a state, which a resumed run could not repeat",
                "compute the loss from its inputs alone; keep random numbers and state in a helper",
            )
        if not loss.isfinite().all():
            raise self._not_finite("its loss")
        if changed := [name for name, each in parameters.items() if each._version != versions[name]]:
            raise UserError(
                f"{self.title}: the parameter {changed[0]} of its helper changes during a call",
                "let the optimizer train it, or make it a buffer (register_buffer)",
            )
        if not loss.requires_grad:
            raise self._unconnected()
        if self.method.scope == "sample":
            self._try_half(inputs, loss)
        loss.sum().backward()
        reached = [each.grad for each in (logits, *leaves.values()) if each.grad is not None]
        of_helper = [each.grad for each in parameters.values() if each.grad is not None]
        if not reached and (trains_student or not of_helper):
            raise self._unconnected()
        if not all(gradient.isfinite().all() for gradient in (*reached, *of_helper)):
            raise self._not_finite("the gradient of its loss")

    def _helped(self, taps: dict[str, Tensor], teacher_taps: dict[str, Tensor]) -> dict[str, Tensor]:
        """The output of the helper."""
        reads = self.method.helper_reads_teacher
        declared = self._declared(taps, "student_taps", self.fix)
        of_teacher = self._declared(
            teacher_taps if reads else {},
            "teacher_taps",
            self.fix if reads else "declare `helper_reads_teacher = True`",
        )
        assert self.helper is not None
        with own_code(type(self.method), "its helper"):
            found = self.helper.train()(declared, of_teacher)
        if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
            raise UserError(
                f"{self.title}: its helper returned a {type(found).__name__}, not a dict of tensors",
                'return a dict such as {"mapped": ...}, which the loss reads as inputs.helper_outputs["mapped"]',
            )
        rows = len(next(iter(taps.values()))) if taps else None
        for name, each in found.items():
            if self.method.scope == "global_batch" and rows and (not each.ndim or len(each) != rows):
                raise UserError(
                    f"{self.title}: {name} of its helper has shape {tuple(each.shape)} for {rows} samples",
                    'with `scope = "global_batch"`, return one row per sample, which are gathered from all processes',
                )
        return {name: each.float() for name, each in found.items()}

    def _inputs(
        self,
        logits: Tensor,
        teacher_logits: Tensor,
        taps: dict[str, Tensor],
        teacher_taps: dict[str, Tensor],
        helped: dict[str, Tensor],
    ) -> LossInputs:
        in_helper = "a method with a helper reads it there; return what the loss needs from the helper"
        helper = self.helper is not None
        reads_teacher = self.method.helper_reads_teacher
        classes = min(logits.shape[1], teacher_logits.shape[1])
        return LossInputs(
            logits=logits,
            teacher_logits=teacher_logits,
            taps=self._declared({} if helper else taps, "inputs.taps", in_helper if helper else self.fix),
            teacher_taps=self._declared(
                {} if reads_teacher else teacher_taps,
                "inputs.teacher_taps",
                in_helper if reads_teacher else self.fix,
            ),
            helper_outputs=self._declared(
                helped, "inputs.helper_outputs", "return it from the helper, in a dict: {{{tap!r}: ...}}"
            ),
            labels=torch.arange(len(logits), device=logits.device) % classes,
            samples=torch.arange(len(logits), device=logits.device),
            epoch=torch.zeros((), device=logits.device),
        )

    def _loss(self, inputs: LossInputs) -> Tensor:
        with own_code(type(self.method), "its loss"):
            loss = self.method.loss(inputs)
        return check_loss(self.method, loss, len(inputs.logits))

    def _try_half(self, inputs: LossInputs, loss: Tensor) -> None:
        """The loss of a sample must be the same in a smaller batch, as another number of processes has."""
        count = len(loss)
        half = count // 2

        def first(tensors: Collection[tuple[str, Tensor]]) -> dict[str, Tensor]:
            return {k: each[:half] if each.ndim and len(each) == count else each for k, each in tensors}

        part = replace(
            inputs,
            logits=inputs.logits[:half],
            teacher_logits=inputs.teacher_logits[:half],
            taps=first(inputs.taps.items()),
            teacher_taps=first(inputs.teacher_taps.items()),
            helper_outputs=first(inputs.helper_outputs.items()),
            labels=inputs.labels[:half],
            samples=inputs.samples[:half],
        )
        alone = self._loss(part)
        if not torch.allclose(alone, loss[:half], rtol=1e-3, atol=1e-5 * float(loss.detach().abs().max())):
            raise UserError(
                f"{self.title}: the loss of a sample depends on the other samples of the batch, so it would change "
                "with the number of processes",
                'declare `scope = "global_batch"`, and return one number for the whole batch',
            )

    def _declared(self, taps: dict[str, Tensor], what: str, fix: str) -> _Declared:
        return _Declared(taps, self.title, what, fix)

    def _unconnected(self) -> UserError:
        return UserError(
            f"{self.title}: its loss does not depend on the student, so nothing can be learned",
            "compute it with torch from inputs.logits, inputs.taps or inputs.helper_outputs, without .detach(), "
            ".item() or torch.no_grad()",
        )

    def _not_finite(self, what: str) -> UserError:
        return UserError(
            f"{self.title}: {what} is not finite in a trial with random images",
            "look for a division by zero, a logarithm of zero, an overflow, or a square root of zero, whose gradient "
            "is infinite",
        )
