"""Checks of the model and its teacher: train and eval mode, and which parameters are trained.

Promises: reads flags and which gradients exist, never a value on the device. A model without layers that depend on
the mode is never reported, nor one that trains with its BatchNorm layers in eval mode from the start. A model that
was never in train mode only gets a warning: some fine-tuning is done that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from drumline.guards.finding import Finding, LoopState, Reports, listed

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

    def check(self, step: int) -> Finding | None:
        """Just before a step: the model is trained in eval mode."""
        if not self.layers or self._model_trains() or any(m.training for m in self.layers.values()):
            self.eval_since = None
            if self.trained is None or step % _REFRESH == 0:
                self.trained = self._trainable()
            return None
        self.eval_since = self.eval_since or step
        return Finding(
            "eval-mode",
            f"the model is trained in eval mode (BatchNorm and dropout layers: {len(self.layers)})",
            where=f"{type(self.model).__name__}.training is False",
            since=f"step {self.eval_since}",
            fix="call model.train() after evaluating, before the next step",
            certain=self.trained == self._trainable(),
        )

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


def different_modes(reports: Reports) -> Finding | None:
    """A layer that is in train mode on one rank and in eval mode on another."""
    flags, first = reports.of("modes"), reports.ranks[0]
    for name, mode in flags[0].items():
        for rank, other in zip(reports.ranks, flags, strict=True):
            if other.get(name, mode) != mode:
                mine, theirs = ("train", "eval") if mode else ("eval", "train")
                return Finding(
                    "modes",
                    f"layer '{name}' is in {mine} mode on rank {first} and in {theirs} mode on rank {rank}",
                    f"ranks {first} and {rank}",
                    reports.since,
                    "call model.train() and model.eval() on every rank at the same point of the loop",
                    certain=True,
                )
    return None


def teacher_in_train_mode(name: str, layer: str, step: int, certain: bool) -> Finding:
    """A teacher that is called in train mode."""
    return Finding(
        "teacher",
        f"{name} is in train mode: dropout is on, and BatchNorm uses and changes batch statistics",
        where=layer,
        since=f"step {max(1, step - 1)}",
        fix="call teacher.eval() after any call of .train() on a module that holds the teacher",
        certain=certain,
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
) -> Finding | None:
    """The teacher's parameters are in an optimizer (certain), or backward has changed a gradient since `before`."""
    ids = {id(tensor) for tensor in held}
    for name, parameter in parameters.items():
        if id(parameter) in ids:
            return Finding(
                "teacher",
                "the optimizer trains the teacher",
                where=f"teacher parameter '{name}'",
                since=f"step {step}",
                fix="create the optimizer with the student's parameters alone",
                certain=True,
            )
    for name, mark in gradient_marks(parameters).items():
        if before.get(name) != mark:
            return Finding(
                "teacher",
                "backward reaches the teacher: time and memory for gradients that nothing uses",
                where=f"teacher parameter '{name}'",
                since=f"step {step}",
                fix="call the teacher under torch.no_grad(), or teacher.requires_grad_(False)",
            )
    return None


def different_teachers(reports: Reports) -> Finding | None:
    """A teacher whose parameters differ between ranks."""
    teachers = reports.of("teachers")
    for name in teachers[0]:
        pair = _different_pair(reports.ranks, [one.get(name) for one in teachers])
        if pair is not None:
            return Finding(
                "teacher",
                f"ranks use different teachers: the parameters of {name.rpartition(' ')[0]} differ",
                pair,
                reports.since,
                "load the teacher's weights, and update a moving average, on every rank",
            )
    return None


def different_copies(reports: Reports) -> Finding | None:
    """Copies of the model's weights, the same number on each rank, that differ between ranks. Each is reported as a
    digest after a digit, which is 1 if the copy follows the model."""
    copies = reports.of("copies")
    for kind in ("module", "dictionary"):
        values = [sorted(each[1:] for each in one[kind]) for one in copies]
        everywhere = set(values[0]).intersection(*values)
        pair = _different_pair(reports.ranks, values) if len({len(each) for each in values}) == 1 else None
        if pair is not None and any(
            each[0] == "1" and each[1:] not in everywhere for one in copies for each in one[kind]
        ):
            return Finding(
                "ema",
                f"a copy of the model's weights (a moving average, kept as a {kind}) differs between ranks",
                pair,
                f"seen after step {reports.step}",
                "update it on every rank; nothing to do if only one rank's copy is used",
            )
    return None


