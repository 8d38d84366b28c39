"""Pipelines on paper: the textbook's times where the textbook holds, and what it leaves out where it does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.parallel.lanes import Instruction, Op, Span, StageTimes, bubble, simulate, step_time
from drumline.parallel.pipeline.schedule import forward_lists, instruction_lists
from tests.parallel.pipeline.soundness import ideal_bubble

COMPUTE = (Op.FORWARD, Op.BACKWARD)
RECEIVE = {Op.WAIT_INPUT: Op.RECEIVE_INPUT, Op.WAIT_GRADIENT: Op.RECEIVE_GRADIENT}

shapes = st.sampled_from(
    [
        ("gpipe", 2, 1, 3),
        ("gpipe", 3, 1, 5),
        ("1f1b", 2, 1, 4),
        ("1f1b", 4, 1, 3),
        ("1f1b", 3, 1, 7),
        ("interleaved", 2, 2, 4),
        ("interleaved", 3, 2, 3),
        ("interleaved", 1, 2, 3),
        ("interleaved", 2, 3, 4),
    ]
)


def equal(stages: int, forward: float, backward: float, transfer: float = 0, reduce: float = 0) -> StageTimes:
    return StageTimes([forward] * stages, [backward] * stages, [transfer] * (stages - 1), [reduce] * stages)


def took(
    schedule: str, ranks: int, chunks: int, micro_batches: int, transfer: float = 0, rendezvous: bool = False
) -> float:
    """A step with forwards of 1 second and backwards of 2."""
    lists = instruction_lists(schedule, ranks, chunks, micro_batches, reduces=False)
    times = replace(equal(ranks * chunks, 1, 2, transfer), rendezvous=rendezvous)
    return step_time(simulate(lists, times))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 12])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 1)])
def test_equal_stages_take_the_textbook_time(
    schedule: str, ranks: int, micro_batches: int, forward: float, backward: float
) -> None:
    lists = instruction_lists(schedule, ranks, 1, micro_batches, reduces=False)
    spans = simulate(lists, equal(ranks, forward, backward))
    assert step_time(spans) == (micro_batches + ranks - 1) * (forward + backward)
    assert bubble(spans) == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert bubble(spans) == pytest.approx(ideal_bubble(ranks, 1, micro_batches))


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaving_makes_the_bubble_as_small_as_it_promises(ranks: int, chunks: int, rounds: int) -> None:
    micro_batches = ranks * rounds
    lists = instruction_lists("interleaved", ranks, chunks, micro_batches, reduces=False)
    spans = simulate(lists, equal(ranks * chunks, 1, 2))
    assert step_time(spans) == (micro_batches * chunks + ranks - 1) * 3
    assert bubble(spans) == pytest.approx(ideal_bubble(ranks, chunks, micro_batches))
    if ranks > 1:
        assert bubble(spans) < ideal_bubble(ranks, 1, micro_batches)


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_that_fit_under_computing_lengthen_only_the_fill_and_the_drain(
    schedule: str, chunks: int, ranks: int, rendezvous: bool
) -> None:
    for transfer in (0.25, 1):
        extra = [
            took(schedule, ranks, chunks, micro_batches, transfer, rendezvous)
            - took(schedule, ranks, chunks, micro_batches)
            for micro_batches in (8, 16, 64)
        ]
        assert extra[0] == extra[1] == extra[2] <= 2 * (ranks * chunks - 1) * transfer


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_1f1b_pays_for_its_small_memory_with_copies_it_cannot_hide(ranks: int, rendezvous: bool) -> None:
    """A micro-batch must have come back before the next goes in, and its way is computing and copies with no slack:
    P micro-batches pass in P computings and 2 (P - 1) copies. No way of posting receives changes that."""
    transfer = 0.25
    longer, shorter = (
        took("1f1b", ranks, 1, micro_batches, transfer, rendezvous)
        for micro_batches in (9 * ranks, 8 * ranks)
    )
    assert longer - shorter == pytest.approx(ranks * 3 + 2 * (ranks - 1) * transfer)


def late(lists: Sequence[Sequence[Instruction]]) -> list[list[Instruction]]:
    """The same lists with every receive begun only when its tensor is needed."""
    return [
        [
            piece
            for item in items
            if item.kind not in RECEIVE.values()
            for piece in ((replace(item, kind=RECEIVE[item.kind]), item) if item.kind in RECEIVE else (item,))
        ]
        for items in lists
    ]


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_receives_posted_ahead_are_worth_it_where_a_copy_needs_both_sides(schedule: str, chunks: int) -> None:
    lists = instruction_lists(schedule, 4, chunks, 16, reduces=False)
    buffered = equal(4 * chunks, 1, 2, 0.5)
    both = replace(buffered, rendezvous=True)
    assert step_time(simulate(lists, both)) == step_time(simulate(lists, buffered))
    assert step_time(simulate(late(lists), both)) > step_time(simulate(lists, both))
    assert step_time(simulate(late(lists), buffered)) == step_time(simulate(lists, buffered))


@given(shapes, st.data())
def test_uneven_stages_take_at_least_as_long_as_the_busiest_rank_and_the_longest_way(
    shape: tuple[str, int, int, int], data: st.DataObject
) -> None:
    _, ranks, chunks, micro_batches = shape
    times = data.draw(some_times(ranks * chunks))
    spans = simulate(instruction_lists(*shape, reduces=True), times)
    both = [sum(pair) for pair in zip(times.forward, times.backward, strict=True)]
    work = [micro_batches * sum(both[rank::ranks]) for rank in range(ranks)]
    way = sum(both) + 2 * sum(times.transfer)
    whole = step_time(spans)
    assert whole >= max(*work, way) - 1e-9
    assert bubble(spans) == pytest.approx(1 - sum(work) / (ranks * whole), abs=1e-9)
    if shape[0] == "gpipe":
        # The bottleneck works without a break between the first and the last tensor that passes it.
        assert (
            whole
            <= way
            + (micro_batches - 1)
            * (max([*times.forward, *times.transfer]) + max([*times.backward, *times.transfer]))
            + sum(times.reduce)
            + 1e-9
        )


@given(shapes, st.data(), st.booleans())
def test_no_time_that_grows_makes_a_step_shorter(
    shape: tuple[str, int, int, int], data: st.DataObject, rendezvous: bool
) -> None:
    lists = instruction_lists(*shape, reduces=True)
    times = replace(data.draw(some_times(shape[1] * shape[2])), rendezvous=rendezvous)
    before = step_time(simulate(lists, times))
    for name in ("forward", "backward", "transfer", "reduce"):
        values = list(getattr(times, name))
        if values:
            values[data.draw(st.integers(0, len(values) - 1))] += data.draw(st.floats(0, 3))
            grown: dict[str, Any] = {name: values}
            assert step_time(simulate(lists, replace(times, **grown))) >= before - 1e-9


@given(shapes, st.data(), st.booleans())
def test_the_lists_order_is_kept_and_no_lane_does_two_things_at_once(
    shape: tuple[str, int, int, int], data: st.DataObject, rendezvous: bool
) -> None:
    lists = instruction_lists(*shape, reduces=True)
    times = replace(data.draw(some_times(shape[1] * shape[2])), rendezvous=rendezvous)
    spans = simulate(lists, times)
    for kinds in (COMPUTE, (Op.SEND_OUTPUT,), (Op.SEND_GRADIENT,), (Op.REDUCE,)):
        for rank, items in enumerate(lists):
            mine = [span for span in spans if span.lane == rank and span.kind in kinds]
            wanted = [(item.kind, item.stage, item.micro) for item in items if item.kind in kinds]
            assert [(span.kind, span.stage, span.micro) for span in mine] == wanted
            assert all(one.end <= other.start for one, other in pairwise(mine))


@given(shapes, st.data(), st.booleans())
def test_nothing_is_computed_before_it_has_arrived_and_idle_time_is_waiting(
    shape: tuple[str, int, int, int], data: st.DataObject, rendezvous: bool
) -> None:
    lists = instruction_lists(*shape, reduces=False)
    times = replace(data.draw(some_times(shape[1] * shape[2])), rendezvous=rendezvous)
    spans = simulate(lists, times)
    at = {(span.kind, span.stage, span.micro): span for span in spans}
    for (kind, stage, micro), span in at.items():
        if kind == Op.SEND_OUTPUT:
            assert at[Op.FORWARD, stage, micro].end <= span.start
            assert span.end <= at[Op.FORWARD, stage + 1, micro].start
            assert span.end - span.start == pytest.approx(times.transfer[stage])
        if kind == Op.SEND_GRADIENT:
            assert at[Op.BACKWARD, stage, micro].end <= span.start
            assert span.end <= at[Op.BACKWARD, stage - 1, micro].start
            assert span.end - span.start == pytest.approx(times.transfer[stage - 1])
    lanes: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in (*COMPUTE, *RECEIVE):
            lanes[span.lane].append(span)
    for lane in lanes.values():
        assert lane[0].start == 0
        assert all(one.end == other.start for one, other in pairwise(lane))


def test_gradients_are_exchanged_beside_the_drain_and_stage_0_is_the_last() -> None:
    lists = instruction_lists("1f1b", 4, 1, 8, reduces=True)
    alone = step_time(simulate(lists, equal(4, 1, 2)))
    spans = simulate(lists, equal(4, 1, 2, reduce=2))
    ends = {span.stage: span.end for span in spans if span.kind == Op.REDUCE}
    # A rank is done one backward (2 s) after the next one: only the exchange of stage 0 comes after the computing.
    assert ends == {0: alone + 2, 1: alone, 2: alone - 2, 3: alone - 4}
    assert step_time(spans) == alone + 2


def test_two_stages_of_one_rank_exchange_one_after_the_other() -> None:
    lists = instruction_lists("interleaved", 1, 2, 1, reduces=True)
    spans = [span for span in simulate(lists, equal(2, 1, 1, reduce=5)) if span.kind == Op.REDUCE]
    assert [(span.stage, span.start, span.end) for span in spans] == [(1, 3, 8), (0, 8, 13)]


def test_a_small_step_by_hand() -> None:
    lists = instruction_lists("1f1b", 2, 1, 1, reduces=False)
    spans = simulate(lists, StageTimes([1, 2], [3, 4], [0.5], [0, 0]))
    assert spans == (
        Span(0, Op.FORWARD, 0, 0, 0, 1),
        Span(1, Op.WAIT_INPUT, 1, 0, 0, 1.5),
        Span(0, Op.SEND_OUTPUT, 0, 0, 1, 1.5),
        Span(0, Op.WAIT_GRADIENT, 0, 0, 1, 8),
        Span(1, Op.FORWARD, 1, 0, 1.5, 3.5),
        Span(1, Op.BACKWARD, 1, 0, 3.5, 7.5),
        Span(1, Op.SEND_GRADIENT, 1, 0, 7.5, 8),
        Span(0, Op.BACKWARD, 0, 0, 8, 11),
    )
    assert step_time(spans) == 11
    assert bubble(spans) == pytest.approx(1 - 10 / 22)


def test_a_forward_pass_alone_fills_and_never_drains() -> None:
    spans = simulate(forward_lists(3, 1, 5), equal(3, 1, 0, 0.5))
    assert step_time(spans) == 5 + 2 * 1.5


def test_times_that_do_not_fit_are_rejected() -> None:
    lists = instruction_lists("gpipe", 2, 1, 2, reduces=False)
    with pytest.raises(AssertionError, match="3 forward times for 2 stages"):
        simulate(lists, StageTimes([1, 1, 1], [1, 1], [0], [0, 0]))
    with pytest.raises(AssertionError, match="a negative transfer time"):
        simulate(lists, StageTimes([1, 1], [1, 1], [-1], [0, 0]))


def test_lists_that_stand_still_are_named() -> None:
    first, last = instruction_lists("gpipe", 2, 1, 1, reduces=False)
    silent = [item for item in first if item.kind != Op.SEND_OUTPUT]
    with pytest.raises(
        AssertionError, match="wait for gradient of stage 0, micro-batch 0; wait for input of stage 1"
    ):
        simulate([silent, last], equal(2, 1, 1))


@st.composite
def some_times(draw: st.DrawFn, stages: int) -> StageTimes:
    def some(count: int) -> list[float]:
        return draw(st.lists(st.floats(0.125, 4), min_size=count, max_size=count))

    return StageTimes(some(stages), some(stages), some(stages - 1), some(stages))
