"""Assigns units to stages, given the time of each unit. Pure.

Promises: a split is optimal over all splits, and the same for the same numbers. Ties go to the smaller crossing, then
to the earlier boundary. A split is given by the index of the unit that begins each stage but the first.
Rejects more stages than units, and a memory limit that no split meets.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from drumline.core.errors import UserError

Split = tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """The memory of a stage. Under 1F1B, stage s of S keeps the activations of at most S - s micro-batches."""

    activation: Sequence[int]
    """Bytes that each unit keeps for the backward of one micro-batch."""
    parameters: Sequence[int]
    """Bytes of each unit's parameters."""
    micro_batches: int
    limit: int
    """Bytes of one device."""
    copies: int = 3
    """Copies of each parameter: 3 with SGD (itself, gradient, momentum), 4 with AdamW."""

    def of(self, stage: int, stages: int, first: int, last: int) -> int:
        """Bytes of stage `stage` of `stages` if it has the units `first` to `last` - 1."""
        alive = min(self.micro_batches, stages - stage)
        return alive * sum(self.activation[first:last]) + self.copies * sum(self.parameters[first:last])


def min_max_split(
    times: Sequence[float],
    stages: int,
    transfer: Sequence[float] | None = None,
    memory: Memory | None = None,
    crossing: Sequence[float] | None = None,
    slack: float = 0.0,
) -> Split:
    """The split whose bottleneck, its slowest stage or crossing, is fastest:
    D[s][j] = min over i of max(D[s-1][i], t(i..j), transfer[i]).

    `transfer[i]` is the time to cross in front of unit i + 1, so it has one entry fewer than `times`. Among splits
    whose bottleneck is within a fraction `slack` of the best, the smallest sum of `crossing` wins (bytes, for
    example; `transfer` by default). O(stages x units^2), after the sums.
    """
    cost = _Costs(times, stages, transfer, memory, crossing)
    return cost.cheapest(cost.least_bottleneck() * (1 + slack))


def step_optimal_split(
    times: Sequence[float],
    stages: int,
    micro_batches: int,
    transfer: Sequence[float] | None = None,
    memory: Memory | None = None,
) -> Split:
    """The split with the shortest synchronous step, `step_time`. A slower bottleneck can pay off where crossings are
    expensive, since the first micro-batch passes them all. Tries every bottleneck that could win."""
    cost = _Costs(times, stages, transfer, memory)
    lowest, candidates = cost.least_bottleneck(), cost.bottlenecks()
    # No split has cheaper crossings than the one that may take any time.
    least = cost.crossed(cost.cheapest(math.inf))
    best, found = math.inf, Split()
    for bottleneck in candidates[bisect_left(candidates, lowest) :]:
        if (micro_batches - 1) * bottleneck + least >= best:
            break
        split = cost.cheapest(bottleneck)
        taken = (micro_batches - 1) * bottleneck + cost.crossed(split)
        if taken < best:
            best, found = taken, split
    return found


def even_split(units: int, stages: int) -> Split:
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


def stage_times(times: Sequence[float], split: Sequence[int]) -> list[float]:
    """The time of each stage."""
    return [math.fsum(times[first:last]) for first, last in pairwise((0, *split, len(times)))]


def step_time(
    times: Sequence[float], split: Sequence[int], micro_batches: int, transfer: Sequence[float] | None = None
) -> float:
    """The time of one synchronous step with equal micro-batches: the first one passes all stages and crossings, and
    each other one adds the bottleneck."""
    crossings = [transfer[first - 1] for first in split] if transfer else []
    along = [*stage_times(times, split), *crossings]
    return math.fsum(along) + (micro_batches - 1) * max(along)


def speed_up(times: Sequence[float], split: Sequence[int], micro_batches: int) -> float:
    """The speed-up over one device that computes the same micro-batches, if crossings cost nothing. For equal stages
    it is stages / (1 + (stages - 1) / micro-batches), for others less."""
    return micro_batches * math.fsum(times) / step_time(times, split, micro_batches)


def balance(times: Sequence[float], split: Sequence[int]) -> float:
    """The time of the slowest stage over the mean: 1 if all are equal."""
    each = stage_times(times, split)
    total = math.fsum(each)
    return max(each) * len(each) / total if total else 1.0


class _Costs:
    """The time of every run of units, and which runs may be a stage."""

    def __init__(
        self,
        times: Sequence[float],
        stages: int,
        transfer: Sequence[float] | None,
        memory: Memory | None,
        crossing: Sequence[float] | None = None,
    ) -> None:
        units = len(times)
        check_stage_count("the model", units, stages)
        assert all(time >= 0 and math.isfinite(time) for time in times)
        assert transfer is None or len(transfer) == units - 1
        assert crossing is None or len(crossing) == units - 1
        self.units, self.stages, self.memory = units, stages, memory
        # Rounded once, not by a difference of running sums: equal runs must compare as equal.
        self.span = [
            [math.fsum(times[first:last]) for last in range(first, units + 1)] for first in range(units)
        ]
        self.transfer = [0.0, *(transfer or [0.0] * (units - 1))]
        self.crossing = [0.0, *crossing] if crossing is not None else self.transfer

    def least_bottleneck(self) -> float:
        """The time of the fastest bottleneck, over all splits that fit."""
        reached = [0.0, *[math.inf] * self.units]
        for stage in range(self.stages):
            reached = [
                min(
                    (
                        max(reached[first], self.span[first][last - first], self.transfer[first])
                        for first in self._beginnings(stage, last)
                        if self._fits(stage, first, last)
                    ),
                    default=math.inf,
                )
                for last in range(self.units + 1)
            ]
        if math.isinf(reached[-1]):
            assert self.memory is not None
            raise UserError(
                f"no split into {self.stages} stages fits into {self.memory.limit / 2**30:.3g} GiB per stage",
                "use more stages, smaller micro-batches, or fewer of them",
            )
        return reached[-1]

    def cheapest(self, bottleneck: float) -> Split:
        """Among the splits with no stage or crossing slower than `bottleneck`, the one with the smallest sum of
        crossings. Ties go to the first in order."""
        reached: dict[int, tuple[float, Split]] = {0: (0.0, ())}
        for stage in range(self.stages):
            ahead: dict[int, tuple[float, Split]] = {}
            for last in range(1, self.units + 1):
                ways = [
                    (reached[first][0] + self.crossing[first], (*reached[first][1], first))
                    for first in self._beginnings(stage, last)
                    if first in reached
                    and self.span[first][last - first] <= bottleneck
                    and self.transfer[first] <= bottleneck
                    and self._fits(stage, first, last)
                ]
                if ways:
                    ahead[last] = min(ways)
            reached = ahead
        assert self.units in reached, "no split meets this bottleneck"
        return reached[self.units][1][1:]

    def crossed(self, split: Split) -> float:
        return math.fsum(self.crossing[first] for first in split)

    def bottlenecks(self) -> list[float]:
        """Every time that could be the bottleneck of a split, in order."""
        return sorted({*self.transfer, *(time for spans in self.span for time in spans)})

    def _beginnings(self, stage: int, last: int) -> range:
        """Where a stage that ends before `last` may begin: the first stage at the first unit, any other with at least
        one unit for each stage before it."""
        return range(min(1, last)) if stage == 0 else range(stage, last)

    def _fits(self, stage: int, first: int, last: int) -> bool:
        memory = self.memory
        return memory is None or memory.of(stage, self.stages, first, last) <= memory.limit
