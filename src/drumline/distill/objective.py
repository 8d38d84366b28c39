"""What a student minimises: r · cross-entropy + a · kd + Σ b · method.

Promises: losses are computed in fp32 outside any autocast; batch-relational ones see the whole global batch, so the
loss and its gradient are the same on any number of processes; a weight of 0 costs nothing. The teacher is live or
read from the batch (`extra`), and is checked after the first step and every epoch. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drumline.core.arithmetic import autocast
from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch
from drumline.distill.bundle import Said
from drumline.distill.gather import Spread
from drumline.distill.method import Memory, Method, Needs, Seen
from drumline.distill.methods.logits import standardised
from drumline.distill.teacher import Taught, Teacher
from drumline.train.objective import Classification, Objective, Outcome, check_logits

Source = Callable[[Tensor, Batch], Taught]
"""What the teacher says of normalised images, or of the batch they came in."""


@dataclass(frozen=True)
class Part:
    """One method of an objective."""

    name: str
    method: Method
    weight: float
    needs: Needs
    helped: bool = False
    """Whether it has a helper, which then is what reads the student's taps."""
    memory: Memory | None = None

    @property
    def reads(self) -> Needs:
        """The taps that its loss itself reads."""
        return Needs(
            () if self.helped else self.needs.student,
            () if self.method.helper_asks_teacher else self.needs.teacher,
        )


class Distillation(Objective):
    """Calls a bundle. `r` weighs the labels, each part brings its own weight (kd's is `a`)."""

    def __init__(
        self,
        parts: Sequence[Part],
        r: float,
        classification: Classification,
        source: Source,
        spread: Spread,
        device: torch.device,
        per_epoch: int,
        teacher: Teacher | None = None,
        standardise: bool = False,
        beside: bool = False,
    ) -> None:
        """`beside`: a GPU may run the teacher beside the student, since no helper waits for it. Measured on an H200:
        1.06 times as fast for ResNet-34 and ResNet-18 at 224 px, 1.07 to 1.20 for CIFAR's small networks."""
        self.parts, self.r, self.classification, self.source = tuple(parts), r, classification, source
        self.spread, self.teacher = spread, teacher
        self.standardise, self.per_epoch = standardise, per_epoch
        self.terms = ("ce", *(part.name for part in parts), "teacher_agreement")
        self.meets = spread.world.size > 1 and any(
            part.method.scope == "global_batch" or part.memory is not None for part in parts
        )
        # In a fixed order, as sets are not: it decides the order in which backward adds gradients.
        self._student_taps = tuple(dict.fromkeys(tap for part in parts for tap in part.reads.student))
        self._teacher_taps = tuple(dict.fromkeys(tap for part in parts for tap in part.reads.teacher))
        self._ramps = torch.ones(len(parts), device=device)
        self._epoch = -1
        self._side = torch.cuda.Stream(device) if beside and device.type == "cuda" else None

    def __call__(self, model: nn.Module, images: Tensor, batch: Batch) -> Outcome:
        taught, said = self._heard(model, images, batch)
        check_logits(said.logits, self.classification.classes)
        with autocast(images.device, None):
            return self._scored(*self._exact(said, taught), batch)

    def at(self, step: int) -> None:
        epoch = step // self.per_epoch
        if epoch != self._epoch:
            self._epoch = epoch
            for place, part in enumerate(self.parts):
                self._ramps[place].fill_(ramp(part.method.warmup, epoch))
        for part in self.parts:
            if part.memory is not None:
                part.memory.at(step)

    def check(self) -> None:
        if self.teacher is not None:
            self.teacher.check()

    def live(self) -> list[Tensor]:
        return [tensor for part in self.parts if part.memory is not None for tensor in part.memory.live()]

    def collect(self) -> dict[str, Tensor]:
        return {
            f"{part.name}.{name}": tensor
            for part in self.parts
            if part.memory is not None
            for name, tensor in part.memory.collect().items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for part in self.parts:
            if part.memory is not None:
                part.memory.restore(
                    {
                        name: self._from_rank_0(state.get(f"{part.name}.{name}"), shape, part.name)
                        for name, shape in part.memory.shapes().items()
                    }
                )

    def _from_rank_0(self, tensor: Tensor | None, shape: tuple[int, ...], name: str) -> Tensor:
        world = self.spread.world
        if not world.broadcast_object(tensor is not None and tensor.shape == shape):
            raise UserError(
                f"the checkpoint has no memory of {name} for this data",
                "resume with the methods and the data the run was started with",
            )
        if tensor is None:
            tensor = torch.empty(shape)
        return world.broadcast(tensor.to(world.device))

    def _heard(self, model: nn.Module, images: Tensor, batch: Batch) -> tuple[Taught, Said]:
        """Both networks on the batch: one after the other, or on two streams that part and meet here."""
        if self._side is None:
            taught = self.source(images, batch)
            return taught, model(images, taught.taps)
        current = torch.cuda.current_stream(images.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            taught = self.source(images, batch)
        said = model(images, {})
        current.wait_stream(self._side)
        for tensor in (taught.logits, *taught.taps.values()):
            tensor.record_stream(current)
        return taught, said

    def _scored(self, said: Said, taught: Taught, batch: Batch) -> Outcome:
        labels = self.classification.outcome(said.logits, batch)
        total, terms = self.r * labels.loss, [labels.loss.detach()]
        for place, part in enumerate(self.parts):
            value = self._part(part, said, taught, batch)
            total = total + part.weight * self._ramps[place] * value
            terms.append(value.detach())
        with torch.no_grad():
            terms.append((said.logits.argmax(1) == taught.logits.argmax(1)).sum().to(total.dtype))
        return Outcome(total, labels.correct, torch.stack(terms))

    def _exact(self, said: Said, taught: Taught) -> tuple[Said, Taught]:
        """What the losses read, in fp32."""
        helped = {
            name: {key: value.float() for key, value in each.items()} for name, each in said.helped.items()
        }
        return (
            Said(said.logits.float(), {name: said.taps[name].float() for name in self._student_taps}, helped),
            Taught(taught.logits.float(), {name: taught.taps[name].float() for name in self._teacher_taps}),
        )

    def _part(self, part: Part, said: Said, taught: Taught, batch: Batch) -> Tensor:
        """A method's loss, as a sum over the micro-batch's samples."""
        logits, teacher_logits = said.logits, taught.logits
        if self.standardise and part.method.on_logits:
            logits, teacher_logits = standardised(logits), standardised(teacher_logits)
        seen = Seen(
            logits=logits,
            teacher_logits=teacher_logits,
            taps={name: said.taps[name] for name in part.reads.student},
            teacher_taps={name: taught.taps[name] for name in part.reads.teacher},
            helped=said.helped.get(part.name, {}),
            labels=batch.labels,
            samples=batch.samples,
            memory=part.memory,
        )
        if part.method.scope == "global_batch":
            loss = self.spread.loss(seen, part.method.loss)
            assert loss.ndim == 0, (part.name, loss.shape)
            return loss * len(batch.labels)
        losses = part.method.loss(seen)
        assert losses.shape == batch.labels.shape, (part.name, losses.shape)
        return losses.sum()


def ramp(warmup: float, epoch: int) -> float:
    """The weight of a method in an epoch (counted from 0) while it rises over `warmup` epochs."""
    return 1.0 if warmup <= 0 else min(1.0, (epoch + 1) / warmup)
