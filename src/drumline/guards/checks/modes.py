"""Train and eval mode: the model trains in train mode and is evaluated in eval mode, the teacher stays in eval mode.

Promises: reads flags, never the device. A model without layers that depend on the mode is never reported, nor one
that trains with its BatchNorm layers in eval mode from the start. A model that was never in train mode only gets a
warning: some fine-tuning is done that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from drumline.guards.finding import Finding, Found

_EVALUATION = 3
"""Forward passes in a row without gradients that are an evaluation."""
_REFRESH = 8


def depends_on_mode(layer: nn.Module) -> bool:
    """Whether a layer works differently in train and in eval mode."""
    if isinstance(layer, _DropoutNd):
        return layer.p > 0
    if isinstance(layer, _BatchNorm):
        return layer.track_running_stats
    return isinstance(layer, nn.RReLU) or type(layer).__name__ in ("DropPath", "StochasticDepth")


class Modes:
    """Follows the mode of a model in a user's loop, and remembers which layers have been in train mode."""

    def __init__(self, model: nn.Module, teachers: Sequence[nn.Module]) -> None:
        excluded = {id(module) for teacher in teachers for module in teacher.modules()}
        self.model = model
        self.roots = [root for _, root in roots(model) if id(root) not in excluded]
        self.layers = {
            name: module
            for name, module in model.named_modules()
            if depends_on_mode(module) and id(module) not in excluded
        }
        self.norms = [module for module in self.layers.values() if isinstance(module, _BatchNorm)]
        self._parameters = list(model.parameters())
        self.norms_trained = False
        self.trained: set[int] | None = None
        """The parameters that were trained while the model was in train mode."""
        self.eval_since: int | None = None
        self._evaluations = 0

    def check(self, step: int) -> Found | None:
        """Just before a step: the model is trained in eval mode."""
        if not self.layers or self._model_trains() or any(m.training for m in self.layers.values()):
            self.eval_since = None
            if self.trained is None or step % _REFRESH == 0:
                self.trained = self._trainable()
            return None
        self.eval_since = self.eval_since or step
        finding = Finding(
            "eval-mode",
            f"the model is trained in eval mode (BatchNorm and dropout layers: {len(self.layers)})",
            where=f"{type(self.model).__name__}.training is False",
            since=f"step {self.eval_since}",
            fix="call model.train() after evaluating, before the next step",
        )
        return finding, self.trained == self._trainable()

    def frozen_norms(self, step: int) -> Finding | None:
        """All BatchNorm layers are in eval mode although they were trained before, which is often intended."""
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
        """A forward pass begins: several in a row without gradients are an evaluation."""
        self._evaluations = 0 if with_gradient else self._evaluations + 1
        if self._evaluations != _EVALUATION or not steps:
            return None
        # torch.optim.swa_utils.update_bn recomputes statistics in train mode, and sets momentum to None for it.
        layers = [name for name, m in self.layers.items() if m.training and getattr(m, "momentum", 0.1)]
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
        """Whether each layer that depends on the mode is in train mode, as the ranks compare it."""
        return {name: module.training for name, module in self.layers.items()}

    def _model_trains(self) -> bool:
        return any(root.training or any(child.training for child in root.children()) for root in self.roots)

    def _trainable(self) -> set[int]:
        return {id(parameter) for parameter in self._parameters if parameter.requires_grad}


def left_in_eval(module: nn.Module, before: Mapping[str, bool], since: str) -> Finding | None:
    """The first layer of Drumline's own loop that trained before and is in eval mode now."""
    for name, part in module.named_modules():
        if before.get(name, False) and not part.training:
            kind = type(part).__name__
            layer = f"layer {name!r} ({kind})" if name else f"the model ({kind})"
            return Finding(
                "eval-mode",
                f"{layer} was left in eval mode: dropout is off there, and statistics do not move",
                where=layer,
                since=since,
                fix="check for eval() in forward, in a hook or in the objective, and call train() after it; a layer "
                "that must stay in eval mode overrides its own train()",
            )
    return None


def different_modes(ranks: Sequence[int], flags: Sequence[Mapping[str, bool]], step: int) -> Finding | None:
    """A layer that is in train mode on one rank and in eval mode on another."""
    for name, mode in flags[0].items():
        for rank, other in zip(ranks, flags, strict=True):
            if other.get(name, mode) != mode:
                mine, theirs = ("train", "eval") if mode else ("eval", "train")
                return Finding(
                    "modes",
                    f"layer '{name}' is in {mine} mode on rank {ranks[0]} and in {theirs} mode on rank {rank}",
                    f"ranks {ranks[0]} and {rank}",
                    f"step {step}",
                    "call model.train() and model.eval() on every rank at the same point of the loop",
                )
    return None


def teacher_in_train_mode(name: str, layer: str, step: int) -> Finding:
    """A teacher that is called in train mode."""
    return Finding(
        "teacher",
        f"{name} is in train mode: dropout is on, and BatchNorm uses and changes batch statistics",
        where=layer,
        since=f"step {max(1, step - 1)}",
        fix="call teacher.eval() after any call of .train() on a module that holds the teacher",
    )


def gradient_marks(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Which gradients exist, in which version: one that is left from the teacher's own training is no mistake."""
    return {
        name: (id(parameter.grad), parameter.grad._version)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def trained_teacher(
    parameters: Mapping[str, Tensor], held: Iterable[Tensor], before: Mapping[str, tuple[int, int]], step: int
) -> Found | None:
    """The teacher's parameters are in an optimizer (certain), or backward has changed a gradient since `before`."""
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
                "backward reaches the teacher: time and memory for gradients that nothing uses",
                where=f"teacher parameter '{name}'",
                since=f"step {step}",
                fix="call the teacher under torch.no_grad(), or teacher.requires_grad_(False)",
            )
            return finding, False
    return None


def roots(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """What a script calls: the module, or the members of a plain list of modules."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for key, child in module.named_children():
            yield from roots(child, f"{name}.{key}" if name else key)
    else:
        yield name, module
