"""Runs the instruction lists of a pipeline on paper: when would each computing and each copy begin and end?

Promises: exactly the lists' order, the one the executor runs. Each rank has a lane that computes, one that copies in
each direction, and one that exchanges gradients; a copy goes on beside the computing, and a rank stands idle only at
a wait. Pure: same lists and times, same spans. Refuses times that do not fit the lists; lists that stand still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from drumline.parallel.pipeline.instructions import Instruction, InstructionLists, Kind, Span
from drumline.parallel.pipeline.schedule import Channel, channel


@dataclass(frozen=True)
class Times:
    """Seconds for one micro-batch. `transfer` has an entry for each boundary, stage s to s + 1, and counts for the
    gradient on its way back too."""

    forward: Sequence[float]
    backward: Sequence[float]
    transfer: Sequence[float]
    reduce: Sequence[float]
    rendezvous: bool = False
    """A copy begins only once it is also being received (NCCL, gloo); otherwise as soon as it is sent."""


def simulate(lists: InstructionLists, times: Times) -> tuple[Span, ...]:
    """The spans of one step, from second 0, in order of their start."""
    stages = 1 + max(item.stage for items in lists for item in items)
    for name, counts in (
        ("forward", stages),
        ("backward", stages),
        ("transfer", stages - 1),
        ("reduce", stages),
    ):
        given = getattr(times, name)
        assert len(given) == counts, f"{len(given)} {name} times for {stages} stages"
        assert all(value >= 0 for value in given), f"a negative {name} time"
    run = _Run(lists, times)
    return tuple(sorted(run.spans(), key=lambda span: (span.start, span.end, span.lane)))


def step_time(spans: Sequence[Span]) -> float:
    """Seconds from the first start to the last end, gradient exchange included."""
    return max(span.end for span in spans) - min(span.start for span in spans)


def bubble(spans: Sequence[Span]) -> float:
    """The share of the step in which the lanes that compute stand idle, on average over the ranks."""
    lanes = 1 + max(span.lane for span in spans)
    busy = sum(span.end - span.start for span in spans if span.kind in (Kind.FORWARD, Kind.BACKWARD))
    whole = lanes * step_time(spans)
    return 1 - busy / whole if whole else 0.0


@dataclass
class _Way:
    """One channel: what was sent and when, since when each is being received, and when each arrived."""

    sent: list[tuple[Instruction, float]] = field(default_factory=list)
    receiving: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of a receiving stage and micro-batch: where it stands in the lists above."""


class _Run:
    """Each rank goes on until it must wait for a copy that has not begun. No time depends on which rank goes first:
    each is a maximum of earlier times, plus a duration."""

    def __init__(self, lists: InstructionLists, times: Times) -> None:
        self.lists, self.times, self.ranks = lists, times, len(lists)
        self.now = [0.0] * self.ranks
        self.reduced = [0.0] * self.ranks
        self.ways: defaultdict[Channel, _Way] = defaultdict(_Way)
        self.found: list[Span] = []

    def spans(self) -> list[Span]:
        places = [0] * self.ranks
        moved = True
        while moved:
            moved = False
            for rank, items in enumerate(self.lists):
                while places[rank] < len(items) and self._do(items[places[rank]], rank):
                    places[rank] += 1
                    moved = True
        stuck = [
            str(items[place]) for place, items in zip(places, self.lists, strict=True) if place < len(items)
        ]
        assert not stuck, f"waits for ever: {'; '.join(stuck)}"
        return self.found

    def _do(self, item: Instruction, rank: int) -> bool:
        """False: not yet."""
        kind, now = item.kind, self.now[rank]
        way = channel(item, self.ranks)
        if kind == Kind.REDUCE:
            start = max(now, self.reduced[rank])
            self.reduced[rank] = start + self.times.reduce[item.stage]
            self._span(item, rank, start, self.reduced[rank])
        elif way is None:
            table = self.times.forward if kind == Kind.FORWARD else self.times.backward
            self.now[rank] = now + table[item.stage]
            self._span(item, rank, now, self.now[rank])
        elif kind in (Kind.SEND_OUTPUT, Kind.SEND_GRADIENT):
            self.ways[way].sent.append((item, now))
            self._copy(way)
        elif kind in (Kind.RECEIVE_INPUT, Kind.RECEIVE_GRADIENT):
            self.ways[way].places[item.stage, item.micro] = len(self.ways[way].receiving)
            self.ways[way].receiving.append(now)
            self._copy(way)
        else:
            return self._wait(item, rank, self.ways[way])
        return True

    def _wait(self, item: Instruction, rank: int, way: _Way) -> bool:
        place, now = way.places[item.stage, item.micro], self.now[rank]
        if place >= len(way.arrived):
            return False
        if way.arrived[place] > now:
            self._span(item, rank, now, way.arrived[place])
            self.now[rank] = way.arrived[place]
        return True

    def _copy(self, name: Channel) -> None:
        """Lets every copy begin for which what it needs is known: one after the other, in the order of the sends."""
        way = self.ways[name]
        while (place := len(way.arrived)) < len(way.sent):
            item, start = way.sent[place]
            if self.times.rendezvous:
                if place >= len(way.receiving):
                    return
                start = max(start, way.receiving[place])
            if way.arrived:
                start = max(start, way.arrived[-1])
            boundary = item.stage if item.kind == Kind.SEND_OUTPUT else item.stage - 1
            way.arrived.append(start + self.times.transfer[boundary])
            self._span(item, name[0], start, way.arrived[-1])

    def _span(self, item: Instruction, rank: int, start: float, end: float) -> None:
        self.found.append(Span(rank, item.kind, item.stage, item.micro, start, end))
