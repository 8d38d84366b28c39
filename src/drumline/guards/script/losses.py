"""The losses that the loop calls backward on, read from the autograd graph and the calls around it.

Promises: the graph is read, never changed: the names of at most 64 nodes, in the first steps. Finds probabilities
where a loss expects logits, labels in a different order from the batch's, accumulation without division, clipping of
scaled gradients, and collectives that cut the gradient. All of these may be intended, so they only warn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from drumline.guards.finding import Finding
from drumline.guards.script.parameters import Probes
from drumline.guards.script.source_lines import user_line

_WATCHED_STEPS = 12
"""Steps in which the graph is read."""
_MOST_NODES = 64
_KEPT_LOSSES = 64
_LEAST_LOSSES = 16
"""Minimum number of losses for a level that ranks compare."""
_CLIP_FRACTION = 0.05
"""A limit below this fraction of the loss scale is meant for unscaled gradients."""
_TRANSPARENT = (
    "ToCopyBackward0",
    "ViewBackward0",
    "ReshapeAliasBackward0",
    "UnsafeViewBackward0",
    "_DDPSinkBackward",
    "CloneBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "AliasBackward0",
)
_FACTORS = ("MulBackward0", "DivBackward0")
_LAYERS = ("AddmmBackward0", "MmBackward0", "ConvolutionBackward0")
_APPLIES = {
    "LogSoftmaxBackward0": ("SoftmaxBackward0", "softmax", "cross_entropy"),
    "BinaryCrossEntropyWithLogitsBackward0": (
        "SigmoidBackward0",
        "sigmoid",
        "binary_cross_entropy_with_logits",
    ),
}


@dataclass
class BackwardCall:
    """One call of backward."""

    line: str
    factors: int
    """Products and quotients at the top of the graph, before anything else."""
    sums: bool
    names: tuple[str, ...]


@dataclass
class _Detached:
    tensor: torch.Tensor
    outputs: Any
    line: str


@dataclass
class Losses:
    """The calls of backward since the last step."""

    probes: Probes
    step: int = 1
    roots: list[BackwardCall] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """Warnings for the next step."""
    values: list[torch.Tensor] = field(default_factory=list)
    """The newest losses, on their device."""
    targets: list[torch.Tensor] = field(default_factory=list)
    """The targets of cross_entropy since the last step."""
    settings: set[str] = field(default_factory=set)
    """The settings of cross_entropy since the last step, in the first steps."""
    classes: dict[str, int] = field(default_factory=dict)
    """The classes that the loader's labels became in the loss."""
    uses_scaler: bool = False
    scaler: Any = None
    """The GradScaler that scaled a loss of this step."""
    _scaled_steps: int = 0
    kinds: list[tuple[str, ...]] = field(default_factory=list)
    _detached: list[_Detached] = field(default_factory=list)
    _clipped: float | None = None
    _wrong_labels: int = 0

    def backward_begins(self, roots: Any, in_step: bool) -> None:
        """Backward is called; `in_step`: after a forward pass of the model."""
        self._clipped = None
        tensors = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or not in_step:
                continue
            if tensor.numel() == 1:
                self.values.append(tensor.detach().reshape(()).clone())
                del self.values[:-_KEPT_LOSSES]
            if self.step <= _WATCHED_STEPS and tensor.grad_fn is not None:
                self._read(tensor)
        for one in self._detached if in_step else ():
            outputs = one.outputs if isinstance(one.outputs, list | tuple) else ()
            if not any(output.requires_grad for output in outputs):
                self.findings.append(_without_gradient(one.line, self.step))
        self._detached.clear()

    def detached(self, tensor: torch.Tensor, outputs: Any) -> None:
        """A collective without gradients was called on a tensor that has one."""
        if not tensor.is_leaf and len(self._detached) < 8:
            self._detached.append(_Detached(tensor, outputs, user_line()))

    def _check_scaler(self) -> None:
        """Before a step: a loss was scaled, and its gradients were not unscaled."""
        scaler, self.scaler = self.scaler, None
        if scaler is None or self.uses_scaler or (self.step > 3 and torch.cuda.is_initialized()):
            return
        scale = scaler.get_scale()
        if scale != 1 and not self.probes.divided_by(scale):
            self._scaled_steps += 1
        if self._scaled_steps == 2:
            self.findings.append(
                Finding(
                    "scaler",
                    f"the optimizer steps with gradients that are still scaled by {scale:g}",
                    "optimizer.step() after scaler.scale(loss).backward()",
                    f"step {self.step - 1}",
                    "call scaler.step(optimizer) and scaler.update() instead of optimizer.step()",
                )
            )

    def clipped(self, limit: float) -> None:
        """Gradients are clipped to a limit."""
        self._clipped = limit

    def unscaled(self, scaler: Any) -> None:
        """Gradients are unscaled: a clipping limit for unscaled gradients was applied too early."""
        self.uses_scaler = True
        if self._clipped is not None and (self.step <= 3 or not torch.cuda.is_initialized()):
            scale = scaler.get_scale()
            if scale > 1 and self._clipped < _CLIP_FRACTION * scale:
                self.findings.append(_clipped_scaled(self._clipped, scale, self.step))
        self._clipped = None

    def before_step(self, passes: int) -> None:
        """The optimizer is about to step, after `passes` forward passes."""
        self._clipped = None
        self._detached.clear()
        self._check_scaler()
        if self.step > _WATCHED_STEPS:
            return
        self.kinds.append(tuple(name for root in self.roots for name in root.names))
        lines = Counter(root.line for root in self.roots)
        line, count = lines.most_common(1)[0] if lines else ("", 0)
        if count < 2 or len(lines) > 1 or passes != count or not line:
            return
        undivided = all(root.factors <= int(self.uses_scaler) and not root.sums for root in self.roots)
        if undivided and not self.probes.divided_by(count):
            self.findings.append(_undivided(line, count, self.step))

    def restart(self) -> None:
        """The gradients were cleared after the last backward, which belongs to no step."""
        self.roots.clear()

    def stepped(self) -> None:
        """A step is done."""
        self.roots.clear()
        self.targets.clear()
        self.settings.clear()
        self.step += 1

    def level(self) -> tuple[float, float, int] | None:
        """Mean, standard error and number of the newest losses."""
        if len(self.values) < _LEAST_LOSSES:
            return None
        values = torch.stack([value.double().cpu() for value in self.values[len(self.values) // 2 :]])
        values = values[values.isfinite()]  # a batch with a NaN may be left out on purpose
        if len(values) < _LEAST_LOSSES // 2:
            return None
        return float(values.mean()), float(values.std() / len(values) ** 0.5), len(values)

    def _read(self, root: torch.Tensor) -> None:
        factors = 0
        top: Any = root.grad_fn
        while top is not None and top.name() in (*_FACTORS, *_TRANSPARENT):
            factors += top.name() in _FACTORS
            top = next((child for child, _ in top.next_functions if child is not None), None)
        name = top.name() if top is not None else ""
        sums = name.startswith("SumBackward") or getattr(top, "_saved_reduction", 1) == 2
        self.roots.append(BackwardCall(user_line(), factors, sums, (root.grad_fn.name(), name)))  # type: ignore[union-attr]
        # Names and numbers only: reading a saved tensor may recompute a checkpointed part.
        for node in _nodes(root.grad_fn):
            if node.name() in _APPLIES and self._applied_twice(node, *_APPLIES[node.name()]):
                break
            if node.name().startswith("NllLoss") and _below(node) in _LAYERS:
                self.findings.append(_logits(self.step))
                break

    def _applied_twice(self, node: Any, wrong: str, function: str, loss: str) -> bool:
        if _below(node) != wrong:
            return False
        self.findings.append(
            Finding(
                "loss",
                f"{loss} gets the output of {function}: it expects logits and applies {function} itself",
                user_line(),
                f"step {self.step}",
                f"give it the model's output without {function}",
            )
        )
        return True

    def check_labels(self, labels: list[torch.Tensor]) -> None:
        """Compares the targets of the step's losses with the integer vectors of its batch, whose inputs were in the
        loader's order. One target must be in that order too; mixup has more."""
        targets = [target.detach().cpu() for target in self.targets if target.dim() == 1]
        given = [label.detach().cpu() for label in labels if len(label) > 3]
        if not targets or not given:
            return
        self.classes = next((pairs for t in targets for label in given if (pairs := _classes(label, t))), {})
        if any(torch.equal(target, label) for target in targets for label in given):
            self._wrong_labels = 0
            return
        shuffled = any(
            target.shape == label.shape and torch.equal(target.sort().values, label.sort().values)
            for target in targets
            for label in given
        )
        self._wrong_labels = self._wrong_labels + 1 if shuffled else 0
        if self._wrong_labels == 2:
            self.findings.append(
                Finding(
                    "labels",
                    "the loss gets the labels of the batch in a different order from the loader's",
                    "cross_entropy",
                    f"step {self.step - 1}",
                    "shuffle inputs and labels by the same permutation, or not at all",
                )
            )


def _nodes(first: Any) -> Iterator[Any]:
    """The graph's nodes nearest to the loss, breadth first."""
    queue, seen = [first], {first}
    while queue and len(seen) <= _MOST_NODES:
        node = queue.pop(0)
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)


def _classes(labels: torch.Tensor, targets: torch.Tensor) -> dict[str, int]:
    """The class that each label of the loader became in the loss; empty if a label became several classes."""
    if labels.shape != targets.shape or targets.is_floating_point():
        return {}
    pairs = set(zip(labels.tolist(), targets.tolist(), strict=True))
    found = {str(label): target for label, target in pairs}
    return found if len(found) == len(pairs) == len({target for _, target in pairs}) else {}


def _below(node: Any) -> str:
    """The operation that made the input of a node, past those that leave values as they are."""
    while True:
        node = next((one for one, _ in node.next_functions if one is not None), None)
        if node is None or node.name() not in _TRANSPARENT:
            return node.name() if node is not None else ""


def _logits(step: int) -> Finding:
    return Finding(
        "loss",
        "nll_loss gets the output of a layer: it expects log-probabilities",
        user_line(),
        f"step {step}",
        "use cross_entropy, or log_softmax before nll_loss",
    )


def _without_gradient(line: str, step: int) -> Finding:
    return Finding(
        "gather",
        "a collective without gradients was called on a tensor of the loss: no gradient flows through its result",
        line,
        f"step {step}",
        "use torch.distributed.nn.functional (all_gather, all_reduce), or put this rank's own tensor back into the "
        "gathered list; call it on tensor.detach() if no gradient is wanted",
    )


def _clipped_scaled(limit: float, scale: float, step: int) -> Finding:
    return Finding(
        "clipping",
        f"gradients are clipped to {limit:g} while they are scaled by {scale:g}: unscaling leaves almost nothing",
        "clip_grad before GradScaler.unscale_",
        f"step {step}",
        "call scaler.unscale_(optimizer) before clipping",
    )


def _undivided(line: str, count: int, step: int) -> Finding:
    return Finding(
        "accumulation",
        f"the gradients of {count} backward passes are added up and not divided by {count}",
        line,
        f"step {step}",
        f"divide each loss by {count}, (loss / {count}).backward(); nothing to do if the learning rate is chosen for "
        "the sum",
    )