def not_in_optimizer(loop: LoopState) -> Finding | None:
    """Trainable parameters of the model that no optimizer holds."""
    held = {id(tensor) for tensor in loop.held}
    names = [
        name
        for name, p in loop.parameters.items()
        if p.requires_grad and id(p) not in held and not p.is_meta  # meta: another process holds it
    ]
    if not names:
        return None
    require, them = ("requires", "it") if len(names) == 1 else ("require", "them")
    return Finding(
        "parameters",
        f"{_some(names)} {require} gradients but no optimizer holds {them}: never trained",
        where=f"the model's {_quoted(names)}",
        since=loop.since,
        fix="create parameters in the model's constructor and do not replace them; change their values by copy_ "
        "under no_grad"
        if loop.in_run
        else "give it to the optimizer, or freeze it by requires_grad_(False); pass all optimizers if there are "
        "several: drumline.guard(model, [first, second])",
    )


def not_in_model(guard: str, tensors: Mapping[str, Tensor], since: str, certain: bool = False) -> Finding:
    """Tensors in the optimizer, by their position in it, that are not in the model."""
    first = next(iter(tensors))
    return Finding(
        guard,
        f"the optimizer holds tensors that are not in the model ({len(tensors)} of them)",
        where=f"{first}, shape {tuple(tensors[first].shape)}",
        since=since,
        fix="create the optimizer after the last change of the model (a replaced head, a copy, a reload): it updates "
        "tensors that nothing uses",
        certain=certain,
    )


def without_gradient(names: Sequence[str], steps: int, certain: bool = False) -> Finding:
    """Trainable parameters in the optimizer that backward never reached."""
    return Finding(
        "parameters",
        f"{_some(names)} had no gradient in {'the first step' if steps == 1 else f'any of {steps} steps'}: the loss "
        f"does not depend on {'it' if len(names) == 1 else 'them'}",
        where=f"the model's {_quoted(names)}",
        since="step 1",
        fix="use it in forward, or freeze it by requires_grad_(False); check for a detach() or no_grad() on the way",
        certain=certain,
    )


def unconnected(steps: int, certain: bool) -> Finding:
    """No parameter has ever had a gradient, although backward was called."""
    return Finding(
        "parameters",
        f"no parameter had a gradient in the first {steps} steps: the loss is not connected to the model",
        where="all parameters of the model",
        since="step 1",
        fix="call backward() on a loss computed from the model's output; check for .item(), torch.tensor(...), "
        "detach() or no_grad() between the output and the loss",
        certain=certain,
    )


def never_stepped(number: int, kind: str, backwards: int) -> Finding:
    """Backward reaches the parameters of an optimizer that is never stepped."""
    return Finding(
        "parameters",
        f"optimizer {number} ({kind}) was never stepped: backward reached its parameters, but they are not trained",
        where=f"at least {backwards} backward passes",
        since="step 1",
        fix="call its step(), or do not pass it to drumline.guard",
    )


def roots(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """What a script calls: the module, or the members of a plain list of modules."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for key, child in module.named_children():
            yield from roots(child, f"{name}.{key}" if name else key)
    else:
        yield name, module


def _different_pair(ranks: Sequence[int], values: Sequence[Any]) -> str | None:
    """The first two ranks whose values differ, unless a rank has none."""
    other = next((rank for rank, value in zip(ranks, values, strict=True) if value != values[0]), None)
    return None if other is None or None in values else f"ranks {ranks[0]} and {other}"


def _some(names: Sequence[str]) -> str:
    return "a trainable parameter" if len(names) == 1 else f"{len(names)} trainable parameters"


def _quoted(names: Sequence[str]) -> str:
    return listed([f"'{name}'" for name in names])
