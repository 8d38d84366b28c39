"""What the pipeline benchmarks share: stages that sleep, models in stages, and alternating rounds.

A sleeping stage takes an exactly known time and needs no processor, so the real executor can be compared with the
ideal on any machine: the difference is scheduling and transport. On a GPU, a stage is a kernel that waits on one
multiprocessor, so the stages of several virtual devices really run in parallel.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumline.core.precision import Precision, autocast
from drumline.parallel.lanes import Instruction, Recorder, Span, StageTimes
from drumline.parallel.pipeline.cut import trace
from drumline.parallel.pipeline.lane import Lane, run_lanes
from drumline.parallel.pipeline.mailbox import Mailbox
from drumline.parallel.pipeline.schedule import instruction_lists
from drumline.parallel.pipeline.stage import TensorSpec, boundaries
from drumline.parallel.pipeline.transport import StageTransport

CPU = torch.device("cpu")
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One step of a pipeline. `forward` and `backward` are a rank's seconds for one micro-batch, over its stages."""

    schedule: str
    """`model` is the naive layout: the whole batch through one stage after the other."""
    ranks: int
    micro_batches: int
    forward: float = 0.008
    backward: float = 0.016
    floats: int = 65_536
    """Values that pass between two stages, per micro-batch: 256 KiB by default."""

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "interleaved" else 1

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def pieces(self) -> int:
        """Into how many pieces the batch is really divided."""
        return 1 if self.schedule == "model" else self.micro_batches

    @property
    def size(self) -> int:
        """The size of a piece, in micro-batches."""
        return self.micro_batches // self.pieces

    @property
    def work(self) -> float:
        """Seconds of computation per rank."""
        return self.micro_batches * (self.forward + self.backward)

    @property
    def ideal_share(self) -> float:
        """The fraction of the step in which a rank computes: 1 / (1 + (P - 1) / (M C))."""
        return 1 / (1 + (self.ranks - 1) / (self.pieces * self.chunks))

    @property
    def ideal(self) -> float:
        """Seconds of a step with equal stages and copies that take no time."""
        return self.work / self.ideal_share

    def lists(self, reduces: bool = False) -> tuple[tuple[Instruction, ...], ...]:
        schedule = "gpipe" if self.schedule == "model" else self.schedule
        return instruction_lists(schedule, self.ranks, self.chunks, self.pieces, reduces)

    def times(self, transfer: float = 0.0, parallel: bool = True) -> StageTimes:
        """For the simulator. A copy that is not in parallel with the computation delays its sender like
        computation."""
        each, added = self.size / self.chunks, 0.0 if parallel else transfer
        last = self.stages - 1
        return StageTimes(
            forward=[each * self.forward + added * (stage < last) for stage in range(self.stages)],
            backward=[each * self.backward + added * (stage > 0) for stage in range(self.stages)],
            transfer=[transfer if parallel else 0.0] * last,
            reduce=[0.0] * self.stages,
        )

    def __str__(self) -> str:
        return f"{self.schedule}, P = {self.ranks}, M = {self.micro_batches}"


