"""Measures two models side by side: costs of each layer, values with equal weights, and the time of a step.

Promises: both models see the same images. Values are compared in fp64 where the models can compute in it, so that
rounding errors do not count as differences. Times are medians of rounds that alternate between the models.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from drumline.comparison.differences import Differences, find_differences
from drumline.comparison.layers import Layer, Walk
from drumline.comparison.walk import returned, walk
from drumline.core.arithmetic import leave_no_trace
from drumline.core.errors import UserError
from drumline.models.find_taps import find_taps

ROUNDS = 5
"""Timed steps of each model, after one warm-up step."""
LEAST_ROUNDS, ENOUGH_S = 3, 60.0
"""After this many seconds, so many rounds are enough."""
LAYER_ROUNDS = 3
TOLERANCE = 1e-6
"""The largest relative difference of equal values in fp64."""
SINGLE_TOLERANCE = 1e-3
"""The same in fp32, for models that cannot compute in fp64: layers multiply the differences of rounding."""
Progress = Callable[[Sequence[int]], Iterable[int]]


@dataclass(frozen=True)
class Side:
    """One of the two models."""

    label: str
    model: nn.Module
    trained: bool = False
    """Whether its weights come from a file."""


@dataclass(frozen=True)
class Values:
    """What the models compute with equal weights."""

    copied: int
    """Parameters that were made equal before."""
    tolerance: float
    output: float
    """The relative difference of the outputs in training; infinity if their shapes differ."""
    evaluation: float
    """The same in evaluation mode."""
    layer: int | None
    """The first layer of A whose output differs from that of its partner, in shape or in values."""
    gradient: str
    """The parameter of A, nearest to the output, whose gradient differs."""

    @property
    def equal(self) -> bool:
        return max(self.output, self.evaluation) <= self.tolerance and not self.gradient


@dataclass(frozen=True)
class Drawn:
    """Initial weights of partners that are drawn differently."""

    a: str
    b: str
    spread_a: float
    spread_b: float


@dataclass(frozen=True)
class Weights:
    """How far apart the weights of two trained models are."""

    equal: int
    different: int
    largest: str
    """The parameter of A that differs most, relative to its size."""
    distance: float


@dataclass(frozen=True)
class Totals:
    """Of a whole model: the parameters, and the costs of a step."""

    parameters: int
    unused: int
    """Parameters that the forward does not read."""
    flops: int
    """Of the forward of one image, two for a multiplication with an addition."""
    kept_bytes: int
    """Activations that autograd keeps for the backward, for one image."""
    step_s: float
    """Forward and backward of the batch."""


@dataclass(frozen=True)
class Measured:
    """All measurements of two models."""

    a: tuple[Layer, ...]
    b: tuple[Layer, ...]
    differences: Differences
    stages: tuple[str, ...]
    """Of each layer of A: stem, stage1, ..., head; empty if the model has no stages."""
    values: Values
    drawn: tuple[Drawn, ...]
    weights: Weights | None
    """If both are trained."""
    totals: tuple[Totals, Totals]
    same_shapes: bool
    """Whether the parameters have the same shapes in the order of their use, up to sides of 1."""
    same_order: bool
    """Whether they have the same shapes in the order in which the models list them."""
    same_names: bool
    ratios: tuple[float, ...]
    """The time of a step of B over that of A, in each round."""

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def measure(a: Side, b: Side, images: Tensor, progress: Progress = iter) -> Measured:
    """Compares two models on the same images."""
    costs = [walk(side.model, images, cost=True) for side in (a, b)]
    found = find_differences(costs[0].layers, costs[1].layers)
    drawn: tuple[Drawn, ...] = ()
    weights = None
    if a.trained and b.trained:
        weights = _weights(a.model, b.model, costs[0].layers, costs[1].layers, found)
    elif not (a.trained or b.trained):
        drawn = tuple(_drawn(a.model, b.model, costs[0].layers, costs[1].layers, found))
    values = _values(a, b, costs[0].layers, costs[1].layers, found, images[:2])
    steps, seconds = _times(a.model, b.model, images, progress)
    layers = [
        tuple(replace(layer, seconds=taken) for layer, taken in zip(walked.layers, times, strict=True))
        for walked, times in zip(costs, seconds, strict=True)
    ]
    totals = [
        _totals(side.model, walked, len(images), median(times))
        for side, walked, times in zip((a, b), costs, zip(*steps, strict=True), strict=True)
    ]
    states = [[(name, tuple(each.shape)) for name, each in side.model.named_parameters()] for side in (a, b)]
    return Measured(
        layers[0], layers[1], found, _stages(a.model, layers[0], images), values, drawn, weights,
        (totals[0], totals[1]), list(_used(layers[0]).values()) == list(_used(layers[1]).values()),
        [shape for _, shape in states[0]] == [shape for _, shape in states[1]], states[0] == states[1],
        tuple(theirs / ours for ours, theirs in steps),
    )  # fmt: skip


def _totals(model: nn.Module, walked: Walk, images: int, step_s: float) -> Totals:
    used = {name for layer in walked.layers for name in layer.parameters}
    return Totals(
        parameters=sum(each.numel() for each in model.parameters()),
        unused=sum(each.numel() for name, each in model.named_parameters() if name not in used),
        flops=round(sum(layer.flops for layer in walked.layers) / images),
        kept_bytes=round(sum(layer.kept_bytes for layer in walked.layers) / images),
        step_s=step_s,
    )


def _stages(model: nn.Module, layers: Sequence[Layer], images: Tensor) -> tuple[str, ...]:
    try:
        taps = find_taps(model, images[:1])
    except UserError:
        return ("",) * len(layers)
    ends: list[tuple[int, str]] = []
    for tap, location in taps.items():
        module = location.partition(":")[0]
        inside = [
            number
            for number, layer in enumerate(layers)
            if f"{layer.name}.".startswith(f"{module}.") and module
        ]
        if inside and not tap.endswith(".pre") and tap != "pooled" and not location.endswith(":input"):
            ends.append((max(inside), tap))
    if not ends:
        return ("",) * len(layers)
    return tuple(next((tap for end, tap in ends if number <= end), "head") for number in range(len(layers)))


def _used(layers: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter without sides of 1, in the order of their use."""
    return {
        name: tuple(side for side in shape if side > 1)
        for layer in layers
        for name, shape in zip(layer.parameters, layer.shapes, strict=True)
    }


