"""Checks instruction lists by running them without tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from drumline.parallel.lanes import Channel, Instruction, InstructionLists, Op, channel


def check(lists: InstructionLists) -> None:
    """Runs the lists with channels that hold any number of tensors: each instruction has what it needs, each receive
    meets its own send, none is left over, and no rank waits for ever. A send never waits, so what runs here also runs
    where a transfer begins only once both sides have come to it."""
    _Check(lists).run()


def in_flight(instructions: Sequence[Instruction]) -> int:
    """The most micro-batches (over all stages of the rank) whose forward is done and whose backward is not."""
    return _most(instructions, up=(Op.FORWARD,), down=(Op.BACKWARD,))


def receives_in_flight(instructions: Sequence[Instruction]) -> int:
    """The most receives that are posted at a time."""
    return _most(
        instructions,
        up=(Op.RECEIVE_INPUT, Op.RECEIVE_GRADIENT),
        down=(Op.WAIT_INPUT, Op.WAIT_GRADIENT),
    )


def ideal_bubble(ranks: int, chunks: int, micro_batches: int) -> float:
    """The idle fraction of a step with equal stages and copies that take no time: the first and the last rank work
    `ranks` - 1 stages apart, in any order. Interleaving makes those stages smaller."""
    return (ranks - 1) / (micro_batches * chunks + ranks - 1)


def _most(instructions: Sequence[Instruction], up: tuple[Op, ...], down: tuple[Op, ...]) -> int:
    most = now = 0
    for item in instructions:
        now += (item.kind in up) - (item.kind in down)
        most = max(most, now)
    return most


_NEEDS = {
    Op.WAIT_INPUT: Op.RECEIVE_INPUT,
    Op.SEND_OUTPUT: Op.FORWARD,
    Op.WAIT_GRADIENT: Op.RECEIVE_GRADIENT,
    Op.BACKWARD: Op.FORWARD,
    Op.SEND_GRADIENT: Op.BACKWARD,
}


class _Check:
    """One run of the lists."""

    def __init__(self, lists: InstructionLists) -> None:
        self.lists, self.ranks = lists, len(lists)
        self.stages = 1 + max(item.stage for items in lists for item in items)
        self.done: set[Instruction] = set()
        self.sent: defaultdict[Channel, list[Instruction]] = defaultdict(list)
        self.received: defaultdict[Channel, list[Instruction]] = defaultdict(list)
        self.next_micro: Counter[tuple[Op, int]] = Counter()

    def run(self) -> None:
        positions = [0] * self.ranks
        moved = True
        while moved:
            moved = False
            for rank, items in enumerate(self.lists):
                while positions[rank] < len(items) and self._ready(items[positions[rank]]):
                    self._do(items[positions[rank]], rank)
                    positions[rank] += 1
                    moved = True
        stuck = [
            str(items[position])
            for position, items in zip(positions, self.lists, strict=True)
            if position < len(items)
        ]
        assert not stuck, f"waits for ever: {'; '.join(stuck)}"
        self._nothing_left()

    def _ready(self, item: Instruction) -> bool:
        """Only a wait can stand still: until the tensor of its receive is sent."""
        line = channel(item, self.ranks)
        if line is None or item.kind not in (Op.WAIT_INPUT, Op.WAIT_GRADIENT):
            return True
        receive = Instruction(_NEEDS[item.kind], item.stage, item.micro)
        assert receive in self.done, f"{item}: not being received"
        return len(self.sent[line]) > self.received[line].index(receive)

    def _do(self, item: Instruction, rank: int) -> None:
        kind, stage, micro = item.kind, item.stage, item.micro
        assert stage % self.ranks == rank, f"{item}: on rank {rank}"
        assert item not in self.done, f"{item}: twice"
        needs = [_NEEDS[kind]] if kind in _NEEDS else []
        if kind == Op.FORWARD and stage > 0:
            needs.append(Op.WAIT_INPUT)
        if kind == Op.BACKWARD and stage < self.stages - 1:
            needs.append(Op.WAIT_GRADIENT)
        for need in needs:
            assert Instruction(need, stage, micro) in self.done, f"{item}: before {need}"
        if kind in (Op.FORWARD, Op.BACKWARD):
            assert micro == self.next_micro[kind, stage], f"{item}: not in ascending order"
            assert Instruction(Op.REDUCE, stage) not in self.done, f"{item}: after its stage was reduced"
            self.next_micro[kind, stage] += 1
        self.done.add(item)
        self._move(item)

    def _move(self, item: Instruction) -> None:
        """Puts a send or a receive on its channel; the tensor there must be the same on both sides."""
        line = channel(item, self.ranks)
        if line is None or item.kind in (Op.WAIT_INPUT, Op.WAIT_GRADIENT):
            return
        onward = item.kind in (Op.RECEIVE_INPUT, Op.SEND_OUTPUT)
        sends = item.kind in (Op.SEND_OUTPUT, Op.SEND_GRADIENT)
        other = item.stage + (1 if onward == sends else -1)
        assert 0 <= other < self.stages, f"{item}: there is no stage {other}"
        mine, theirs = (self.sent, self.received) if sends else (self.received, self.sent)
        mine[line].append(item)
        position = len(mine[line]) - 1
        if position < len(theirs[line]):
            met = theirs[line][position]
            assert (met.stage, met.micro) == (other, item.micro), f"{item}: meets {met}"

    def _nothing_left(self) -> None:
        for line, sent in self.sent.items():
            assert len(sent) <= len(self.received[line]), f"{sent[len(self.received[line])]}: never received"
        for line, received in self.received.items():
            assert len(received) <= len(self.sent[line]), f"{received[len(self.sent[line])]}: never sent"
        for item in self.done:
            if item.kind in (Op.RECEIVE_INPUT, Op.RECEIVE_GRADIENT):
                wait = Op.WAIT_INPUT if item.kind == Op.RECEIVE_INPUT else Op.WAIT_GRADIENT
                assert Instruction(wait, item.stage, item.micro) in self.done, f"{item}: never waited for"
        most = max(self.next_micro.values())
        for kind in {kind for kind, _ in self.next_micro}:
            for stage in range(self.stages):
                count = self.next_micro[kind, stage]
                assert count == most, f"{Instruction(kind, stage, count)}: missing"
