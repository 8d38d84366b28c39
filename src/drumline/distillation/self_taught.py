"""Teachers that are trained with the student: the moving average of its weights, or a second student (a peer).

Promises: the average is that of `train.ema`, which the step updates and checkpoints hold. A peer is trained by the
same optimizer, inside the one module that DDP wraps; each of the two students learns from the labels and from the
other's outputs on the same batch, through which no gradient passes. So resuming and, in strict mode, the number of
processes change no bit. Rejects methods that read more than logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.core.precision import FP32, autocast
from drumline.data.feed.batch import Batch
from drumline.distillation.method import Taps
from drumline.distillation.objective import Distillation
from drumline.distillation.student import FittedNetworks, StudentOutput, StudentWithHelpers
from drumline.distillation.teacher import TeacherOutput
from drumline.training.task import LossSums, check_logits

PEER_SEED = 0x70656572
"""Mixed into the seed of a peer's initial weights."""


class AverageDistillation(Distillation):
    """The teacher is the moving average of the student, in evaluation mode, as it is after the previous step."""

    def __init__(self, **arguments: Any) -> None:
        self._average: nn.Module | None = None
        super().__init__(run_teacher=self._outputs, **arguments)

    def use_average(self, average: nn.Module | None) -> None:
        self._average = average

    def _outputs(self, images: Tensor, batch: Batch) -> TeacherOutput:
        assert self._average is not None
        with torch.inference_mode():
            logits = self._average(images)
        return TeacherOutput(logits.clone(), {})  # backward must not save an inference tensor


class StudentWithPeer(StudentWithHelpers):
    """Two students of one architecture, in one forward. `student` is evaluated and exported."""

    def __init__(self, student: nn.Module, peer: nn.Module) -> None:
        super().__init__(student, {}, {})
        self.peer = peer

    def forward(self, images: Tensor, teacher_taps: Taps) -> StudentOutput:
        return StudentOutput(self.student(images), {}, {"peer": {"logits": self.peer(images)}})


class MutualDistillation(Distillation):
    """The sum of both students' losses, each with the other as its teacher (Zhang et al., 2018)."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(run_teacher=lambda images, batch: TeacherOutput(images, {}), **arguments)
        self.terms = (*self.terms, "peer_ce")

    def __call__(self, model: nn.Module, images: Tensor, batch: Batch) -> LossSums:
        output = model(images, {})
        check_logits(output.logits, self.classification.classes)
        mine, peers = output.logits.float(), output.helper_outputs["peer"]["logits"].float()
        with autocast(images.device, FP32):
            sums, of_peer = self._learning_from(mine, peers, batch), self._learning_from(peers, mine, batch)
        assert sums.terms is not None
        assert of_peer.terms is not None
        return sums._replace(loss=sums.loss + of_peer.loss, terms=torch.cat([sums.terms, of_peer.terms[:1]]))

    def _learning_from(self, logits: Tensor, teacher_logits: Tensor, batch: Batch) -> LossSums:
        return self._loss_sums(
            StudentOutput(logits, {}, {}), TeacherOutput(teacher_logits.detach(), {}), batch
        )


def check_self_taught(recipe: Recipe, networks: FittedNetworks, module: StudentWithHelpers) -> None:
    """Raises a `UserError` if a method reads more than the logits of the teacher or, with a peer, of the student."""
    taught = recipe.distill.self_taught
    needs = {each.name: each.needs.teacher for each in networks.methods}
    if taught == "peer":
        needs = {each.name: (*each.needs.student, *each.needs.teacher) for each in networks.methods}
        needs |= dict.fromkeys(module.helpers, ("its helper",))
    if reading := [name for name, read in needs.items() if read]:
        raise UserError(
            f"distill.method = {', '.join(reading)}: distill.teacher = {taught} needs methods that compare only "
            "logits",
            "use kd, dkd, dist or mlkd, or a teacher with distill.teacher_weights",
        )


def describe_self_taught(recipe: Recipe) -> str:
    """The log line about the teacher."""
    if recipe.distill.self_taught == "ema":
        return f"teacher: the moving average of the student (train.ema={recipe.train.ema:g})"
    return "teacher: a second student; each learns from the other, and the first is evaluated and exported"
