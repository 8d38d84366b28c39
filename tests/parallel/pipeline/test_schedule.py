"""The lists of a pipeline: sound in every shape, in the order of accumulation, with the memory they promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config.recipe import Data, Parallel, Recipe
from drumline.core.errors import UserError
from drumline.parallel.lanes import Instruction, InstructionLists, Op, channel
from drumline.parallel.pipeline.schedule import (
    SCHEDULES,
    forward_lists,
    instruction_lists,
    max_in_flight,
    pipeline_shape,
)
from tests.parallel.pipeline.soundness import check, in_flight, receives_in_flight

SHAPES = [
    (schedule, ranks, chunks, micro_batches)
    for schedule in SCHEDULES
    for ranks in range(1, 7)
    for chunks in ((2, 3) if schedule == "interleaved" else (1,))
    for micro_batches in range(1, 13)
    if schedule != "interleaved" or micro_batches % ranks == 0
]
shapes = st.sampled_from(SHAPES)

Message = tuple[Op, int, int]
"""Direction, receiving stage, micro-batch."""


def computing(instructions: Sequence[Instruction]) -> str:
    """Forwards and backwards as text: F or B, stage.micro-batch."""
    return " ".join(
        f"{'F' if item.kind == Op.FORWARD else 'B'}{item.stage}.{item.micro}"
        for item in instructions
        if item.kind in (Op.FORWARD, Op.BACKWARD)
    )


def test_every_schedule_of_every_shape_is_sound() -> None:
    for schedule, ranks, chunks, micro_batches in SHAPES:
        for reduces in (False, True):
            check(instruction_lists(schedule, ranks, chunks, micro_batches, reduces))


def test_no_schedule_stands_still_where_a_link_takes_one_message_after_the_other() -> None:
    """NCCL: begun by the host, in order, each once both sides and the computing before it have come to it."""
    for schedule, ranks, chunks, micro_batches in SHAPES:
        assert goes_on(instruction_lists(schedule, ranks, chunks, micro_batches, False), links=True)
        assert goes_on(forward_lists(ranks, chunks, micro_batches), links=True)


def test_one_group_for_all_messages_of_a_way_would_stand_still() -> None:
    assert not goes_on(instruction_lists("1f1b", 4, 1, 8, False), links=False)


def goes_on(lists: InstructionLists, links: bool) -> bool:
    """Whether all is done in the end. Every rank has a queue of computing (and waits), and one of messages for each
    link, or one for all messages of a way."""
    ranks = len(lists)
    work: list[list[Message | None]] = [[] for _ in lists]
    queues: dict[tuple[Any, ...], list[tuple[Message, int]]] = {}
    for rank, items in enumerate(lists):
        for item in items:
            way = channel(item, ranks)
            if way is None:
                work[rank].append(None)
            elif way[0] != way[1]:
                sends = item.kind in (Op.SEND_OUTPUT, Op.SEND_GRADIENT)
                receiver = item.stage + (1 if way[2] == Op.SEND_OUTPUT else -1) * sends
                message = (way[2], receiver, item.micro)
                if item.kind in (Op.WAIT_INPUT, Op.WAIT_GRADIENT):
                    work[rank].append(message)
                else:
                    queue = queues.setdefault((rank, *(way if links else way[2:])), [])
                    queue.append((message, len(work[rank])))
    done, came = [0] * ranks, set[Message]()
    moved = True
    while moved:
        moved = False
        for rank, each in enumerate(work):
            while done[rank] < len(each) and (each[done[rank]] is None or each[done[rank]] in came):
                done[rank] += 1
                moved = True
        heads = Counter(
            queue[0][0] for (rank, *_), queue in queues.items() if queue and queue[0][1] <= done[rank]
        )
        for message in (message for message, sides in heads.items() if sides == 2):
            came.add(message)
            for queue in queues.values():
                if queue and queue[0][0] == message:
                    del queue[0]
            moved = True
    return all(done[rank] == len(each) for rank, each in enumerate(work)) and not any(queues.values())


def test_forward_passes_alone_are_sound_for_any_number_of_micro_batches() -> None:
    for ranks in range(1, 7):
        for chunks in range(1, 4):
            for micro_batches in range(1, 13):
                lists = forward_lists(ranks, chunks, micro_batches)
                check(lists)
                done = Counter(item.kind for items in lists for item in items)
                assert done[Op.FORWARD] == ranks * chunks * micro_batches
                assert done[Op.BACKWARD] == done[Op.RECEIVE_GRADIENT] == done[Op.REDUCE] == 0


@given(shapes)
def test_every_stage_adds_gradients_in_the_order_of_accumulation(shape: tuple[str, int, int, int]) -> None:
    _, ranks, chunks, micro_batches = shape
    lists = instruction_lists(*shape, reduces=True)
    for rank, items in enumerate(lists):
        for stage in range(rank, ranks * chunks, ranks):
            for kind in (Op.FORWARD, Op.BACKWARD):
                micros = [item.micro for item in items if (item.kind, item.stage) == (kind, stage)]
                assert micros == list(range(micro_batches))


def test_memory_is_as_promised() -> None:
    for shape in SHAPES:
        _, ranks, *_ = shape
        lists = instruction_lists(*shape, reduces=False)
        assert [in_flight(items) for items in lists] == [max_in_flight(*shape, r) for r in range(ranks)]
        assert all(receives_in_flight(items) <= 2 for items in lists)


@pytest.mark.parametrize(
    ("schedule", "chunks", "micro_batches", "held"),
    [
        ("gpipe", 1, 8, [8, 8, 8, 8]),
        ("1f1b", 1, 8, [4, 3, 2, 1]),
        ("1f1b", 1, 2, [2, 2, 2, 1]),
        ("interleaved", 2, 8, [11, 9, 7, 5]),
        ("interleaved", 2, 4, [8, 8, 7, 5]),
        ("interleaved", 3, 8, [15, 13, 11, 9]),
    ],
)
def test_four_ranks_hold_these_many(schedule: str, chunks: int, micro_batches: int, held: list[int]) -> None:
    lists = instruction_lists(schedule, 4, chunks, micro_batches, reduces=False)
    assert [in_flight(items) for items in lists] == held


def test_at_most_one_input_and_one_gradient_are_being_received() -> None:
    for shape in SHAPES:
        for items in instruction_lists(*shape, reduces=False):
            for receive, wait in (
                (Op.RECEIVE_INPUT, Op.WAIT_INPUT),
                (Op.RECEIVE_GRADIENT, Op.WAIT_GRADIENT),
            ):
                turns = [item.kind for item in items if item.kind in (receive, wait)]
                assert turns == [receive, wait] * (len(turns) // 2)


def test_two_ranks_take_turns_as_the_textbook_says() -> None:
    first, last = instruction_lists("1f1b", 2, 1, 3, reduces=False)
    assert computing(first) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert computing(last) == "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"
    first, last = instruction_lists("gpipe", 2, 1, 2, reduces=False)
    assert computing(first) == "F0.0 F0.1 B0.0 B0.1"
    assert computing(last) == "F1.0 F1.1 B1.0 B1.1"


def test_interleaved_ranks_take_a_round_through_each_chunk() -> None:
    first, last = instruction_lists("interleaved", 2, 2, 4, reduces=False)
    assert computing(first) == (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    )
    assert computing(last) == (
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    )


def test_a_whole_list_reads_like_this() -> None:
    _, last = instruction_lists("1f1b", 2, 1, 2, reduces=True)
    assert [str(item) for item in last] == [
        "receive input of stage 1, micro-batch 0",
        "wait for input of stage 1, micro-batch 0",
        "receive input of stage 1, micro-batch 1",
        "forward of stage 1, micro-batch 0",
        "backward of stage 1, micro-batch 0",
        "send gradient of stage 1, micro-batch 0",
        "wait for input of stage 1, micro-batch 1",
        "forward of stage 1, micro-batch 1",
        "backward of stage 1, micro-batch 1",
        "send gradient of stage 1, micro-batch 1",
        "reduce of stage 1",
    ]


@given(shapes)
def test_a_stage_is_reduced_once_its_gradients_are_complete(shape: tuple[str, int, int, int]) -> None:
    _, ranks, chunks, micro_batches = shape
    for rank, items in enumerate(instruction_lists(*shape, reduces=True)):
        for stage in range(rank, ranks * chunks, ranks):
            place = items.index(Instruction(Op.REDUCE, stage))
            last = items.index(Instruction(Op.BACKWARD, stage, micro_batches - 1))
            assert [item.kind for item in items[last + 1 : place]] == [Op.SEND_GRADIENT] * (stage > 0)
    assert all(item.kind != Op.REDUCE for items in instruction_lists(*shape, reduces=False) for item in items)


@given(shapes)
def test_a_wait_comes_right_before_and_a_send_right_after_the_computing(
    shape: tuple[str, int, int, int],
) -> None:
    quiet = (Op.RECEIVE_INPUT, Op.RECEIVE_GRADIENT)
    for items in instruction_lists(*shape, reduces=False):
        left = [item for item in items if item.kind not in quiet]
        for before, after in pairwise(left):
            waits = before.kind in (Op.WAIT_INPUT, Op.WAIT_GRADIENT)
            if waits or after.kind in (Op.SEND_OUTPUT, Op.SEND_GRADIENT):
                assert (before.stage, before.micro) == (after.stage, after.micro)


def test_one_rank_with_several_chunks_sends_to_itself() -> None:
    (items,) = instruction_lists("interleaved", 1, 2, 2, reduces=False)
    assert computing(items) == "F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 B1.1 B0.1"
    assert Counter(item.kind for item in items)[Op.SEND_OUTPUT] == 2


def test_one_rank_and_one_stage_move_nothing() -> None:
    (items,) = instruction_lists("1f1b", 1, 1, 2, reduces=False)
    assert [item.kind for item in items] == [Op.FORWARD, Op.BACKWARD] * 2


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "micro_batches"),
    [
        ("1f1b", 4, 2, 8),
        ("gpipe", 4, 3, 8),
        ("interleaved", 4, 1, 8),
        ("interleaved", 4, 2, 6),
        ("1f1b", 4, 1, 0),
        ("1f1b", 0, 1, 4),
        ("zero-bubble", 4, 1, 8),
    ],
)
def test_a_schedule_that_cannot_run_is_never_built(
    schedule: str, ranks: int, chunks: int, micro_batches: int
) -> None:
    """The recipe's rules report these to users."""
    with pytest.raises(AssertionError):
        instruction_lists(schedule, ranks, chunks, micro_batches, reduces=False)


