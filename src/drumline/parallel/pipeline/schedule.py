"""The order in which the ranks of a pipeline compute, and the transfers that this order needs: pure lists.

Promises: under every schedule, forward and backward of a stage take its micro-batches in ascending order, so
gradients add up in the order of plain accumulation. A rank holds at most `max_in_flight` micro-batches, and receives
at most one input and one gradient at a time. Tensors of one channel (from rank, to rank, direction) are received in
the order in which they are sent, so a transport needs no tags.
The recipe's rules and `shape.py` reject what a schedule cannot do; here it is asserted.

    gpipe        All forwards, then all backwards. Copies overlap with computation.
    1f1b         As few forwards first as keep the last rank busy, then one backward for each forward. It needs the
                 least memory, but leaves no forward to overlap a copy with: with P ranks and copies of t seconds, the
                 step takes (2 - 2/P) t longer for each micro-batch, however early receives are posted.
    interleaved  Several stages on each rank, in rounds of as many micro-batches as there are ranks. Copies overlap
                 with computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.parallel.lanes import Instruction, Op

PER_STAGE = 4
"""Micro-batches per stage by default: the stages are then busy at least four fifths of the time."""


@dataclass(frozen=True)
class Shape:
    """The shape of a pipeline."""

    lanes: int
    """Processes, or devices of one process, that work at the same time."""
    chunks: int
    """Stages on each."""
    micro_batches: int
    schedule: str
    replicas: int
    over_processes: bool

    @property
    def stages(self) -> int:
        return self.lanes * self.chunks

    @property
    def places(self) -> int:
        """Processes of one replica."""
        return self.lanes if self.over_processes else 1


def pipeline_shape(recipe: Recipe, processes: int, devices: int) -> Shape:
    """For a run of so many processes; `devices` are those that one process could spread over by itself: its GPUs, or
    the one CPU."""
    parallel = recipe.parallel
    over_processes = processes > 1
    lanes = (processes if over_processes else devices) if parallel.stages == "auto" else parallel.stages
    if over_processes and processes % lanes:
        raise UserError(
            f"parallel.stages = {lanes}: {processes} processes cannot be divided into pipelines of {lanes} stages",
            f"start {lanes}, {2 * lanes}, … processes, or give a divisor of {processes}",
        )
    if not over_processes and parallel.stages == "auto" and devices == 1:
        over = "" if parallel.layout == "model" else "--parallel.processes N (a process for each stage), or "
        raise UserError(
            f"parallel.layout = {parallel.layout}: needs at least two devices or two processes",
            f"give {over}--parallel.stages N --parallel.virtual to try it out on one device",
        )
    if not over_processes and lanes > devices and not parallel.virtual:
        over = (
            ""
            if parallel.layout == "model"
            else f"--parallel.processes {lanes} (a process for each stage), or "
        )
        raise UserError(
            f"parallel.stages = {lanes}: this process has {devices} device{'s' * (devices > 1)} for them",
            f"give {over}--parallel.virtual to let stages share a device (correct, but not faster)",
        )
    chunks = 1
    if parallel.schedule == "interleaved":
        chunks = 2 if parallel.chunks == "auto" else parallel.chunks
    replicas = processes // lanes if over_processes else 1
    return Shape(
        lanes=lanes,
        chunks=chunks,
        micro_batches=_micro_batches(recipe, lanes, replicas),
        schedule="gpipe" if parallel.layout == "model" else parallel.schedule,
        replicas=replicas,
        over_processes=over_processes,
    )


def _micro_batches(recipe: Recipe, lanes: int, replicas: int) -> int:
    parallel, data = recipe.parallel, recipe.data
    if parallel.layout == "model":
        return 1
    unit = data.mixing_unit
    most = data.batch // (replicas * unit)
    if parallel.micro_batches == "auto":
        wanted = max(1, min(PER_STAGE * lanes, most))
        return wanted if parallel.schedule != "interleaved" else max(lanes, wanted // lanes * lanes)
    if parallel.micro_batches > most:
        pairs = " (mixed samples stay in pairs)" if unit == 2 else ""
        raise UserError(
            f"parallel.micro_batches = {parallel.micro_batches}: data.batch = {data.batch} leaves each of {replicas} "
            f"replica(s) only {data.batch // replicas} samples{pairs}",
            f"give at most {max(1, most)}, or a larger --data.batch",
        )
    if parallel.schedule == "interleaved" and parallel.micro_batches % lanes:
        raise UserError(
            f"parallel.micro_batches = {parallel.micro_batches}: parallel.schedule = interleaved needs a multiple of "
            f"{lanes}, the number of processes or devices of a pipeline",
            f"give a multiple of {lanes}, or use --parallel.schedule 1f1b",
        )
    return parallel.micro_batches


SCHEDULES = ("gpipe", "1f1b", "interleaved")
RECEIVE_AHEAD = 2
"""How many computations ahead of its own a receive is posted: one forward and one backward to overlap the copy with.
In 1500 simulated uneven steps, 1 made some up to 23 % longer and more than 2 made none shorter. A posted receive
holds memory (and, on a GPU, multiprocessors)."""


def instruction_lists(
    schedule: str, ranks: int, chunks: int, micro_batches: int, reduces: bool
) -> tuple[tuple[Instruction, ...], ...]:
    """One list for each rank, for one optimizer step. `chunks` is the number of stages on each rank. `reduces` adds
    the sum over replicas, for each stage as soon as its gradients are complete."""
    assert schedule in SCHEDULES, schedule
    assert ranks >= 1, ranks
    assert micro_batches >= 1, micro_batches
    assert (chunks >= 2) == (schedule == "interleaved"), f"{chunks} stages on each rank under {schedule}"
    assert schedule != "interleaved" or micro_batches % ranks == 0, f"{micro_batches} over {ranks} ranks"
    orders = (_order(schedule, ranks, chunks, micro_batches, rank) for rank in range(ranks))
    return tuple(_with_transfers(order, ranks * chunks, reduces) for order in orders)


def forward_lists(ranks: int, chunks: int, micro_batches: int) -> tuple[tuple[Instruction, ...], ...]:
    """The lists of a pass without gradients (evaluation, a teacher), for any number of micro-batches."""
    orders = (_passes(Op.FORWARD, ranks, chunks, micro_batches, rank) for rank in range(ranks))
    return tuple(_with_transfers(order, ranks * chunks, reduces=False) for order in orders)


def max_in_flight(schedule: str, ranks: int, chunks: int, micro_batches: int, rank: int) -> int:
    """The most micro-batches that a rank holds, over all its stages, between their forward and their backward: those
    before its first backward, and the one paired with it."""
    return min(micro_batches * chunks, _first_forwards(schedule, ranks, chunks, micro_batches, rank) + 1)


def _order(schedule: str, ranks: int, chunks: int, micro_batches: int, rank: int) -> list[Instruction]:
    """What a rank computes: some forwards, then forwards and backwards in turn, then the remaining backwards."""
    onward = _passes(Op.FORWARD, ranks, chunks, micro_batches, rank)
    back = _passes(Op.BACKWARD, ranks, chunks, micro_batches, rank)
    first = min(_first_forwards(schedule, ranks, chunks, micro_batches, rank), len(onward))
    turns = chain.from_iterable(zip(onward[first:], back, strict=False))
    return [*onward[:first], *turns, *back[len(onward) - first :]]


def _first_forwards(schedule: str, ranks: int, chunks: int, micro_batches: int, rank: int) -> int:
    """How many forwards a rank runs before its first backward. This number defines the schedule."""
    after = ranks - 1 - rank
    if schedule == "gpipe":
        return micro_batches * chunks
    if schedule == "1f1b":
        return after
    # As in Megatron-LM: the first micro-batch goes through all chunks but the last in rounds of `ranks`. In its last
    # chunk, the way to the last rank and back takes two computations for each rank in between.
    return 2 * after + (chunks - 1) * ranks


def _passes(kind: Op, ranks: int, chunks: int, micro_batches: int, rank: int) -> list[Instruction]:
    """All forwards or all backwards of a rank: a round of micro-batches through one chunk, then through the next."""
    along = range(chunks) if kind == Op.FORWARD else range(chunks)[::-1]
    return [
        Instruction(kind, chunk * ranks + rank, micro)
        for start in range(0, micro_batches, ranks)
        for chunk in along
        for micro in range(start, min(start + ranks, micro_batches))
    ]


def _with_transfers(order: Sequence[Instruction], stages: int, reduces: bool) -> tuple[Instruction, ...]:
    """Adds the transfers to the computations. A receive is posted up to `RECEIVE_AHEAD` computations early, but not
    before the previous one of its direction has arrived. A wait comes right before the computation, a send right
    after it."""
    posted = _receives(order, stages)
    last = {item.stage: position for position, item in enumerate(order) if item.kind == Op.BACKWARD}
    instructions = posted[-1].copy()
    for position, item in enumerate(order):
        stage, micro = item.stage, item.micro
        if _receives_for(item, stages):
            wait = Op.WAIT_INPUT if item.kind == Op.FORWARD else Op.WAIT_GRADIENT
            instructions.append(Instruction(wait, stage, micro))
        instructions += posted[position]
        instructions.append(item)
        if item.kind == Op.FORWARD and stage < stages - 1:
            instructions.append(Instruction(Op.SEND_OUTPUT, stage, micro))
        if item.kind == Op.BACKWARD and stage > 0:
            instructions.append(Instruction(Op.SEND_GRADIENT, stage, micro))
        # After the send, which a different rank waits for.
        if reduces and last.get(stage) == position:
            instructions.append(Instruction(Op.REDUCE, stage))
    return tuple(instructions)


def _receives(order: Sequence[Instruction], stages: int) -> defaultdict[int, list[Instruction]]:
    """The receives to post at each position of the order, between wait and computation. -1 is the very start."""
    posted: defaultdict[int, list[Instruction]] = defaultdict(list)
    previous = {Op.FORWARD: -1, Op.BACKWARD: -1}
    for position, item in enumerate(order):
        if _receives_for(item, stages):
            receive = Op.RECEIVE_INPUT if item.kind == Op.FORWARD else Op.RECEIVE_GRADIENT
            start = max(previous[item.kind], position - RECEIVE_AHEAD)
            posted[start].append(Instruction(receive, item.stage, item.micro))
            previous[item.kind] = position
    return posted


def _receives_for(item: Instruction, stages: int) -> bool:
    return item.stage > 0 if item.kind == Op.FORWARD else item.stage < stages - 1
