"""What the loop calls backward on, read from the autograd graph and the calls around it.

Promises: the graph is read, never changed: the names of at most 64 nodes, in the first steps. Finds probabilities
where a loss expects logits, labels in a different order than the batch's, accumulation without division, clipping of
scaled gradients, and collectives that cut the gradient. All of them may be meant, so they only warn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from drumline.guards.finding import Finding
from drumline.guards.place import user_places
from drumline.guards.probes import Probes

_WATCHED = 12
"""Steps in which the graph is read."""
_NODES = 64
_KEPT = 64
_LEVEL = 16
"""Minimum number of losses for a level."""
_PASSED_ON = (
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
_SCALES = ("MulBackward0", "DivBackward0")
_RAW = ("AddmmBackward0", "MmBackward0", "ConvolutionBackward0")
_DOUBLE = {
    "LogSoftmaxBackward0": ("SoftmaxBackward0", "softmax", "cross_entropy"),
    "BinaryCrossEntropyWithLogitsBackward0": (
        "SigmoidBackward0",
        "sigmoid",
        "binary_cross_entropy_with_logits",
    ),
}


@dataclass
class Root:
    """One call of backward."""

    place: str
    scaled: int
    """Products and quotients at the top of the graph, before anything else."""
    sums: bool
    names: tuple[str, ...]


@dataclass
class _Gathered:
    tensor: torch.Tensor
    outputs: Any
    place: str


@dataclass
class Losses:
    """The calls of backward since the last step."""

    probes: Probes
    step: int = 1
    roots: list[Root] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """To be warned of before the next step."""
    values: list[torch.Tensor] = field(default_factory=list)
    """The newest losses, on their device."""
    targets: list[torch.Tensor] = field(default_factory=list)
    """What cross_entropy was given since the last step."""
    settings: set[str] = field(default_factory=set)
    """Of the calls of cross_entropy since the last step, in the first steps."""
    renamed: dict[str, int] = field(default_factory=dict)
    """What the loader's labels became in the loss."""
    uses_scaler: bool = False
    scaler: Any = None
    """The one that scaled a loss of this step."""
    _scaled_steps: int = 0
    kinds: list[tuple[str, ...]] = field(default_factory=list)
    _gathered: list[_Gathered] = field(default_factory=list)
    _clipped: float | None = None
    _wrong_labels: int = 0

    def begins(self, roots: Any, in_step: bool) -> None:
        """Backward is called; `in_step`: after a forward pass of the model."""
        self._clipped = None
        tensors = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or not in_step:
                continue
            if tensor.numel() == 1:
                self.values.append(tensor.detach().reshape(()).clone())
                del self.values[:-_KEPT]
            if self.step <= _WATCHED and tensor.grad_fn is not None:
                self._read(tensor)
        for one in self._gathered if in_step else ():
            parts = one.outputs if isinstance(one.outputs, list | tuple) else ()
            if not any(part.requires_grad for part in parts):
                self.findings.append(_cut(one.place, self.step))
        self._gathered.clear()

    def reduced(self, tensor: torch.Tensor, outputs: Any) -> None:
        """A collective without gradients was called on a tensor that needs them."""
        if not tensor.is_leaf and len(self._gathered) < 8:
            self._gathered.append(_Gathered(tensor, outputs, _place()))

    def stepped_scaled(self) -> None:
        """Before a step: a loss was scaled, and nobody has unscaled its gradients."""
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
        """Gradients are clipped."""
        self._clipped = limit

    def unscales(self, scaler: Any) -> None:
        """Gradients are unscaled now: a limit for unscaled ones was applied too early."""
        self.uses_scaler = True
        if self._clipped is not None and (self.step <= 3 or not torch.cuda.is_initialized()):
            scale = scaler.get_scale()
            if scale > 1 and self._clipped < 0.05 * scale:
                self.findings.append(_clipped_scaled(self._clipped, scale, self.step))
        self._clipped = None

    def before_step(self, passes: int) -> None:
        """The optimizer is about to step after so many forward passes."""
        self._clipped = None
        self._gathered.clear()
        self.stepped_scaled()
        if self.step > _WATCHED:
            return
        self.kinds.append(tuple(name for root in self.roots for name in root.names))
        lines = Counter(root.place for root in self.roots)
        place, count = lines.most_common(1)[0] if lines else ("", 0)
        if count < 2 or len(lines) > 1 or passes != count or not place:
            return
        undivided = all(root.scaled <= int(self.uses_scaler) and not root.sums for root in self.roots)
        if undivided and not self.probes.divided_by(count):
            self.findings.append(_undivided(place, count, self.step))

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
        if len(self.values) < _LEVEL:
            return None
        values = torch.stack([value.double().cpu() for value in self.values[len(self.values) // 2 :]])
        values = values[values.isfinite()]  # a batch with a NaN may be left out on purpose
        if len(values) < _LEVEL // 2:
            return None
        return float(values.mean()), float(values.std() / len(values) ** 0.5), len(values)

    def _read(self, root: torch.Tensor) -> None:
        scaled = 0
        top: Any = root.grad_fn
        while top is not None and top.name() in (*_SCALES, *_PASSED_ON):
            scaled += top.name() in _SCALES
            top = next((child for child, _ in top.next_functions if child is not None), None)
        name = top.name() if top is not None else ""
        sums = name.startswith("SumBackward") or getattr(top, "_saved_reduction", 1) == 2
        self.roots.append(Root(_place(), scaled, sums, (root.grad_fn.name(), name)))  # type: ignore[union-attr]
        # Names and numbers only: to read a saved tensor may compute a checkpointed part anew.
        for node in _nodes(root.grad_fn):
            if node.name() in _DOUBLE and self._double(node, *_DOUBLE[node.name()]):
                break
            if node.name().startswith("NllLoss") and _below(node) in _RAW:
                self.findings.append(_raw(self.step))
                break

    def _double(self, node: Any, wrong: str, function: str, loss: str) -> bool:
        if _below(node) != wrong:
            return False
        self.findings.append(
            Finding(
                "loss",
                f"{loss} gets the output of {function}: it expects logits and applies {function} itself",
                _place(),
                f"step {self.step}",
                f"give it the model's output without {function}",
            )
        )
        return True

    def check_labels(self, labels: list[torch.Tensor]) -> None:
        """The targets of the step's losses against the integer vectors of its batch, whose inputs were in order: one
        target must be in order too (mixup has others beside it)."""
        targets = [target.detach().cpu() for target in self.targets if target.dim() == 1]
        given = [label.detach().cpu() for label in labels if len(label) > 3]
        if not targets or not given:
            return
        self.renamed = next((pairs for t in targets for label in given if (pairs := _pairs(label, t))), {})
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
                    "the loss gets the labels of the batch in a different order than the loader gave them",
                    "cross_entropy",
                    f"step {self.step - 1}",
                    "shuffle inputs and labels by the same permutation, or not at all",
                )
            )


def _nodes(first: Any) -> Iterator[Any]:
    """The graph's nodes nearest to the loss, breadth first."""
    queue, seen = [first], {first}
    while queue and len(seen) <= _NODES:
        node = queue.pop(0)
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)