def test_interleaved_needs_a_multiple_of_the_processes() -> None:
    """With `parallel.stages = auto` this shows only once the number of processes is known."""
    parallel = Parallel(layout="pipeline", schedule="interleaved", micro_batches=6)
    recipe = Recipe(data=Data(batch=128), parallel=parallel)
    with pytest.raises(UserError, match=r"(?s)parallel\.micro_batches = 6.*multiple of 4") as error:
        pipeline_shape(recipe, processes=4, devices=1)
    assert "1f1b" in error.value.fix
    assert pipeline_shape(recipe, processes=3, devices=1).micro_batches == 6


def without(lists: Sequence[Sequence[Instruction]], lost: Instruction) -> list[list[Instruction]]:
    return [[item for item in items if item != lost] for items in lists]


def swapped(
    lists: Sequence[Sequence[Instruction]], one: Instruction, other: Instruction
) -> list[list[Instruction]]:
    change = {one: other, other: one}
    return [[change.get(item, item) for item in items] for items in lists]


@pytest.mark.parametrize(
    "shape",
    [
        ("gpipe", 3, 1, 2),
        ("1f1b", 1, 1, 2),
        ("1f1b", 3, 1, 4),
        ("interleaved", 2, 2, 4),
        ("interleaved", 1, 3, 2),
    ],
)
def test_the_check_finds_any_instruction_that_is_lost_or_doubled(shape: tuple[str, int, int, int]) -> None:
    lists = instruction_lists(*shape, reduces=False)
    for rank, items in enumerate(lists):
        for place, item in enumerate(items):
            with pytest.raises(AssertionError, match="stage"):
                check(without(lists, item))
            doubled = [list(items) for items in lists]
            doubled[rank].insert(place, item)
            with pytest.raises(AssertionError, match=f"{item}: twice"):
                check(doubled)


