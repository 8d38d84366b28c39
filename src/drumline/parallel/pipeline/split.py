"""Chooses where the stages of a model begin, from the measured times of its units, and says what a split gains.

Promises: a split is optimal over all splits, and the same for the same times. Ties go to the smaller crossing, then
to the earlier boundary. A split is given by the index of the unit that begins each stage but the first. A speed-up is
an upper bound: crossings cost nothing in it. Only `choose_split` and `measure_cuts` measure; the rest is pure.
Rejects more stages than the model can be cut into, and images that the model cannot take, before it measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from drumline.core.errors import UserError
from drumline.models.registry import IMAGENET, create_model, model_names
from drumline.parallel.pipeline.cut import (
    CutPoint,
    Traced,
    check_stage_count,
    even_split,
    trace,
    trainable_units,
)
from drumline.parallel.pipeline.profile import (
    Profile,
    ProfileOptions,
    UnitProfile,
    cut_points,
    profile,
)

Split = tuple[int, ...]


def min_max_split(
    times: Sequence[float], stages: int, crossing: Sequence[float] | None = None, slack: float = 0.0
) -> Split:
    """The split whose slowest stage is fastest: D[s][j] = min over i of max(D[s-1][i], t(i..j)).

    `crossing[i]` is the cost of a crossing in front of unit i + 1, such as its bytes, so it has one entry fewer than
    `times`. Among splits whose slowest stage is within a fraction `slack` of the best, the smallest sum of crossings
    wins. O(stages x units^2), after the sums.
    """
    units = len(times)
    check_stage_count("the model", units, stages)
    assert all(time >= 0 and math.isfinite(time) for time in times)
    assert crossing is None or len(crossing) == units - 1
    cost = [0.0, *(crossing or [0.0] * (units - 1))]
    # Rounded once, not by a difference of running sums: equal runs must compare as equal.
    span = [[math.fsum(times[first:last]) for last in range(first, units + 1)] for first in range(units)]

    def beginnings(stage: int, last: int) -> range:
        """Where a stage that ends before `last` may begin, with a unit for each stage before it."""
        return range(min(1, last)) if stage == 0 else range(stage, last)

    slowest = [0.0, *[math.inf] * units]
    for stage in range(stages):
        slowest = [
            min(
                (max(slowest[first], span[first][last - first]) for first in beginnings(stage, last)),
                default=math.inf,
            )
            for last in range(units + 1)
        ]
    limit = slowest[-1] * (1 + slack)
    reached: dict[int, tuple[float, Split]] = {0: (0.0, ())}
    for stage in range(stages):
        ahead: dict[int, tuple[float, Split]] = {}
        for last in range(1, units + 1):
            ways = [
                (reached[first][0] + cost[first], (*reached[first][1], first))
                for first in beginnings(stage, last)
                if first in reached and span[first][last - first] <= limit
            ]
            if ways:
                ahead[last] = min(ways)
        reached = ahead
    return reached[units][1][1:]


def stage_times(times: Sequence[float], split: Sequence[int]) -> list[float]:
    """The time of each stage."""
    return [math.fsum(times[first:last]) for first, last in pairwise((0, *split, len(times)))]


def speed_up(times: Sequence[float], split: Sequence[int], micro_batches: int) -> float:
    """The speed-up over one device that computes the same micro-batches, if crossings cost nothing. The first
    micro-batch passes all stages, and each other one adds the slowest stage. For equal stages it is stages / (1 +
    (stages - 1) / micro-batches), for others less."""
    each = stage_times(times, split)
    return micro_batches * math.fsum(times) / (math.fsum(each) + (micro_batches - 1) * max(each))


def balance(times: Sequence[float], split: Sequence[int]) -> float:
    """The time of the slowest stage over the mean: 1 if all are equal."""
    each = stage_times(times, split)
    total = math.fsum(each)
    return max(each) * len(each) / total if total else 1.0


def choose_split(
    traced: Traced,
    root: nn.Module,
    stages: int,
    shape: Sequence[int],
    options: ProfileOptions,
    points: Sequence[CutPoint] | None = None,
) -> tuple[tuple[str, ...], Profile]:
    """Where `stages` stages begin (all but the first) so that the slowest is as fast as possible, and the profile
    that decided it. `shape` is that of a micro-batch. Stages begin at `points`, by default `cut_points(traced)`."""
    points = cut_points(traced) if points is None else points
    check_stage_count(traced.name, len(points), stages)
    measured = profile(traced, root, shape, options, points)
    return time_split(measured, stages), measured


def stage_memory(units: Sequence[UnitProfile], in_flight: int) -> int:
    """Bytes of a stage of these units: the activations of the micro-batches in flight, which under 1F1B are at most
    S - s in stage s of S, and three copies of each parameter (itself, gradient, momentum)."""
    return sum(in_flight * unit.activation_bytes + 3 * unit.parameter_bytes for unit in units)


def time_split(measured: Profile, stages: int) -> tuple[str, ...]:
    """The names of the min-max split. Within 1 % of the best time, which no measurement resolves, the smallest
    crossing wins."""
    split = min_max_split(measured.times, stages, crossing=measured.crossings, slack=0.01)
    return tuple(measured.units[first].name for first in split)


@dataclass(frozen=True)
class Measurement:
    """The profile of a model, and what it was measured on."""

    profile: Profile
    device: str
    precision: str
    batch: int
    size: int
    returns: str
    """The type that the model returns in training. Only a Tensor can be trained as it is."""


@dataclass(frozen=True)
class StageSplit:
    """A model in a given number of stages, split by time and split evenly."""

    stages: int
    micro_batches: int
    names: tuple[str, ...]
    """Where each stage but the first begins."""
    shares: tuple[float, ...]
    """The fraction of the time that each stage takes."""
    balance: float
    """The time of the slowest stage over the mean."""
    speed_up: float
    """At most, over one device."""
    memory_bytes: tuple[int, ...]
    """Of each stage under 1F1B: activations in flight, parameters, gradients and momentum."""
    even_names: tuple[str, ...]
    even_balance: float
    even_speed_up: float

    @property
    def flags(self) -> str:
        """The flags for `drumline train`."""
        return f"--parallel.layout pipeline --parallel.stages {self.stages} --parallel.split {','.join(self.names)}"


def measure_cuts(
    name: str,
    classes: int,
    batch: int,
    size: int | None,
    options: ProfileOptions,
    *,
    inside_blocks: bool,
    stages: Sequence[int],
) -> Measurement:
    """Builds a model by name and measures the units between its cut points. `size` None is the model's usual size."""
    device = options.device
    torch.manual_seed(0)
    model = create_model(name, classes).train()
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    size = size or _usual_size(name, model)
    shape = (batch, 3, size, size)
    _check_size(name, model, size)
    traced = trace(model, sample=torch.empty(shape))
    points = trainable_units(traced, cut_points(traced, inside_blocks), model)
    check_stage_count(name, len(points), max(stages, default=1))
    try:
        measured = profile(traced, model, shape, options, points)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{batch} images of {size} x {size} do not fit into the GPU's memory",
            f"set --batch to less than {batch}",
        ) from error
    return Measurement(
        measured,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        precision=options.precision.name,
        batch=batch,
        size=size,
        returns=traced.records[True].returns,
    )


