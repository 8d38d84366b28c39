"""Train or eval: the model is in train mode when it is trained, in eval mode when it is evaluated.

Promises: a look at a list of flags per step, no device; a model without layers that mind the mode is never accused,
nor one that trains with its BatchNorm layers alone in eval mode from the start. A model that was never in train mode
is only worth a warning: some fine-tuning is done so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.guards.beside import minds_mode
from drumline.guards.finding import Finding
from drumline.guards.forwards import roots

_IN_A_ROW = 3
_REFRESH = 8


class Modes:
    """Remembers which layers have been in train mode."""

    def __init__(self, model: nn.Module, teachers: Sequence[nn.Module]) -> None:
        taught = {id(module) for teacher in teachers for module in teacher.modules()}
        self.model = model
        self.roots = [root for _, root in roots(model) if id(root) not in taught]
        self.minding = {
            name: module
            for name, module in model.named_modules()
            if minds_mode(module) and id(module) not in taught
        }
        self.norms = [module for module in self.minding.values() if isinstance(module, _BatchNorm)]
        self._parameters = list(model.parameters())
        self.norms_trained = False
        self.trained: set[int] | None = None
        """The parameters that were trained while the model was in train mode."""
        self.eval_since: int | None = None
        self._evaluations = 0

    def look(self, step: int) -> tuple[Finding, bool] | None:
        """A model trained in eval mode, and whether that is surely a mistake; call it just before the step."""
        if not self.minding or self._model_trains() or any(m.training for m in self.minding.values()):
            self.eval_since = None
            if self.trained is None or step % _REFRESH == 0:
                self.trained = self._trainable()
            return None
        self.eval_since = self.eval_since or step
        finding = Finding(
            "eval-mode",
            f"the model is trained in eval mode (BatchNorm and dropout layers: {len(self.minding)})",
            where=f"{type(self.model).__name__}.training is False",
            since=f"step {self.eval_since}",
            fix="call model.train() after evaluating, before the next step",
        )
        return finding, self.trained == self._trainable()

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

    def forward(self, with_gradient: bool, steps: int) -> Finding | None:
        """A forward pass of the model begins: several without gradients in a row are an evaluation."""
        self._evaluations = 0 if with_gradient else self._evaluations + 1
        if self._evaluations != _IN_A_ROW or not steps:
            return None
        # Statistics that are computed anew (torch.optim.swa_utils.update_bn) have no momentum.
        layers = [name for name, m in self.minding.items() if m.training and getattr(m, "momentum", 0.1)]
        if not layers:
            return None
        return Finding(
            "train-mode",
            "the model is evaluated in train mode: dropout is on, and BatchNorm learns from the evaluation's data",
            where=f"'{layers[0]}' and {len(layers) - 1} more" if len(layers) > 1 else f"'{layers[0]}'",
            since=f"after step {steps}",
            fix="call model.eval() before evaluating and model.train() after it",
        )

    def flags(self) -> dict[str, bool]:
        """The layers that mind the mode, as the ranks compare them."""
        return {name: module.training for name, module in self.minding.items()}

    def _model_trains(self) -> bool:
        return any(root.training or any(child.training for child in root.children()) for root in self.roots)

    def _trainable(self) -> set[int]:
        return {id(parameter) for parameter in self._parameters if parameter.requires_grad}


def unlike_modes(ranks: Sequence[int], said: Sequence[Mapping[str, bool]], step: int) -> Finding | None:
    """A layer that is in train mode on one rank and in eval mode on another."""
    for name, mode in said[0].items():
        for rank, flags in zip(ranks, said, strict=True):
            if flags.get(name, mode) != mode:
                one, other = ("train", "eval") if mode else ("eval", "train")
                return Finding(
                    "modes",
                    f"layer '{name}' is in {one} mode on rank {ranks[0]} and in {other} mode on rank {rank}",
                    f"ranks {ranks[0]} and {rank}",
                    f"step {step}",
                    "call model.train() and model.eval() on every rank at the same point of the loop",
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
) -> tuple[Finding, bool] | None:
    """Whether the teacher's parameters are in an optimizer (certain), or backward has changed a gradient since
    `before`."""
    ids = {id(tensor) for tensor in held}
    for name, parameter in parameters.items():
        if id(parameter) in ids:
            finding = Finding(
                "teacher",
                "the optimizer trains the teacher",
                where=f"teacher parameter '{name}'",
                since=f"step {step}",
                fix="make the optimizer from the student's parameters alone",
            )
            return finding, True
    for name, mark in gradient_marks(parameters).items():
        if before.get(name) != mark:
            finding = Finding(
                "teacher",
                "backward reaches the teacher: time and memory for gradients that nobody uses",
                where=f"teacher parameter '{name}'",
                since=f"step {step}",
                fix="call the teacher under torch.no_grad(), or teacher.requires_grad_(False)",
            )
            return finding, False
    return None
