"""Which units go into which stage, when the time of each unit is known. Pure.

Promises: the split is exact, the best of all of them, and the same for the same numbers; what is equally good is
decided by the smaller crossing, then by the earlier boundary. A split is told by the number of the unit that begins
each stage but the first. Refuses more stages than units, and a memory limit that no split keeps.
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
    """What a stage may hold. Under 1F1B, stage s of S keeps activations of at most S - s micro-batches."""

    activation: Sequence[int]
    """Bytes that each unit keeps for the backward of one micro-batch."""
    parameters: Sequence[int]
    """Bytes of each unit's own parameters."""
    micro_batches: int
    limit: int
    """Bytes of one device."""
    copies: int = 3
    """How often a parameter is there: 3 with SGD (itself, gradient, momentum), 4 with AdamW."""

    def of(self, stage: int, stages: int, first: int, last: int) -> int:
        """Bytes of stage `stage` of `stages`, if it has the units from `first` to before `last`."""
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
    """The split whose slowest part is the fastest: D[s][j] = min over i of max(D[s-1][i], t(i..j), transfer[i]).

    `transfer[i]` is the time of crossing in front of unit i + 1: one fewer than `times`. A part is a stage or a
    crossing. Equally good splits, and those whose slowest part takes up to `slack` (a share) longer, are decided by
    the smaller sum of `crossing` (bytes, say; `transfer` unless given). O(stages x units^2), after the sums.
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
    """The split with the shortest synchronous step, `step_time`: a somewhat slower bottleneck may pay where crossings
    are dear, since the first micro-batch passes them all. Every bottleneck that could win is tried."""
    cost = _Costs(times, stages, transfer, memory)
    lowest, candidates = cost.least_bottleneck(), cost.bottlenecks()
    # No split crosses more cheaply than the one that may take any time.
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
    """As many units in each stage, or one more or less, whatever they cost: `parallel.split = even`."""
    check_stage_count("the model", units, stages)
    return tuple(stage * units // stages for stage in range(1, stages))


def check_stage_count(model: str, units: int, stages: int) -> None:
    """Before anything is measured for a split that cannot be."""
    if stages < 1:
        raise UserError(f"{stages} stages: a model has at least one", "give 1 or more")
    if stages > units:
        raise UserError(
            f"{model} can be cut into at most {units} stages, not {stages}",
            f"use {units} or fewer; `drumline plan --cuts MODEL --all` lists places inside blocks too",
        )


def stage_times(times: Sequence[float], split: Sequence[int]) -> list[float]:
    """The time of each stage."""
    return [math.fsum(times[first:last]) for first, last in pairwise((0, *split, len(times)))]


def step_time(
    times: Sequence[float], split: Sequence[int], micro_batches: int, transfer: Sequence[float] | None = None
) -> float:
    """Of one synchronous step, with equal work in each micro-batch: the first one's way through all stages and
    crossings, and the bottleneck once for each other one."""
    crossings = [transfer[first - 1] for first in split] if transfer else []
    parts = [*stage_times(times, split), *crossings]
    return math.fsum(parts) + (micro_batches - 1) * max(parts)


def speed_up(times: Sequence[float], split: Sequence[int], micro_batches: int) -> float:
    """Over one device that computes the same micro-batches, when crossings cost nothing: stages / (1 + (stages - 1) /
    micro-batches) for equal stages, less for others."""
    return micro_batches * math.fsum(times) / step_time(times, split, micro_batches)


def balance(times: Sequence[float], split: Sequence[int]) -> float:
    """The slowest stage's time over the mean stage's: 1 is even."""
    each = stage_times(times, split)
    total = math.fsum(each)
    return max(each) * len(each) / total if total else 1.0


class _Costs:
    """Times of every run of units, and what may be a stage."""

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
        """Of the slowest part, over all splits that fit."""
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
                f"no split into {self.stages} stages fits into {self.memory.limit / 2**30:.3g} GiB for each",
                "use more stages, smaller micro-batches, or fewer of them",
            )
        return reached[-1]

    def cheapest(self, bottleneck: float) -> Split:
        """Among the splits with no part slower than `bottleneck`, the one with the smallest sum of crossings; among
        equals the first in order."""
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
        assert self.units in reached, "called with a bottleneck that some split keeps"
        return reached[self.units][1][1:]

    def crossed(self, split: Split) -> float:
        return math.fsum(self.crossing[first] for first in split)

    def bottlenecks(self) -> list[float]:
        """Every time that could be a split's slowest part, in order."""
        return sorted({*self.transfer, *(time for spans in self.span for time in spans)})

    def _beginnings(self, stage: int, last: int) -> range:
        """Where a stage that ends before `last` may begin: at the first unit if it is the first stage; later with a
        unit for each stage before."""
        return range(min(1, last)) if stage == 0 else range(stage, last)

    def _fits(self, stage: int, first: int, last: int) -> bool:
        memory = self.memory
        return memory is None or memory.of(stage, self.stages, first, last) <= memory.limit