def _partners(a: Sequence[Layer], b: Sequence[Layer], found: Differences) -> dict[str, str]:
    """The parameter of B for each of A: by position if all shapes agree in the order of their use, otherwise those of
    partners."""
    ones, others = _used(a), _used(b)
    if list(ones.values()) == list(others.values()):
        return dict(zip(ones, others, strict=True))
    result: dict[str, str] = {}
    for i, j in found.partners.items():
        same_kind = zip(a[i].parameters, b[j].parameters, strict=False) if a[i].kind == b[j].kind else ()
        result |= {one: other for one, other in same_kind if ones[one] == others[other]}
    return result


def _statistics(a: Sequence[Layer], b: Sequence[Layer], found: Differences) -> dict[str, str]:
    """Running statistics of partners."""
    return {
        one: other
        for i, j in found.partners.items()
        if a[i].kind == b[j].kind and "running statistics" in a[i].settings
        for one, other in zip(a[i].statistics, b[j].statistics, strict=False)
    }


def _drawn(
    a: nn.Module, b: nn.Module, ones: Sequence[Layer], others: Sequence[Layer], found: Differences
) -> Iterable[Drawn]:
    mine, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    for one, other in _partners(ones, others, found).items():
        spread = [float(each.detach().float().pow(2).mean().sqrt()) for each in (mine[one], theirs[other])]
        # The spread of n draws is known to about 1 / sqrt(2 n).
        unsure = 1.1 + 4 / mine[one].numel() ** 0.5
        if max(spread) > unsure * min(spread) + 1e-8:
            yield Drawn(one, other, spread[0], spread[1])


def _weights(
    a: nn.Module, b: nn.Module, ones: Sequence[Layer], others: Sequence[Layer], found: Differences
) -> Weights:
    mine, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    apart = {
        one: relative(mine[one].detach().double().flatten(), theirs[other].detach().double().flatten())
        for one, other in _partners(ones, others, found).items()
    }
    largest = max(apart, key=lambda name: apart[name], default="")
    different = sum(distance > 0 for distance in apart.values())
    return Weights(len(apart) - different, different, largest, apart.get(largest, 0.0))


