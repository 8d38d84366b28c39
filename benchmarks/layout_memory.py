"""What each schedule keeps for its backward passes, compared with its prediction.

    python benchmarks/layout_memory.py
    python benchmarks/layout_memory.py --model resnet50 --size 224 --batch 32

Runs a real model in stages on virtual devices of the CPU, one lane per rank. Counts the micro-batches that a lane has
computed forward and not yet backward, and the bytes that autograd keeps for them (each storage once, without
parameters and buffers). The predictions are `max_in_flight`, and the bytes that follow from the list of instructions
and from what one micro-batch keeps in each stage. Nothing is timed. Prints a markdown table. Exits with 1 if a lane
keeps more than predicted.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).parent))

from drumline.core.precision import FP32
from drumline.models import create_model
from drumline.parallel.lanes import Instruction, Op
from drumline.parallel.pipeline.lane import Lane
from drumline.parallel.pipeline.mailbox import LaneDevice, Mailbox
from drumline.parallel.pipeline.schedule import SCHEDULES, max_in_flight
from drumline.parallel.pipeline.split import even_cuts
from harness import Parser
from pipelines import CPU, Log, ModelInStages

MIB = 2**20


class Saved:
    """The bytes that autograd keeps for one lane, now and at most."""

    def __init__(self, lasting: frozenset[int]) -> None:
        self.now = self.most = 0
        self._lasting, self._users = lasting, Counter[int]()
        self._lock = threading.Lock()

    def around(self) -> saved_tensors_hooks:
        """A context that counts in the thread that enters it."""
        return saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept, memory = _Kept(tensor), tensor.untyped_storage()
        place = memory.data_ptr()
        if place not in self._lasting:
            with self._lock:
                self._users[place] += 1
                if self._users[place] == 1:
                    self.now += memory.nbytes()
                    self.most = max(self.most, self.now)
            weakref.finalize(kept, self._free, place, memory.nbytes())
        return kept

    def _free(self, place: int, size: int) -> None:
        with self._lock:
            self._users[place] -= 1
            if self._users[place] == 0:
                self.now -= size


@dataclass(eq=False)
class _Kept:
    tensor: Tensor


@dataclass(frozen=True)
class Row:
    """One lane of one schedule."""

    schedule: str
    ranks: int
    rank: int
    predicted: int
    in_flight: int
    predicted_bytes: int
    kept_bytes: int
    buffers: int
    """The most bytes of receive buffers."""

    @property
    def good(self) -> bool:
        return self.in_flight <= self.predicted and self.kept_bytes <= self.predicted_bytes


def measure(job: ModelInStages, schedule: str, ranks: int) -> Iterator[Row]:
    chunks = 2 if schedule == "interleaved" else 1
    count = len(job.pieces)
    box = Mailbox([LaneDevice.on(CPU) for _ in range(ranks)])
    lanes = job.cut(even_cuts(job.traced, ranks * chunks), schedule, box)
    lasting = frozenset(
        tensor.untyped_storage().data_ptr() for tensor in (*job.model.parameters(), *job.model.buffers())
    )
    saved = [Saved(lasting) for _ in lanes]
    one: dict[int, int] = {}

    @contextmanager
    def around(stage: int, micro: int) -> Iterator[None]:
        mine = saved[stage % ranks]
        before = mine.now
        with mine.around(), job.arithmetic():
            yield
        one.setdefault(stage, mine.now - before)

    job.step(box, lanes, around)
    for rank, (lane, kept) in enumerate(zip(lanes, saved, strict=True)):
        yield Row(
            schedule,
            ranks,
            rank,
            max_in_flight(schedule, ranks, chunks, count, rank),
            lane.peak.micro_batches,
            bytes_by_list(lane, one),
            kept.most,
            lane.peak.bytes,
        )
        assert kept.now == 0, f"{kept.now} bytes are still kept after the step"


def bytes_by_list(lane: Lane, one: dict[int, int]) -> int:
    """The most bytes kept along the list if every micro-batch keeps as much in each stage as the first one."""
    return max(_running(lane.instructions, one))


def _running(instructions: Sequence[Instruction], one: dict[int, int]) -> Iterator[int]:
    now = 0
    for item in instructions:
        now += one[item.stage] * ((item.kind == Op.FORWARD) - (item.kind == Op.BACKWARD))
        yield now


def main() -> int:
    parser = Parser(__doc__, model="cifar/resnet8", batch=8, micro_batches=4, ranks="2")
    parser.add_argument("--model", default="cifar/resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--log", help="file for the measurements, as JSON lines")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = create_model(args.model, classes=10).train()
    images = torch.randn(args.batch, 3, args.size, args.size)
    job = ModelInStages(model, images, torch.arange(args.batch) % 10, args.micro_batches, FP32)
    log, good = Log(args.log), True
    print(
        f"{args.model}, {args.size} px, batch {args.batch} in {args.micro_batches} micro-batches, torch "
        f"{torch.__version__}\n"
    )
    print("| schedule | P | rank | in flight | predicted | kept, MiB | predicted, MiB | buffers, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in map(int, args.ranks.split(",")):
        for schedule in SCHEDULES:
            for row in measure(job, schedule, ranks):
                log.add("memory", good=row.good, **vars(row))
                good &= row.good
                print(
                    f"| {schedule} | {ranks} | {row.rank} | {row.in_flight} | {row.predicted} | "
                    f"{row.kept_bytes / MIB:.2f} | {row.predicted_bytes / MIB:.2f} | {row.buffers / MIB:.2f} |",
                    flush=True,
                )
    print("\nNo lane kept more than predicted." if good else "\nMORE than predicted.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
