"""Simulates the instruction lists of a pipeline: when does each computation and each copy start and end?

Promises: instructions run in exactly the order of the lists, as in the executor. Each rank has a lane that computes,
one that copies in each direction, and one that reduces gradients. Copies run beside the computation, and a rank is
idle only at a wait. Pure: the same lists and times give the same spans.
Rejects times that do not fit the lists, and lists that deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from drumline.parallel.pipeline.instructions import Instruction, InstructionLists, Kind, Span
from drumline.parallel.pipeline.schedule import Channel, channel


@dataclass(frozen=True)
class Times:
    """Seconds for one micro-batch. `transfer` has an entry for each boundary, from stage s to s + 1, which also holds
    for the gradient on its way back."""

    forward: Sequence[float]
    backward: Sequence[float]
    transfer: Sequence[float]
    reduce: Sequence[float]
    rendezvous: bool = False
    """Whether a copy starts only once its receive is posted (NCCL, gloo), or as soon as it is sent."""


def simulate(lists: InstructionLists, times: Times) -> tuple[Span, ...]:
    """The spans of one step, which starts at 0 seconds, in order of their start."""
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
    """Seconds from the first start to the last end, including the reduction of gradients."""
    return max(span.end for span in spans) - min(span.start for span in spans)


def bubble(spans: Sequence[Span]) -> float:
    """The fraction of the step in which a rank does not compute, averaged over the ranks."""
    lanes = 1 + max(span.lane for span in spans)
    busy = sum(span.end - span.start for span in spans if span.kind in (Kind.FORWARD, Kind.BACKWARD))
    whole = lanes * step_time(spans)
    return 1 - busy / whole if whole else 0.0


@dataclass
class _Traffic:
    """On one channel: what was sent and when, when each receive was posted, and when each tensor arrived."""

    sent: list[tuple[Instruction, float]] = field(default_factory=list)
    receiving: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    index: dict[tuple[int, int], int] = field(default_factory=dict)
    """Receiving stage and micro-batch to the index in the lists above."""


class _Run:
    """Runs each rank until it must wait for a copy that has not started. No time depends on which rank runs first:
    each is a maximum of earlier times plus a duration."""

    def __init__(self, lists: InstructionLists, times: Times) -> None:
        self.lists, self.times, self.ranks = lists, times, len(lists)
        self.now = [0.0] * self.ranks
        self.reduced = [0.0] * self.ranks
        self.traffic: defaultdict[Channel, _Traffic] = defaultdict(_Traffic)
        self.found: list[Span] = []

    def spans(self) -> list[Span]:
        done = [0] * self.ranks
        moved = True
        while moved:
            moved = False
            for rank, items in enumerate(self.lists):
                while done[rank] < len(items) and self._do(items[done[rank]], rank):
                    done[rank] += 1
                    moved = True
        stuck = [str(items[at]) for at, items in zip(done, self.lists, strict=True) if at < len(items)]
        assert not stuck, f"waits for ever: {'; '.join(stuck)}"
        return self.found

    def _do(self, item: Instruction, rank: int) -> bool:
        """Runs an instruction if it can run now."""
        kind, now = item.kind, self.now[rank]
        line = channel(item, self.ranks)
        if kind == Kind.REDUCE:
            start = max(now, self.reduced[rank])
            self.reduced[rank] = start + self.times.reduce[item.stage]
            self._span(item, rank, start, self.reduced[rank])
        elif line is None:
            table = self.times.forward if kind == Kind.FORWARD else self.times.backward
            self.now[rank] = now + table[item.stage]
            self._span(item, rank, now, self.now[rank])
        elif kind in (Kind.SEND_OUTPUT, Kind.SEND_GRADIENT):
            self.traffic[line].sent.append((item, now))
            self._copy(line)
        elif kind in (Kind.RECEIVE_INPUT, Kind.RECEIVE_GRADIENT):
            self.traffic[line].index[item.stage, item.micro] = len(self.traffic[line].receiving)
            self.traffic[line].receiving.append(now)
            self._copy(line)
        else:
            return self._wait(item, rank, self.traffic[line])
        return True

    def _wait(self, item: Instruction, rank: int, traffic: _Traffic) -> bool:
        index, now = traffic.index[item.stage, item.micro], self.now[rank]
        if index >= len(traffic.arrived):
            return False
        if traffic.arrived[index] > now:
            self._span(item, rank, now, traffic.arrived[index])
            self.now[rank] = traffic.arrived[index]
        return True

    def _copy(self, line: Channel) -> None:
        """Starts every copy whose start time is known, one after the other in the order of the sends."""
        traffic = self.traffic[line]
        while (index := len(traffic.arrived)) < len(traffic.sent):
            item, start = traffic.sent[index]
            if self.times.rendezvous:
                if index >= len(traffic.receiving):
                    return
                start = max(start, traffic.receiving[index])
            if traffic.arrived:
                start = max(start, traffic.arrived[-1])
            boundary = item.stage if item.kind == Kind.SEND_OUTPUT else item.stage - 1
            traffic.arrived.append(start + self.times.transfer[boundary])
            self._span(item, line[0], start, traffic.arrived[-1])

    def _span(self, item: Instruction, rank: int, start: float, end: float) -> None:
        self.found.append(Span(rank, item.kind, item.stage, item.micro, start, end))
