"""The order in which the ranks of a pipeline compute, and every transfer that order needs: pure lists.

Promises: forward and backward of a stage take its micro-batches in ascending order under every schedule, so gradients
add up in the order of plain accumulation. A rank holds at most `promised_in_flight` micro-batches, and at most one
input and one gradient are being received at a time. Tensors of one channel (from rank, to rank, direction) are
received in the order in which they are sent, so that a transport needs no tags.
Refuses, naming the field: what a schedule cannot do, and schedules that split the backward pass.

    gpipe        all forwards, then all backwards; copies hide under computing
    1f1b         as few forwards first as keep the last rank busy, then one backward for each forward. The least
                 memory, at a price: no forward is left over to hide a copy under, so P ranks and copies of t seconds
                 lengthen the step by (2 - 2/P) t for each micro-batch, however early receives are posted
    interleaved  several stages on each rank, taken in rounds of as many micro-batches as there are ranks; copies
                 hide under computing
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

from drumline.config.layouts import INSTEAD_OF_SPLIT, WHY_NOT_SPLIT, splits_backward
from drumline.core.errors import UserError
from drumline.parallel.pipeline.instructions import Instruction, InstructionLists, Kind

SCHEDULES = ("gpipe", "1f1b", "interleaved")

RECEIVE_AHEAD = 2
"""How many computings before its own a tensor may begin to arrive: a forward and a backward to hide the copy under.
Of 1500 simulated uneven steps, 1 made some up to 23 % longer and more than 2 made none shorter; a receive that waits
holds memory (and, on a GPU, multiprocessors)."""

Channel = tuple[int, int, Kind]
"""From rank, to rank, and SEND_OUTPUT or SEND_GRADIENT: two ranks may send each other both."""


def instruction_lists(
    schedule: str, ranks: int, chunks: int, micro_batches: int, reduces: bool
) -> tuple[tuple[Instruction, ...], ...]:
    """One list for each rank, for one optimizer step. `chunks` is the number of stages on each rank; `reduces` adds
    the exchange with other replicas, for each stage as soon as its gradients are complete."""
    _refuse(schedule, ranks, chunks, micro_batches)
    orders = (_order(schedule, ranks, chunks, micro_batches, rank) for rank in range(ranks))
    return tuple(_with_transfers(order, ranks * chunks, reduces) for order in orders)


def forward_lists(ranks: int, chunks: int, micro_batches: int) -> tuple[tuple[Instruction, ...], ...]:
    """The lists of a pass without gradients (evaluation, a teacher); any number of micro-batches."""
    _refuse_counts(ranks, micro_batches)
    orders = (_passes(Kind.FORWARD, ranks, chunks, micro_batches, rank) for rank in range(ranks))
    return tuple(_with_transfers(order, ranks * chunks, reduces=False) for order in orders)


def promised_in_flight(schedule: str, ranks: int, chunks: int, micro_batches: int, rank: int) -> int:
    """What `in_flight` may be on that rank: the forwards before its first backward, and the one paired with it."""
    return min(micro_batches * chunks, _first_forwards(schedule, ranks, chunks, micro_batches, rank) + 1)


def in_flight(instructions: Sequence[Instruction]) -> int:
    """The most micro-batches (over all stages of the rank) whose forward is done and whose backward is not."""
    return _most(instructions, up=(Kind.FORWARD,), down=(Kind.BACKWARD,))


def receives_in_flight(instructions: Sequence[Instruction]) -> int:
    """The most tensors-to-be for which room is made at a time."""
    return _most(
        instructions,
        up=(Kind.RECEIVE_INPUT, Kind.RECEIVE_GRADIENT),
        down=(Kind.WAIT_INPUT, Kind.WAIT_GRADIENT),
    )


def ideal_bubble(schedule: str, ranks: int, chunks: int, micro_batches: int) -> float:
    """The idle share of a step with equal stages and copies that take no time: the first and the last rank work
    `ranks` - 1 stages apart, whatever the order. Interleaving makes those stages smaller."""
    _refuse(schedule, ranks, chunks, micro_batches)
    return (ranks - 1) / (micro_batches * chunks + ranks - 1)


def channel(instruction: Instruction, ranks: int) -> Channel | None:
    """The channel that a send, a receive or a wait is about; None for computing."""
    kind, here = instruction.kind, instruction.stage
    if kind == Kind.SEND_OUTPUT:
        return here % ranks, (here + 1) % ranks, Kind.SEND_OUTPUT
    if kind in (Kind.RECEIVE_INPUT, Kind.WAIT_INPUT):
        return (here - 1) % ranks, here % ranks, Kind.SEND_OUTPUT
    if kind == Kind.SEND_GRADIENT:
        return here % ranks, (here - 1) % ranks, Kind.SEND_GRADIENT
    if kind in (Kind.RECEIVE_GRADIENT, Kind.WAIT_GRADIENT):
        return (here + 1) % ranks, here % ranks, Kind.SEND_GRADIENT
    return None


def check(lists: InstructionLists) -> None:
    """Proves the lists sound by running them with mailboxes that hold any number of tensors: each instruction has
    what it needs, each receive meets its own send, none is left over, and no rank waits for ever. A send never waits,
    so what runs here also runs where a transfer begins only once both sides are there."""
    _Check(lists).run()


def _refuse(schedule: str, ranks: int, chunks: int, micro_batches: int) -> None:
    if splits_backward(schedule):
        raise UserError(f"parallel.schedule = {schedule} {WHY_NOT_SPLIT}", INSTEAD_OF_SPLIT)
    if schedule not in SCHEDULES:
        raise UserError(f"parallel.schedule = {schedule} is not known", f"use one of {', '.join(SCHEDULES)}")
    _refuse_counts(ranks, micro_batches)
    if schedule != "interleaved" and chunks != 1:
        raise UserError(
            f"parallel.schedule = {schedule} computes one stage on each rank, but {chunks} are asked for "
            f"(parallel.stages = {ranks})",
            "use --parallel.schedule interleaved, or one stage for each rank",
        )
    if schedule == "interleaved" and chunks < 2:
        raise UserError(
            f"parallel.schedule = interleaved needs two or more stages on each rank, not {chunks} "
            f"(parallel.stages = {ranks})",
            "use --parallel.schedule 1f1b, or cut the model into more stages",
        )
    if schedule == "interleaved" and micro_batches % ranks:
        below = micro_batches // ranks * ranks
        numbers = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise UserError(
            f"parallel.micro_batches = {micro_batches} is no multiple of parallel.stages = {ranks}; interleaved "
            "takes micro-batches in rounds of one for each rank",
            f"use --parallel.micro_batches {numbers}, or --parallel.schedule 1f1b",
        )


def _refuse_counts(ranks: int, micro_batches: int) -> None:
    if ranks < 1:
        raise UserError(f"parallel.stages = {ranks}", "use 1 or more")
    if micro_batches < 1:
        raise UserError(f"parallel.micro_batches = {micro_batches}", "use 1 or more")


def _order(schedule: str, ranks: int, chunks: int, micro_batches: int, rank: int) -> list[Instruction]:
    """What a rank computes: some forwards, then forwards and backwards by turns, then the backwards left."""
    onward = _passes(Kind.FORWARD, ranks, chunks, micro_batches, rank)
    back = _passes(Kind.BACKWARD, ranks, chunks, micro_batches, rank)
    first = min(_first_forwards(schedule, ranks, chunks, micro_batches, rank), len(onward))
    turns = chain.from_iterable(zip(onward[first:], back, strict=False))
    return [*onward[:first], *turns, *back[len(onward) - first :]]


def _first_forwards(schedule: str, ranks: int, chunks: int, micro_batches: int, rank: int) -> int:
    """How many forwards a rank does before it turns to backwards; this number is the whole schedule."""
    after = ranks - 1 - rank
    if schedule == "gpipe":
        return micro_batches * chunks
    if schedule == "1f1b":
        return after
    # Megatron's: a first micro-batch goes through all chunks but the last in rounds of `ranks`, and its last chunk's
    # way to the last rank and back takes two computings for each rank between.
    return 2 * after + (chunks - 1) * ranks


def _passes(kind: Kind, ranks: int, chunks: int, micro_batches: int, rank: int) -> list[Instruction]:
    """All forwards or all backwards of a rank: a round of micro-batches through one chunk, then through the next."""
    along = range(chunks) if kind == Kind.FORWARD else range(chunks)[::-1]
    return [
        Instruction(kind, chunk * ranks + rank, micro)
        for start in range(0, micro_batches, ranks)
        for chunk in along
        for micro in range(start, min(start + ranks, micro_batches))
    ]


def _with_transfers(order: Sequence[Instruction], stages: int, reduces: bool) -> tuple[Instruction, ...]:
    """The computing with its transfers: a receive begins up to `RECEIVE_AHEAD` computings early but never before the
    one before it, of its direction, has arrived; a wait comes last thing before the computing, a send first thing
    after it."""
    posted = _receives(order, stages)
    last = {item.stage: place for place, item in enumerate(order) if item.kind == Kind.BACKWARD}
    instructions = posted[-1].copy()
    for place, item in enumerate(order):
        stage, micro = item.stage, item.micro
        if _receives_for(item, stages):
            wait = Kind.WAIT_INPUT if item.kind == Kind.FORWARD else Kind.WAIT_GRADIENT
            instructions.append(Instruction(wait, stage, micro))
        instructions += posted[place]
        instructions.append(item)
        if item.kind == Kind.FORWARD and stage < stages - 1:
            instructions.append(Instruction(Kind.SEND_OUTPUT, stage, micro))
        if item.kind == Kind.BACKWARD and stage > 0:
            instructions.append(Instruction(Kind.SEND_GRADIENT, stage, micro))
        # After the send: another rank waits for that, nobody for this.
        if reduces and last.get(stage) == place:
            instructions.append(Instruction(Kind.REDUCE, stage))
    return tuple(instructions)


def _receives(order: Sequence[Instruction], stages: int) -> defaultdict[int, list[Instruction]]:
    """By place in the order: the receives to begin there, between wait and computing; -1 is the very start."""
    posted: defaultdict[int, list[Instruction]] = defaultdict(list)
    previous = {Kind.FORWARD: -1, Kind.BACKWARD: -1}
    for place, item in enumerate(order):
        if _receives_for(item, stages):
            receive = Kind.RECEIVE_INPUT if item.kind == Kind.FORWARD else Kind.RECEIVE_GRADIENT
            start = max(previous[item.kind], place - RECEIVE_AHEAD)
            posted[start].append(Instruction(receive, item.stage, item.micro))
            previous[item.kind] = place
    return posted


def _receives_for(item: Instruction, stages: int) -> bool:
    return item.stage > 0 if item.kind == Kind.FORWARD else item.stage < stages - 1


def _most(instructions: Sequence[Instruction], up: tuple[Kind, ...], down: tuple[Kind, ...]) -> int:
    most = now = 0
    for item in instructions:
        now += (item.kind in up) - (item.kind in down)
        most = max(most, now)
    return most


_NEEDS = {
    Kind.WAIT_INPUT: Kind.RECEIVE_INPUT,
    Kind.SEND_OUTPUT: Kind.FORWARD,
    Kind.WAIT_GRADIENT: Kind.RECEIVE_GRADIENT,
    Kind.BACKWARD: Kind.FORWARD,
    Kind.SEND_GRADIENT: Kind.BACKWARD,
}


class _Check:
    """One run of the lists; see `check`."""

    def __init__(self, lists: InstructionLists) -> None:
        self.lists, self.ranks = lists, len(lists)
        self.stages = 1 + max(item.stage for items in lists for item in items)
        self.done: set[Instruction] = set()
        self.sent: defaultdict[Channel, list[Instruction]] = defaultdict(list)
        self.received: defaultdict[Channel, list[Instruction]] = defaultdict(list)
        self.next_micro: Counter[tuple[Kind, int]] = Counter()

    def run(self) -> None:
        places = [0] * self.ranks
        moved = True
        while moved:
            moved = False
            for rank, items in enumerate(self.lists):
                while places[rank] < len(items) and self._ready(items[places[rank]]):
                    self._do(items[places[rank]], rank)
                    places[rank] += 1
                    moved = True
        stuck = [
            str(items[place]) for place, items in zip(places, self.lists, strict=True) if place < len(items)
        ]
        assert not stuck, f"waits for ever: {'; '.join(stuck)}"
        self._nothing_left()

    def _ready(self, item: Instruction) -> bool:
        """Only a wait can stand still: until the tensor of its receive is sent."""
        way = channel(item, self.ranks)
        if way is None or item.kind not in (Kind.WAIT_INPUT, Kind.WAIT_GRADIENT):
            return True
        receive = Instruction(_NEEDS[item.kind], item.stage, item.micro)
        assert receive in self.done, f"{item}: not being received"
        return len(self.sent[way]) > self.received[way].index(receive)

    def _do(self, item: Instruction, rank: int) -> None:
        kind, stage, micro = item.kind, item.stage, item.micro
        assert stage % self.ranks == rank, f"{item}: on rank {rank}"
        assert item not in self.done, f"{item}: twice"
        needs = [_NEEDS[kind]] if kind in _NEEDS else []
        if kind == Kind.FORWARD and stage > 0:
            needs.append(Kind.WAIT_INPUT)
        if kind == Kind.BACKWARD and stage < self.stages - 1:
            needs.append(Kind.WAIT_GRADIENT)
        for need in needs:
            assert Instruction(need, stage, micro) in self.done, f"{item}: before {need}"
        if kind in (Kind.FORWARD, Kind.BACKWARD):
            assert micro == self.next_micro[kind, stage], f"{item}: not in ascending order"
            assert Instruction(Kind.REDUCE, stage) not in self.done, f"{item}: after its stage was reduced"
            self.next_micro[kind, stage] += 1
        self.done.add(item)
        self._move(item)

    def _move(self, item: Instruction) -> None:
        """Puts a send or a receive on its channel; the tensor there must be the same on both sides."""
        way = channel(item, self.ranks)
        if way is None or item.kind in (Kind.WAIT_INPUT, Kind.WAIT_GRADIENT):
            return
        onward = item.kind in (Kind.RECEIVE_INPUT, Kind.SEND_OUTPUT)
        sends = item.kind in (Kind.SEND_OUTPUT, Kind.SEND_GRADIENT)
        other = item.stage + (1 if onward == sends else -1)
        assert 0 <= other < self.stages, f"{item}: there is no stage {other}"
        mine, theirs = (self.sent, self.received) if sends else (self.received, self.sent)
        mine[way].append(item)
        place = len(mine[way]) - 1
        if place < len(theirs[way]):
            met = theirs[way][place]
            assert (met.stage, met.micro) == (other, item.micro), f"{item}: meets {met}"

    def _nothing_left(self) -> None:
        for way, sent in self.sent.items():
            assert len(sent) <= len(self.received[way]), f"{sent[len(self.received[way])]}: never received"
        for way, received in self.received.items():
            assert len(received) <= len(self.sent[way]), f"{received[len(self.sent[way])]}: never sent"
        for item in self.done:
            if item.kind in (Kind.RECEIVE_INPUT, Kind.RECEIVE_GRADIENT):
                wait = Kind.WAIT_INPUT if item.kind == Kind.RECEIVE_INPUT else Kind.WAIT_GRADIENT
                assert Instruction(wait, item.stage, item.micro) in self.done, f"{item}: never waited for"
        most = max(self.next_micro.values())
        for kind in {kind for kind, _ in self.next_micro}:
            for stage in range(self.stages):
                count = self.next_micro[kind, stage]
                assert count == most, f"{Instruction(kind, stage, count)}: missing"