def plan_split(measured: Profile, stages: int, micro_batches: int) -> StageSplit:
    """The split by time, compared with the even one."""
    names = [unit.name for unit in measured.units]
    chosen = time_split(measured, stages)
    by_time, by_count = tuple(names.index(name) for name in chosen), even_split(len(names), stages)
    times = measured.times
    total = sum(times) or 1.0
    edges = pairwise((0, *by_time, len(names)))
    return StageSplit(
        stages=stages,
        micro_batches=micro_batches,
        names=chosen,
        shares=tuple(time / total for time in stage_times(times, by_time)),
        balance=balance(times, by_time),
        speed_up=speed_up(times, by_time, micro_batches),
        memory_bytes=tuple(
            stage_memory(measured.units[first:last], min(micro_batches, stages - stage))
            for stage, (first, last) in enumerate(edges)
        ),
        even_names=tuple(names[first] for first in by_count),
        even_balance=balance(times, by_count),
        even_speed_up=speed_up(times, by_count, micro_batches),
    )


def _check_size(name: str, model: nn.Module, size: int) -> None:
    """Runs the model once on the CPU: its own error is clearer than that of a single unit."""
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, size, size))
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{name} cannot take images of {size} x {size}: {type(error).__name__}: {reason}",
            "use a different --size",
        ) from error
    finally:
        model.train()


def _usual_size(name: str, model: nn.Module) -> int:
    """The side in pixels of the images that the model is usually trained on."""
    published = getattr(model, "pretrained_cfg", None)  # timm's
    size = published.get("input_size") if isinstance(published, dict) else None
    if size:
        return int(size[-1])
    return 32 if name in model_names() and name not in IMAGENET else 224
