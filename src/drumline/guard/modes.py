"""Train or eval: the model must be in train mode when it is trained, the teacher never.

Promises: a look at a list of flags per step, no device; a model without layers that mind the mode is never accused,
nor one that trains with its BatchNorm layers alone in eval mode from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from drumline.guard.finding import Finding
from drumline.guard.forwards import roots


class Modes:
    """Remembers which layers have been in train mode."""

    def __init__(self, model: nn.Module, teachers: Sequence[nn.Module]) -> None:
        taught = {id(module) for teacher in teachers for module in teacher.modules()}
        self.model = model
        self.roots = [root for _, root in roots(model) if id(root) not in taught]
        self.minding = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm | _DropoutNd) and id(module) not in taught
        ]
        self.norms = [module for module in self.minding if isinstance(module, _BatchNorm)]
        self.teachers = [(place, list(teacher.named_modules())) for place, teacher in enumerate(teachers)]
        self.norms_trained = False
        self.eval_since: int | None = None

    def look(self, step: int) -> Finding | None:
        """What is wrong with the modes at this step; call it just before the optimizer steps."""
        return self._teacher(step) or self._model(step)

    def frozen_norms(self, step: int) -> Finding | None:
        """All BatchNorm layers in eval though they were trained before: often meant, so only worth a warning."""
        training = any(norm.training for norm in self.norms)
        self.norms_trained = self.norms_trained or training
        if training or not self.norms_trained or not self._model_trains():
            return None
        return Finding(
            "frozen-norms",
            f"every BatchNorm layer ({len(self.norms)}) is in eval mode while the rest of the model trains",
            since=f"step {step}",
            fix="call model.train() before training; nothing to do if the statistics are frozen on purpose",
        )

    def _model_trains(self) -> bool:
        return any(root.training or any(child.training for child in root.children()) for root in self.roots)

    def _model(self, step: int) -> Finding | None:
        if not self.minding or self._model_trains() or any(module.training for module in self.minding):
            self.eval_since = None
            return None
        self.eval_since = self.eval_since or step
        return Finding(
            "eval-mode",
            f"the model is trained in eval mode (BatchNorm and dropout layers: {len(self.minding)})",
            where=f"{type(self.model).__name__}.training is False",
            since=f"step {self.eval_since}",
            fix="call model.train() after evaluating, before the next step",
        )

    def _teacher(self, step: int) -> Finding | None:
        for place, modules in self.teachers:
            for name, module in modules:
                if module.training:
                    label = f"teacher {place}" if len(self.teachers) > 1 else "the teacher"
                    return Finding(
                        "teacher",
                        f"{label} is in train mode: dropout is on, and BatchNorm uses and changes batch statistics",
                        where=f"{type(module).__name__} '{name}'" if name else type(module).__name__,
                        since=f"step {step}",
                        fix="call teacher.eval() after whatever calls .train() on a module that holds the teacher",
                    )
        return None


def gradient_marks(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Which gradients are there, in which state: an old one, left from the teacher's own training, is no mistake."""
    return {
        name: (id(parameter.grad), parameter.grad._version)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def trained_teacher(
    parameters: Mapping[str, Tensor], held: Iterable[Tensor], before: Mapping[str, tuple[int, int]], step: int
) -> Finding | None:
    """Whether the teacher's parameters are in an optimizer, or backward has changed a gradient since `before`."""
    ids = {id(tensor) for tensor in held}
    for name, parameter in parameters.items():
        if id(parameter) in ids:
            return Finding(
                "teacher",
                "the optimizer trains the teacher",
                where=f"teacher parameter '{name}'",
                since=f"step {step}",
                fix="make the optimizer from the student's parameters alone",
            )
    for name, mark in gradient_marks(parameters).items():
        if before.get(name) != mark:
            return Finding(
                "teacher",
                "backward reaches the teacher: time and memory for gradients that nobody uses",
                where=f"teacher parameter '{name}'",
                since=f"step {step}",
                fix="call the teacher under torch.no_grad(), or teacher.requires_grad_(False)",
            )
    return None