class Sleeper(nn.Module):
    """A stage that takes an exactly known time and passes on a real tensor."""

    def __init__(self, forward: float, backward: float, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds, self.last = (forward, backward), last

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        given: Tensor = _Sleep.apply(x, self.weight, *self.seconds)
        return given if self.last else (given,)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        with taking(forward, x.device):
            return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with taking(ctx.seconds, gradient.device):
            return gradient + 0, gradient.sum(), None, None


@contextmanager
def taking(seconds: float, device: torch.device) -> Iterator[None]:
    """Makes the block take `seconds`; on a GPU, a few microseconds more."""
    begun = time.perf_counter()
    if device.type == "cuda":
        torch.cuda._sleep(round(seconds * cycles_a_second()))
    yield
    if device.type != "cuda":
        sleep_until(begun + seconds)


@cache
def cycles_a_second() -> float:
    """Cycles per second of the GPU's clock, as its waiting kernel counts them. Measured once, after a warm-up."""
    cycles, events = 200_000_000, [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for event in events:
        event.record()
        torch.cuda._sleep(cycles)
    events[-1].synchronize()
    return cycles / (events[-2].elapsed_time(events[-1]) / 1e3)


def sleep_until(moment: float) -> None:
    """Sleeps until this value of `time.perf_counter`."""
    if (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class Asleep:
    """The sleeping lanes of a case for the ranks in `transports`: all of them in one process, or one of several."""

    def __init__(
        self,
        case: Case,
        transports: Mapping[int, StageTransport],
        reduces: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.case, self.device = case, device
        each, last = case.size / case.chunks, case.stages - 1
        lists = case.lists(reduces)
        self.images = torch.zeros(case.size * case.floats, device=device)
        spec = TensorSpec(tuple(self.images.shape), self.images.dtype, requires_grad=True)
        self.lanes = [
            Lane(
                lists[rank],
                {
                    stage: Sleeper(each * case.forward, each * case.backward, stage == last).to(device)
                    for stage in range(rank, case.stages, case.ranks)
                },
                last,
                lambda stage, micro: [spec],
                transport,
                device,
            )
            for rank, transport in transports.items()
        ]

    def feed(self, micro: int) -> Tensor:
        return self.images

    @staticmethod
    def score(micro: int, output: Tensor) -> Tensor:
        return output[0]

    def step(self, box: Mailbox, recorders: Sequence[Recorder] | None = None) -> float:
        """Runs all lanes in this process. Returns seconds."""
        begun = time.perf_counter()
        run_lanes(box, self.lanes, self.feed, self.score, recorders=recorders)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun


class ModelInStages:
    """A step of a model on random images, cut into stages on one device or whole, without an optimizer."""

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        micro_batches: int,
        precision: Precision,
    ) -> None:
        cuts = [round(place * len(images) / micro_batches) for place in range(micro_batches + 1)]
        self.model, self.precision, self.device = model, precision, images.device
        self.pieces = [(images[a:b].clone(), labels[a:b]) for a, b in pairwise(cuts)]
        self._total = len(images)

    def whole(self) -> None:
        """The reference: one micro-batch after the other through the whole model."""
        for micro, (images, _) in enumerate(self.pieces):
            with self.arithmetic():
                loss = self.score(micro, self.model(images))
            loss.backward()

    def cut(self, names: Sequence[str], schedule: str, box: Mailbox) -> list[Lane]:
        """The lanes for stages that begin at these modules."""
        ranks = len(box.lanes)
        segments = self.traced.split(names)
        stages = [segment.bind(self.model) for segment in segments]
        specs = {len(each): boundaries(stages, each, self.precision) for each, _ in self.pieces}
        lists = instruction_lists(schedule, ranks, len(stages) // ranks, len(self.pieces), reduces=False)
        return [
            Lane(
                lists[rank],
                dict(list(enumerate(stages))[rank::ranks]),
                len(stages) - 1,
                lambda stage, micro: specs[len(self.pieces[micro][0])][stage],
                box.transports[rank],
                self.device,
            )
            for rank in range(ranks)
        ]

    @cached_property
    def traced(self) -> Any:
        return trace(self.model, sample=self.pieces[0][0])

    def step(
        self,
        box: Mailbox,
        lanes: Sequence[Lane],
        around: Callable[[int, int], Any] | None = None,
        recorders: Sequence[Recorder] | None = None,
    ) -> None:
        """`around` is entered around each forward; by default, autocast."""
        around = around or (lambda stage, micro: self.arithmetic())
        run_lanes(
            box, lanes, lambda micro: self.pieces[micro][0], self.score, around=around, recorders=recorders
        )

    def score(self, micro: int, output: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), self.pieces[micro][1], reduction="sum") / self._total

    def arithmetic(self) -> torch.autocast:
        return autocast(self.device, self.precision)


def turns(
    rounds: int,
    measures: Mapping[T, Callable[[], float]],
    note: Callable[[T, float], None] = lambda key, seconds: None,
    until: float = float("inf"),
) -> dict[T, list[float]]:
    """The measurements of all rounds. Each round starts with a different one, so that changes of the machine affect
    all. Calls `note` after each. Starts no round but the first after the time `until`."""
    found: dict[T, list[float]] = {key: [] for key in measures}
    keys = list(measures)
    for number in range(rounds):
        if number and time.monotonic() > until:
            break
        first = number % len(keys)
        for key in keys[first:] + keys[:first]:
            found[key].append(measures[key]())
            note(key, found[key][-1])
    return found


def spans_of(recorders: Sequence[Recorder]) -> list[Span]:
    return [span for recorder in recorders for span in recorder.spans()]


class Log:
    """Every measurement, as JSON lines, written immediately: an interrupted run keeps its measurements."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("")

    def add(self, what: str, **fields: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"what": what, **fields}) + "\n")


def median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def machine(device: torch.device = CPU) -> str:
    """For the heading of a table."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} CPU cores (load {load:.1f} at the start), torch {torch.__version__}"
