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
    balance,
    even_split,
    min_max_split,
    speed_up,
    stage_times,
)

# Small whole numbers, so that ties are common and sums exact.
numbers = st.integers(0, 9).map(float)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], int, list[float]]:
    times = draw(st.lists(numbers, min_size=1, max_size=9))
    inner = st.lists(numbers, min_size=len(times) - 1, max_size=len(times) - 1)
    return times, draw(st.integers(1, min(4, len(times)))), draw(inner)


def all_splits(units: int, stages: int) -> Iterator[tuple[int, ...]]:
    return combinations(range(1, units), stages - 1)


def crossed(crossing: Sequence[float], split: Sequence[int]) -> float:
    return math.fsum(crossing[first - 1] for first in split)


@given(cases())
def test_the_min_max_split_is_the_best_of_all_and_ties_go_to_the_smaller_then_earlier_crossing(
    case: tuple[list[float], int, list[float]],
) -> None:
    times, stages, crossing = case
    best = min(
        all_splits(len(times), stages),
        key=lambda split: (max(stage_times(times, split)), crossed(crossing, split), split),
    )
    assert min_max_split(times, stages, crossing) == best


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


def test_equal_stages_reach_the_ideal_of_a_pipeline_and_uneven_ones_do_not() -> None:
    assert speed_up([1.0] * 8, (2, 4, 6), 8) == pytest.approx(4 / (1 + 3 / 8))
    assert balance([1.0] * 8, (2, 4, 6)) == 1
    assert balance([1.0] * 8, (1, 4, 6)) == 1.5
    assert speed_up([1.0] * 8, (1, 4, 6), 8) < 4 / (1 + 3 / 8) / 1.25


def test_an_even_split_differs_by_at_most_one_unit() -> None:
    assert even_split(11, 4) == (2, 5, 8)
    assert even_split(5, 1) == ()


@pytest.mark.parametrize("split", [min_max_split, even_split])
def test_more_stages_than_units_are_rejected_with_the_largest_number(split: object) -> None:
    units = 12 if split is even_split else [1.0] * 12
    with pytest.raises(UserError, match="at most 12 stages, not 17"):
        split(units, 17)  # type: ignore[operator]
    with pytest.raises(UserError, match="0 stages"):
        split(units, 0)  # type: ignore[operator]


def test_a_deep_model_is_split_in_well_under_a_second() -> None:
    draw = random.Random(1)
    times, crossing = [draw.random() for _ in range(60)], [draw.random() for _ in range(59)]
    begun = time.perf_counter()
    min_max_split(times, 8, crossing, slack=0.01)
    assert time.perf_counter() - begun < 2