def test_the_check_names_what_is_wrong() -> None:
    lists = instruction_lists("1f1b", 2, 1, 4, reduces=True)
    send = Instruction(Op.SEND_OUTPUT, 0, 1)
    wait = Instruction(Op.WAIT_INPUT, 1, 1)
    with pytest.raises(
        AssertionError,
        match="send output of stage 0, micro-batch 2: meets receive input of stage 1, micro-batch 1",
    ):
        check(without(lists, send))
    with pytest.raises(AssertionError, match="forward of stage 1, micro-batch 1: before wait"):
        check(without(lists, wait))
    with pytest.raises(AssertionError, match="backward of stage 0, micro-batch 2: before wait"):
        check(without(lists, Instruction(Op.WAIT_GRADIENT, 0, 2)))
    with pytest.raises(AssertionError, match="backward of stage 0, micro-batch 3: missing"):
        check(without(lists, Instruction(Op.BACKWARD, 0, 3)))
    with pytest.raises(AssertionError, match="after its stage was reduced"):
        check([lists[0], [lists[1][-1], *lists[1][:-1]]])
    with pytest.raises(AssertionError, match="on rank 0"):
        check(lists[::-1])


def test_the_check_wants_gradients_in_ascending_order() -> None:
    """Both ranks take the gradients the other way round: sound as a pipeline, but not the order of accumulation."""
    lists: Sequence[Sequence[Instruction]] = instruction_lists("gpipe", 2, 1, 2, reduces=False)
    for stage in (0, 1):
        for kind in (Op.RECEIVE_GRADIENT, Op.WAIT_GRADIENT, Op.BACKWARD, Op.SEND_GRADIENT):
            lists = swapped(lists, Instruction(kind, stage, 0), Instruction(kind, stage, 1))
    with pytest.raises(AssertionError, match="backward of stage 1, micro-batch 1: not in ascending order"):
        check(lists)


def test_the_check_sees_a_rank_that_would_wait_for_ever() -> None:
    first, last = instruction_lists("1f1b", 2, 1, 2, reduces=False)
    wait = Instruction(Op.WAIT_GRADIENT, 0, 0)
    # The gradient of micro-batch 0 is awaited before its forward is sent.
    early = [Instruction(Op.RECEIVE_GRADIENT, 0, 0), wait]
    stuck = early + [item for item in first if item not in early]
    with pytest.raises(
        AssertionError, match="waits for ever: wait for gradient of stage 0, micro-batch 0; wait for input"
    ):
        check([stuck, last])


def test_the_check_sees_tensors_that_change_places_on_the_way() -> None:
    first, last = instruction_lists("gpipe", 2, 1, 2, reduces=False)
    sends = [Instruction(Op.SEND_OUTPUT, 0, micro) for micro in (0, 1)]
    moved = [item for item in first if item not in sends]
    place = moved.index(Instruction(Op.FORWARD, 0, 1)) + 1
    moved[place:place] = sends[::-1]
    with pytest.raises(AssertionError, match="meets"):
        check([moved, last])
