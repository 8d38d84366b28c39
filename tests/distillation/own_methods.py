"""Distillation methods as a user would write them, right and wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.distillation import LossInputs, Method, Needs, NetworkInfo, Range, Weights

Taps = Mapping[str, Tensor]


@dataclass(frozen=True)
class Soft(Method):
    weights = Weights(r=0.5, b=2.0)

    T: Annotated[float, Range(above=0)] = 3.0
    power: Annotated[int, Range(1, 4)] = 2

    def loss(self, inputs: LossInputs) -> Tensor:
        probabilities = [F.softmax(z / self.T, 1) for z in (inputs.logits, inputs.teacher_logits)]
        return (probabilities[0] - probabilities[1]).abs().pow(self.power).sum(1)


class Undecorated(Method):
    """Without options, so without a decorator."""

    name = "plain"
    reads = "pooled, stage2"
    scope = "global_batch"

    def loss(self, inputs: LossInputs) -> Tensor:
        assert inputs.taps.keys() == inputs.teacher_taps.keys() == {"pooled", "stage2"}
        return (relations(inputs.taps["pooled"]) - relations(inputs.teacher_taps["pooled"])).square().mean()


def relations(rows: Tensor) -> Tensor:
    rows = F.normalize(rows, dim=1)
    return rows @ rows.T


class Projection(nn.Module):
    def __init__(self, wide: int, to: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, to)

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        return {"mapped": self.linear(student["pooled"])}


class Projected(Method):
    reads = "pooled"

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        return Projection(student.shapes["pooled"][0], teacher.shapes["pooled"][0])

    def loss(self, inputs: LossInputs) -> Tensor:
        return (inputs.helper_outputs["mapped"] - inputs.teacher_taps["pooled"]).square().mean(1)


class Deepest(Projected):
    """Taps of its own choice."""

    reads = "one stage"

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        return Needs((student.stages[-1], "pooled"), ("pooled",))


# Wrong classes.


class NoBase:
    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.logits.sum(1)


def function(inputs: LossInputs) -> Tensor:
    return inputs.logits.sum(1)


class NoLoss(Method):
    pass


class NoDecorator(Soft):
    extra: float = 1.0


class NoDecoratorAtAll(Method):
    gamma: float = 1.0

    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.logits.sum(1)


@dataclass(frozen=True)
class TypedWeights(Soft):
    weights: Weights = Weights(b=2.0)  # type: ignore[misc]  # noqa: RUF009


class NumberForWeights(Soft):
    weights = 2.0  # type: ignore[assignment]


class WrongScope(Soft):
    scope = "batch"  # type: ignore[assignment]


class Taken(Soft):
    name = "kd"


@dataclass(frozen=True)
class Untextual(Soft):
    layers: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Scheduled(Soft):
    warmup: float = 2.0  # type: ignore[misc]


@dataclass(frozen=True)
class OutsideItsLimits(Soft):
    power: Annotated[int, Range(1, 4)] = 9


class OnlyNeeds(Method):
    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        return Needs(("pooled",), ("pooled",))

    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.taps["pooled"].mean(1)


class TakesTensors(Method):
    def loss(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:  # type: ignore[override]
        return (logits - teacher_logits).square().mean(1)


# Wrong calls.


class Averaged(Soft):
    def loss(self, inputs: LossInputs) -> Tensor:
        return super().loss(inputs).mean()


class PerSample(Soft):
    scope = "global_batch"


class Number(Soft):
    def loss(self, inputs: LossInputs) -> Any:
        return super().loss(inputs).mean().item()


class Unconnected(Soft):
    def loss(self, inputs: LossInputs) -> Tensor:
        return super().loss(inputs).detach()


class OfTeacher(Projected):
    """Trains its helper to see the teacher, and the student not at all."""

    helper_reads_teacher = True

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        class Other(Projection):
            def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
                return {"mapped": self.linear(teacher["pooled"])}

        return Other(teacher.shapes["pooled"][0], teacher.shapes["pooled"][0])

    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.helper_outputs["mapped"].square().mean(1)


class Divides(Soft):
    def loss(self, inputs: LossInputs) -> Tensor:
        return super().loss(inputs) / (inputs.labels - inputs.labels)


class InfiniteSlope(Soft):
    def loss(self, inputs: LossInputs) -> Tensor:
        return (inputs.logits - inputs.logits).sum(1).sqrt()


class Undeclared(Soft):
    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.taps["stage2"].mean((1, 2, 3))


class UndeclaredWithHelper(Projected):
    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.taps["pooled"].mean(1)


class UndeclaredOutput(Projected):
    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.helper_outputs["other"].mean(1)


class ReadsTeacherInHelper(Projected):
    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        class Other(Projection):
            def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
                return {"mapped": self.linear(teacher["pooled"])}

        return Other(teacher.shapes["pooled"][0], 4)


class ByItsRole(Soft):
    reads = "last stage"

    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.taps["last stage"].mean((1, 2, 3))


class NoSuchTap(Soft):
    reads = "stage9"


class Relates(Soft):
    def loss(self, inputs: LossInputs) -> Tensor:
        losses = super().loss(inputs)
        return losses / losses.detach().sum()


class Random(Soft):
    def loss(self, inputs: LossInputs) -> Tensor:
        return super().loss(inputs) * torch.rand(len(inputs.logits))


@dataclass
class Counts(Method):
    """A dataclass that is not frozen."""

    calls: int = 0

    def loss(self, inputs: LossInputs) -> Tensor:
        self.calls += 1
        return (inputs.logits - inputs.teacher_logits).square().mean(1)


class Raises(Soft):
    def loss(self, inputs: LossInputs) -> Tensor:
        raise KeyError("a mistake")


class RaisesInHelper(Projected):
    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        return Projection(student.shapes["deep"][0], 4)


class RaisesInNeeds(Deepest):
    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        return Needs((student.stages[7],))


class NoModule(Projected):
    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> Any:
        return lambda student, teacher: {}


class TensorFromHelper(Projected):
    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        class Other(Projection):
            def forward(self, student: Taps, teacher: Taps) -> Any:
                return self.linear(student["pooled"])

        return Other(student.shapes["pooled"][0], 4)


class Drifting(Projected):
    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        class Other(Projection):
            def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
                with torch.no_grad():
                    self.linear.weight.mul_(0.99)
                return super().forward(student, teacher)

        return Other(student.shapes["pooled"][0], teacher.shapes["pooled"][0])


class Lazy(Projected):
    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        return nn.LazyLinear(teacher.shapes["pooled"][0])