def _pairs(labels: torch.Tensor, targets: torch.Tensor) -> dict[str, int]:
    """What each label of the loader became in the loss; nothing if one became several things."""
    if labels.shape != targets.shape or targets.is_floating_point():
        return {}
    pairs = set(zip(labels.tolist(), targets.tolist(), strict=True))
    found = {str(label): target for label, target in pairs}
    return found if len(found) == len(pairs) == len({target for _, target in pairs}) else {}


def _below(node: Any) -> str:
    """What made the input of a node, past what passes values on."""
    while True:
        node = next((one for one, _ in node.next_functions if one is not None), None)
        if node is None or node.name() not in _PASSED_ON:
            return node.name() if node is not None else ""


def _raw(step: int) -> Finding:
    return Finding(
        "loss",
        "nll_loss gets the output of a layer: it expects log-probabilities",
        _place(),
        f"step {step}",
        "use cross_entropy, or log_softmax before nll_loss",
    )


def _place() -> str:
    places = user_places()
    return str(places[0]) if places else ""


def hidden(what: str, step: int) -> Finding:
    """NaN that something replaces."""
    return Finding(
        "hidden-nan",
        what,
        f"step {step}",
        f"step {step}",
        "find where the NaN arises (torch.autograd.set_detect_anomaly) and remove its cause",
    )


def _cut(place: str, step: int) -> Finding:
    return Finding(
        "gather",
        "a collective without gradients was called on a tensor of the loss: no gradient flows through its result",
        place,
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


def _undivided(place: str, count: int, step: int) -> Finding:
    return Finding(
        "accumulation",
        f"the gradients of {count} backward passes are added up and not divided by {count}",
        place,
        f"step {step}",
        f"divide each loss by {count}, (loss / {count}).backward(); nothing to do if the rate is made for the sum",
    )