def _values(
    a: Side, b: Side, ones: Sequence[Layer], others: Sequence[Layer], found: Differences, images: Tensor
) -> Values:
    models = copy.deepcopy(a.model), copy.deepcopy(b.model)
    pairs = _partners(ones, others, found)
    if not (a.trained or b.trained):
        _enliven(models[0])
    if not (a.trained and b.trained):
        with torch.no_grad():
            for names, tables in (
                (pairs, [dict(model.named_parameters()) for model in models]),
                (_statistics(ones, others, found), [dict(model.named_buffers()) for model in models]),
            ):
                for one, other in names.items():
                    source, target = tables[0][one], tables[1][other]
                    if b.trained:
                        source, target = target, source
                    if source.numel() == target.numel():
                        target.copy_(source.reshape(target.shape))
    try:
        walks = _both(models, images, torch.float64)
        tolerance = TOLERANCE
    except (UserError, RuntimeError):  # such as a cast to fp32 in its own code
        walks = _both(models, images, torch.float32)
        tolerance = SINGLE_TOLERANCE
    (mine, theirs), evaluated = walks
    first = None
    if len(mine.values) == len(ones) and len(theirs.values) == len(others):
        apart = (
            i
            for i, j in found.partners.items()
            if _differ(ones[i], others[j], mine.values[i], theirs.values[j], tolerance)
        )
        first = next(apart, None)
    gradient = ""
    if first is None:
        for one, other in reversed(list(pairs.items())):
            grads = mine.gradients.get(one), theirs.gradients.get(other)
            if (grads[0] is None) != (grads[1] is None) or (
                grads[0] is not None
                and grads[1] is not None
                and relative(grads[0].flatten(), grads[1].flatten()) > 100 * tolerance
            ):
                gradient = one
                break
    assert mine.output is not None
    assert theirs.output is not None
    return Values(
        len(pairs), tolerance, relative(mine.output, theirs.output), relative(*evaluated), first, gradient
    )


@torch.no_grad()
def _enliven(model: nn.Module) -> None:
    """Adds noise to initial weights that would hide differences: a BatchNorm or layer scale that starts at zero
    switches its branch off, and a bias of zero cannot be told from none."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.dim() <= 1 or float(parameter.float().pow(2).mean().sqrt()) < _FAINT:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter.device, parameter.dtype))


_FAINT = 1e-3


def _differ(a: Layer, b: Layer, one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether partners differ in size or in values. The values of transposed outputs cannot be compared."""
    shapes = [[side for side in layer.output[1:] if side > 1] for layer in (a, b)]
    if shapes[0] == shapes[1]:
        return relative(one, other) > tolerance
    return sorted(shapes[0]) != sorted(shapes[1])


def _both(
    models: tuple[nn.Module, nn.Module], images: Tensor, dtype: torch.dtype
) -> tuple[list[Walk], tuple[Tensor, Tensor]]:
    for model in models:
        model.to(dtype)
    walks = [walk(model, images.to(dtype), values=True) for model in models]
    outputs = []
    for model in models:
        with leave_no_trace(model), torch.no_grad():
            torch.manual_seed(0)
            out = returned(model.eval()(images.to(dtype)))
            assert out is not None
            outputs.append(out.double().cpu())
    return walks, (outputs[0], outputs[1])


def relative(one: Tensor, other: Tensor | None) -> float:
    """The largest difference of two tensors over the largest value."""
    if other is None or one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    finite = one.isfinite()
    if not torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()) or not torch.equal(
        finite, other.isfinite()
    ):
        return float("inf")
    one, other = one[finite], other[finite]
    scale = max(float(each.abs().max()) if each.numel() else 0.0 for each in (one, other))
    return float((one - other).abs().max()) / scale if scale else 0.0


def _times(
    a: nn.Module, b: nn.Module, images: Tensor, progress: Progress
) -> tuple[list[tuple[float, float]], list[list[float]]]:
    """The seconds of a step in each round, for both models; and for each model the median seconds of its layers."""
    steps: list[tuple[float, float]] = []
    layers: list[list[list[float]]] = [[], []]
    begun = time.monotonic()
    for number in progress(range(1 + LAYER_ROUNDS + ROUNDS)):
        if len(steps) >= LEAST_ROUNDS and time.monotonic() - begun > ENOUGH_S:
            break
        if 1 <= number <= LAYER_ROUNDS:
            for table, model in zip(layers, (a, b), strict=True):
                table.append([layer.seconds for layer in walk(model, images).layers])
        else:
            taken = _step(a, images), _step(b, images)
            if number:
                steps.append(taken)
    return steps, [[median(times) for times in zip(*rounds, strict=True)] for rounds in layers]


def _step(model: nn.Module, images: Tensor) -> float:
    with leave_no_trace(model, devices=[images.device]), torch.enable_grad():
        model.train()
        _wait(images)
        before = time.perf_counter()
        output = returned(model(images))
        assert output is not None
        output.sum().backward()
        _wait(images)
        return time.perf_counter() - before


def _wait(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
