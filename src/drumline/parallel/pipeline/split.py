"""Chooses where the stages of a model begin: by name, evenly, or by the measured times of its units.

Promises: a split by time is optimal over all splits, and the same for the same times. Ties go to the smaller
crossing, then to the earlier boundary. A split is given by the index of the unit that begins each stage but the
first. A speed-up is an upper bound: crossings cost nothing in it. Only `choose_cut` and `choose_split` measure; the
rest is pure. Rejects more stages than the model can be cut into before it measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from drumline.core.errors import UserError
from drumline.parallel.pipeline.cut import CutPoint, Traced, cut_points
from drumline.parallel.pipeline.profile import Profile, ProfileOptions, profile
from drumline.parallel.pipeline.schedule import Shape
from drumline.parallel.world import World


@dataclass(frozen=True)
class ChosenCut:
    """Where the stages of a run begin."""

    names: tuple[str, ...]
    """The modules that begin stages 1, 2, …"""
    why: str = ""
    """Why there, for the log."""


def choose_cut(
    traced: Traced,
    shape: Shape,
    split: str,
    options: ProfileOptions,
    world: World,
    before: Sequence[str] = (),
    log: Callable[[str], None] = lambda text: None,
) -> ChosenCut:
    """The cut for a value of `parallel.split`. Rank 0 measures; all processes call it and agree. `before` is the cut
    of the run that this one resumes."""
    stages = shape.stages
    if split not in ("even", "time"):
        return ChosenCut(named_cut(split, stages))
    units = trainable_units(traced, cut_points(traced))
    if shape.chunks > 1 and stages > len(units):
        raise UserError(
            f"parallel.stages = {shape.lanes} x parallel.chunks = {shape.chunks}: {traced.name} can be cut into at "
            f"most {len(units)} stages",
            "give fewer stages, use --parallel.schedule 1f1b, or name cuts inside blocks with parallel.split",
        )
    even = even_cuts(traced, stages, units)  # rejects too many stages before anything is measured
    if split == "even":
        return ChosenCut(even, " (even)")
    if len(before) + 1 == stages > 1 and {*before} <= {point.name for point in traced.points}:
        return ChosenCut(tuple(before), " (as in the run it resumes)")
    found = ChosenCut(())
    if world.is_rank_zero and stages > 1:
        log("measuring where to cut")
        try:
            names, measured = choose_split(traced, stages, options, units)
            noisy = ", on a noisy machine" if measured.noisy else ""
            found = ChosenCut(names, f" (balanced by measured times{noisy})")
        except torch.OutOfMemoryError:
            found = ChosenCut(even, " (even: the whole model does not fit on one device to be measured)")
    agreed: ChosenCut = world.broadcast_object(found)
    return agreed


def named_cut(split: str, stages: int) -> tuple[str, ...]:
    """The modules that `parallel.split` names."""
    names = tuple(name.strip() for name in split.split(","))
    if not all(names):
        raise UserError(
            f"parallel.split = {split!r}: a name is empty",
            "give time, even, or the modules that begin stages 1, 2, …: --parallel.split layer2,layer3",
        )
    if len(names) + 1 != stages:
        raise UserError(
            f"parallel.split = {split}: makes {len(names) + 1} stage(s), but {stages} are needed",
            "name the module that begins each stage but the first",
        )
    return names


def even_cuts(traced: Traced, stages: int, units: Sequence[CutPoint] | None = None) -> tuple[str, ...]:
    """Where stages begin (all but the first) so that each has as many units as the others, give or take one."""
    units = traced.units if units is None else units
    count = len(units)
    if stages > count:
        trainable = " with something to train in each" if count < len(traced.units) else ""
        limit = f"can be cut into at most {count} stages" if count > 1 else "cannot be cut between blocks"
        raise UserError(
            f"parallel.stages = {stages}: {traced.name} {limit}{trainable}",
            f"set parallel.stages to {count} or less, or name cuts inside blocks with parallel.split"
            if count > 1
            else "name a cut inside a block with parallel.split, or use a different parallel.layout",
        )
    return tuple(units[first].name for first in even_split(count, stages))


def trainable_units(traced: Traced, units: Sequence[CutPoint]) -> tuple[CutPoint, ...]:
    """The units that have something to train. Others are joined to the next unit, or at the end to the one before:
    frozen layers are cheap, and a stage of frozen layers alone would have no optimizer."""
    trained = {name for name, parameter in traced.model.named_parameters() if parameter.requires_grad}
    kept, trainable = [units[0]], False
    for unit, segment in zip(units, traced.split([unit.name for unit in units[1:]]), strict=True):
        if trainable and unit is not units[0]:
            kept.append(unit)
            trainable = False
        trainable = trainable or not trained.isdisjoint(segment.parameters)
    return tuple(kept if trainable else kept[:-1] or kept)


def even_split(units: int, stages: int) -> tuple[int, ...]:
    """As many units in each stage, give or take one, regardless of their cost: `parallel.split = even`."""
    check_stage_count("the model", units, stages)
    return tuple(stage * units // stages for stage in range(1, stages))


def check_stage_count(model: str, units: int, stages: int) -> None:
    """Rejects a number of stages that the model cannot be cut into."""
    if stages < 1:
        raise UserError(f"{stages} stages: a model has at least one", "use 1 or more")
    if stages > units:
        raise UserError(
            f"{model} can be cut into at most {units} stages, not {stages}",
            f"use {units} or fewer; `drumline plan --cuts MODEL --all` also lists cut points inside blocks",
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
    traced: Traced, stages: int, options: ProfileOptions, points: Sequence[CutPoint] | None = None
) -> tuple[tuple[str, ...], Profile]:
    """Where `stages` stages begin (all but the first) so that the slowest is as fast as possible, and the profile
    that decided it. Stages begin at `points`, by default `cut_points(traced)`."""
    points = cut_points(traced) if points is None else points
    check_stage_count(traced.name, len(points), stages)
    measured = profile(traced, options, points)
    return time_split(measured, stages), measured


def time_split(measured: Profile, stages: int) -> tuple[str, ...]:
    """The names of the min-max split. Within 1 % of the best time, which no measurement resolves, the smallest
    crossing wins."""
    split = min_max_split(measured.times, stages, crossing=measured.crossings, slack=0.01)
    return tuple(measured.units[first].name for first in split)
