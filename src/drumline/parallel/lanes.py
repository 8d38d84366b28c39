"""What each lane of a layout does in a step, and when: instructions, and spans that are recorded or simulated.

A lane is a process or a device that computes. Promises: the executor and the simulator run the same instructions in
the same order; every tensor that moves is received, waited for and sent by an instruction of its own. Recording does
not delay a step: times are read after it, from the host's clock on a CPU and from events on a GPU. They are seconds
of the host's monotonic clock, so lanes of one machine share a time axis. The simulator is pure, and rejects lists
that deadlock.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import torch

from drumline.parallel.world import World


class Op(StrEnum):
    """`stage` and `micro` of an instruction are those of the computation that it serves."""

    RECEIVE_INPUT = "receive input"
    """Allocates buffers for what stage - 1 sends and starts to receive it. Does not wait."""
    WAIT_INPUT = "wait for input"
    """Waits until the input is there (on a GPU the compute stream waits, not the host)."""
    FORWARD = "forward"
    SEND_OUTPUT = "send output"
    """Starts to send to stage + 1. Does not wait."""
    RECEIVE_GRADIENT = "receive gradient"
    """Allocates buffers for the gradient of this stage's output, from stage + 1, and starts to receive it."""
    WAIT_GRADIENT = "wait for gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send gradient"
    """Starts to send the gradient of this stage's input to stage - 1. Does not wait."""
    REDUCE = "reduce"
    """Starts to sum the stage's gradients over the replicas. `micro` is -1."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing to do. Stage 0 receives and sends nothing at its input, nor the last stage at its output."""

    kind: Op
    stage: int
    micro: int = -1

    def __str__(self) -> str:
        micro = f", micro-batch {self.micro}" if self.micro >= 0 else ""
        return f"{self.kind} of stage {self.stage}{micro}"


InstructionLists = Sequence[Sequence[Instruction]]
"""One list for each rank of a pipeline. Stage s belongs to rank s mod ranks."""


@dataclass(frozen=True)
class Span:
    """What a rank (`lane`) was busy with, measured or simulated. A simulated copy is a span of its sender, with the
    kind of the send. A simulated wait has a span if it took any time."""

    lane: int
    kind: Op
    stage: int
    micro: int
    start: float
    end: float


T = TypeVar("T")
Moment = float | torch.cuda.Event
"""A time of the host's clock, or an event that a stream reaches."""


class Recorder:
    """Records one lane, for one step at a time."""

    def __init__(self, lane: int, device: torch.device) -> None:
        self.lane, self.device = lane, device
        self.recording = False
        """Whether the next step is recorded. The layout asks."""
        self._entries: list[tuple[Op, int, int, Moment, Moment]] = []
        self._origin: tuple[float, torch.cuda.Event] | None = None

    def start(self) -> None:
        """Clears the entries of the step before. On a GPU, waits until it is idle and relates its clock to the
        host's."""
        self._entries.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._origin = (time.perf_counter(), event)

    def now(self, stream: torch.cuda.Stream | None = None) -> Moment:
        """The current moment on the lane's device: on a GPU, of `stream` or else the current stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def add(self, kind: Op, stage: int, micro: int, start: Moment, end: Moment) -> None:
        """Adds one entry, from any thread."""
        self._entries.append((kind, stage, micro, start, end))

    def spans(self) -> list[Span]:
        """The entries in order of their start, after the step. On a GPU, waits for the recorded events."""
        spans = [
            Span(self.lane, kind, stage, micro, self._seconds(start), self._seconds(end))
            for kind, stage, micro, start, end in self._entries
        ]
        return sorted(spans, key=lambda span: (span.start, span.end))

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        assert self._origin is not None, "start() must be called before the step on a GPU"
        host, event = self._origin
        moment.synchronize()
        return host + event.elapsed_time(moment) / 1e3


@dataclass(frozen=True)
class Lanes:
    """What the timeline of a step shows."""

    title: str
    names: Sequence[str]
    """One per lane of the first replica."""
    world: World
    """The processes whose lanes are drawn."""
    recorders: Sequence[Recorder]
    """Of this process's lanes."""
    instructions: InstructionLists | None = None
    """What each lane does in a step. None: each computes the whole model, one micro-batch after the other."""

    def record(self, recording: bool) -> None:
        """Says whether the next step is recorded."""
        for recorder in self.recorders:
            recorder.recording = recording

    def spans(self) -> list[Span]:
        """When this process's lanes computed what in the last recorded step."""
        return [span for recorder in self.recorders for span in recorder.spans()]


def timed(recorder: Recorder | None, kind: Op, micro: int, work: Callable[[], T]) -> T:
    """Returns what `work` returns, and records how long it took if there is a recorder."""
    if recorder is None:
        return work()
    start = recorder.now()
    result = work()
    recorder.add(kind, 0, micro, start, recorder.now())
    return result


Channel = tuple[int, int, Op]
"""From rank, to rank, and SEND_OUTPUT or SEND_GRADIENT. Two ranks may send each other both."""


def channel(instruction: Instruction, ranks: int) -> Channel | None:
    """The channel of a send, a receive or a wait. None for a computation."""
    kind, here = instruction.kind, instruction.stage
    if kind == Op.SEND_OUTPUT:
        return here % ranks, (here + 1) % ranks, Op.SEND_OUTPUT
    if kind in (Op.RECEIVE_INPUT, Op.WAIT_INPUT):
        return (here - 1) % ranks, here % ranks, Op.SEND_OUTPUT
    if kind == Op.SEND_GRADIENT:
        return here % ranks, (here - 1) % ranks, Op.SEND_GRADIENT
    if kind in (Op.RECEIVE_GRADIENT, Op.WAIT_GRADIENT):
        return (here + 1) % ranks, here % ranks, Op.SEND_GRADIENT
    return None


@dataclass(frozen=True)
class StageTimes:
    """Seconds for one micro-batch. `transfer` has an entry for each boundary, from stage s to s + 1, which also holds
    for the gradient on its way back."""

    forward: Sequence[float]
    backward: Sequence[float]
    transfer: Sequence[float]
    reduce: Sequence[float]
    rendezvous: bool = False
    """Whether a copy starts only once its receive is posted (NCCL, gloo), or as soon as it is sent."""


def simulate(lists: InstructionLists, times: StageTimes) -> tuple[Span, ...]:
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
    busy = sum(span.end - span.start for span in spans if span.kind in (Op.FORWARD, Op.BACKWARD))
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

    def __init__(self, lists: InstructionLists, times: StageTimes) -> None:
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
        if kind == Op.REDUCE:
            start = max(now, self.reduced[rank])
            self.reduced[rank] = start + self.times.reduce[item.stage]
            self._span(item, rank, start, self.reduced[rank])
        elif line is None:
            table = self.times.forward if kind == Op.FORWARD else self.times.backward
            self.now[rank] = now + table[item.stage]
            self._span(item, rank, now, self.now[rank])
        elif kind in (Op.SEND_OUTPUT, Op.SEND_GRADIENT):
            self.traffic[line].sent.append((item, now))
            self._copy(line)
        elif kind in (Op.RECEIVE_INPUT, Op.RECEIVE_GRADIENT):
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
            boundary = item.stage if item.kind == Op.SEND_OUTPUT else item.stage - 1
            traffic.arrived.append(start + self.times.transfer[boundary])
            self._span(item, line[0], start, traffic.arrived[-1])

    def _span(self, item: Instruction, rank: int, start: float, end: float) -> None:
        self.found.append(Span(rank, item.kind, item.stage, item.micro, start, end))
