"""The split by time is the best of all splits, found without trying them all."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.errors import UserError
from drumline.parallel.pipeline.split import (
    Memory,
    balance,
    even_split,
    min_max_split,
    speed_up,
    stage_times,
    step_optimal_split,
    step_time,
)

# Small whole numbers, so that ties are common and sums exact.
numbers = st.integers(0, 9).map(float)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], int, list[float], list[float]]:
    times = draw(st.lists(numbers, min_size=1, max_size=9))
    inner = st.lists(numbers, min_size=len(times) - 1, max_size=len(times) - 1)
    return times, draw(st.integers(1, min(4, len(times)))), draw(inner), draw(inner)


def all_splits(units: int, stages: int) -> Iterator[tuple[int, ...]]:
    return combinations(range(1, units), stages - 1)


def slowest(times: Sequence[float], transfer: Sequence[float], split: Sequence[int]) -> float:
    return max(*stage_times(times, split), *(transfer[first - 1] for first in split), 0.0)


def crossed(crossing: Sequence[float], split: Sequence[int]) -> float:
    return math.fsum(crossing[first - 1] for first in split)


@given(cases())
def test_the_min_max_split_is_the_best_of_all_and_ties_go_to_the_smaller_then_earlier_crossing(
    case: tuple[list[float], int, list[float], list[float]],
) -> None:
    times, stages, transfer, crossing = case
    best = min(
        all_splits(len(times), stages),
        key=lambda split: (slowest(times, transfer, split), crossed(crossing, split), split),
    )
    assert min_max_split(times, stages, transfer, crossing=crossing) == best


@given(cases(), st.integers(1, 12))
def test_the_step_optimal_split_has_the_shortest_step_of_all(
    case: tuple[list[float], int, list[float], list[float]], micro_batches: int
) -> None:
    times, stages, transfer, _ = case
    found = step_optimal_split(times, stages, micro_batches, transfer)
    shortest = min(
        step_time(times, split, micro_batches, transfer) for split in all_splits(len(times), stages)
    )
    assert step_time(times, found, micro_batches, transfer) == shortest


@given(cases(), st.integers(1, 6), st.integers(0, 60), st.data())
def test_a_memory_limit_is_kept_and_costs_as_little_as_it_can(
    case: tuple[list[float], int, list[float], list[float]],
    micro_batches: int,
    limit: int,
    data: st.DataObject,
) -> None:
    times, stages, transfer, _ = case
    sizes = st.lists(st.integers(0, 9), min_size=len(times), max_size=len(times))
    kept, parameters = data.draw(sizes), data.draw(sizes)
    memory = Memory(kept, parameters, micro_batches, limit)

    def fits(split: Sequence[int]) -> bool:
        edges = (0, *split, len(times))
        return all(
            min(micro_batches, stages - stage) * sum(kept[edges[stage] : edges[stage + 1]])
            + 3 * sum(parameters[edges[stage] : edges[stage + 1]])
            <= limit
            for stage in range(stages)
        )

    fitting = [split for split in all_splits(len(times), stages) if fits(split)]
    if not fitting:
        with pytest.raises(UserError, match=f"no split into {stages} stages fits"):
            min_max_split(times, stages, transfer, memory)
        with pytest.raises(UserError, match=f"no split into {stages} stages fits"):
            step_optimal_split(times, stages, micro_batches, transfer, memory)
        return
    found = min_max_split(times, stages, transfer, memory)
    assert fits(found)
    assert slowest(times, transfer, found) == min(slowest(times, transfer, split) for split in fitting)
    assert fits(step_optimal_split(times, stages, micro_batches, transfer, memory))


def test_it_beats_equal_counts_where_units_cost_unequally() -> None:
    draw = random.Random(0)
    gains = []
    for _ in range(200):
        times = [draw.lognormvariate(0, 0.7) for _ in range(draw.randint(8, 40))]
        stages = draw.randint(2, 4)
        by_time, by_count = min_max_split(times, stages), even_split(len(times), stages)
        gains.append(max(stage_times(times, by_count)) / max(stage_times(times, by_time)))
    assert min(gains) >= 1
    assert sum(gains) / len(gains) > 1.1


def test_within_the_slack_the_smaller_crossing_wins() -> None:
    times, crossing = [5.0, 4.9, 0.1, 5.0], [9.0, 9.0, 1.0]
    assert min_max_split(times, 2, crossing=crossing) == (2,)
    assert min_max_split(times, 2, crossing=crossing, slack=0.02) == (3,)
    assert min_max_split([5.0] * 4, 2, crossing=crossing, slack=0.02) == (2,)


def test_a_crossing_slower_than_any_stage_is_avoided() -> None:
    assert min_max_split([1.0] * 4, 2, [0.0, 9.0, 0.0]) == (1,)
    assert min_max_split([1.0] * 4, 2, [0.0, 9.0, 0.0], crossing=[7.0, 0.0, 7.0]) == (1,)


def test_dear_crossings_may_be_worth_a_slower_stage_when_micro_batches_are_few() -> None:
    times, transfer = [4.0, 4.0, 1.0], [3.9, 0.0]
    assert step_optimal_split(times, 2, 1, transfer) == (2,)
    assert step_optimal_split(times, 2, 16, transfer) == (1,)


def test_equal_stages_reach_the_ideal_of_a_pipeline_and_uneven_ones_do_not() -> None:
    assert speed_up([1.0] * 8, (2, 4, 6), 8) == pytest.approx(4 / (1 + 3 / 8))
    assert balance([1.0] * 8, (2, 4, 6)) == 1
    assert balance([1.0] * 8, (1, 4, 6)) == 1.5
    assert speed_up([1.0] * 8, (1, 4, 6), 8) < 4 / (1 + 3 / 8) / 1.25


def test_an_even_split_differs_by_at_most_one_unit() -> None:
    assert even_split(11, 4) == (2, 5, 8)
    assert even_split(5, 1) == ()


@pytest.mark.parametrize("split", [min_max_split, even_split])
def test_more_stages_than_units_are_refused_with_how_many_there_can_be(split: object) -> None:
    units = 12 if split is even_split else [1.0] * 12
    with pytest.raises(UserError, match="at most 12 stages, not 17"):
        split(units, 17)  # type: ignore[operator]
    with pytest.raises(UserError, match="0 stages"):
        split(units, 0)  # type: ignore[operator]


def test_a_deep_model_is_split_in_well_under_a_second() -> None:
    draw = random.Random(1)
    times, transfer = [draw.random() for _ in range(60)], [draw.random() for _ in range(59)]
    begun = time.perf_counter()
    memory = Memory([1] * 60, [1] * 60, 8, 1000)
    min_max_split(times, 8, transfer, memory)
    step_optimal_split(times, 8, 16, transfer, memory)
    assert time.perf_counter() - begun < 2
