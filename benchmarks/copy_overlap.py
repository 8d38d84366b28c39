"""Copies in parallel with the computation, compared with copies that take turns with it: the gain in step time.

    python benchmarks/copy_overlap.py --cpu                          # stages that sleep, slow transfers
    python benchmarks/copy_overlap.py --out pictures --log o.jsonl   # on a GPU if there is one

On a CPU, stages sleep for 8 + 16 ms and each copy takes 4 ms, either in the computing thread or in a thread of its
own. The table shows the simulator's prediction next to each measurement. On one GPU, ResNet-50 runs in two virtual
stages (bf16, channels_last), with copies from device to device or through the host. Three arrangements are
compared: everything on one stream; one stream per stage, shared by its computation and its copies; and separate
streams for copies. The same micro-batches through the whole model are the reference: on one GPU, no pipeline is
faster. All of them use cuDNN's default kernels, not the fastest of a search.

First, the gradients and buffers of several models are compared with plain accumulation, bit for bit. Cases
alternate in rounds; the tables show medians. `--out` writes timelines of measured steps. Exits with 1 if a bit
differs.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from drumline.core.errors import UserError
from drumline.core.precision import BF16, FP32, Precision
from drumline.models import create_model
from drumline.observe.timeline import perfetto
from drumline.observe.timeline_svg import timeline_svg
from drumline.parallel.lanes import Recorder, simulate, step_time
from drumline.parallel.pipeline.mailbox import LaneDevice, Mailbox, Move, copy_direct, copy_through_host
from drumline.parallel.pipeline.profile import ProfileOptions
from drumline.parallel.pipeline.schedule import SCHEDULES
from drumline.parallel.pipeline.split import choose_split, even_cuts
from harness import Parser
from pipelines import (
    CPU,
    Asleep,
    Case,
    Log,
    ModelInStages,
    machine,
    median_ms,
    sleep_until,
    spans_of,
    turns,
)

MOVES: dict[str, Move] = {"device to device": copy_direct, "through the host": copy_through_host}
ONE, EACH, OWN = "one stream", "one stream per stage", "separate copy streams"
STREAMS = (ONE, EACH, OWN)


# ---- stages that sleep


def slowly(seconds: float) -> Move:
    """A copy that takes this long, as over a slow link."""

    def move(into: Tensor, tensor: Tensor) -> None:
        begun = time.perf_counter()
        copy_direct(into, tensor)
        sleep_until(begun + seconds)

    return move


def on_cpu(rounds: int, transfer: float, cases: Sequence[Case], log: Log, out: Path | None) -> int:
    """Copies that take `transfer` seconds each."""
    boxes = {
        (case, overlap): Mailbox([LaneDevice.on(CPU) for _ in range(case.ranks)], overlap, slowly(transfer))
        for case in cases
        for overlap in (False, True)
    }
    runs = {key: Asleep(key[0], dict(enumerate(box.transports))) for key, box in boxes.items()}
    for key, run in runs.items():
        run.step(boxes[key])

    def note(key: tuple[Case, bool], seconds: float) -> None:
        log.add("copies on a CPU", case=asdict(key[0]), overlap=key[1], transfer=transfer, seconds=seconds)

    found = turns(rounds, {key: partial(run.step, boxes[key]) for key, run in runs.items()}, note)
    one = cases[0]
    sleeps = f"{1e3 * one.forward:g} + {1e3 * one.backward:g} ms"
    print(
        f"{machine()}; stages that sleep {sleeps}, copies of {1e3 * transfer:g} ms, M = {one.micro_batches}; "
        f"{rounds} alternating rounds, medians\n"
    )
    print("| schedule | P | in turns, ms | simulated | in parallel, ms | simulated | gain | simulated |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases:
        measured = {overlap: median_ms(found[case, overlap]) for overlap in (False, True)}
        spans = {
            parallel: simulate(case.lists(), case.times(transfer, parallel)) for parallel in (False, True)
        }
        predicted = {parallel: 1e3 * step_time(each) for parallel, each in spans.items()}
        print(
            f"| {case.schedule} | {case.ranks} | {measured[False]:.1f} | {predicted[False]:.1f} | "
            f"{measured[True]:.1f} | {predicted[True]:.1f} | {gain(measured)} | {gain(predicted)} |",
            flush=True,
        )
        if out is not None:
            for overlap in (False, True):
                recorders = [Recorder(rank, CPU) for rank in range(case.ranks)]
                runs[case, overlap].step(boxes[case, overlap], recorders)
                name = f"asleep-{case.schedule}-{case.ranks}-{'parallel' if overlap else 'in-turns'}"
                title = (
                    f"{case}, copies {'in parallel with the computation' if overlap else 'in turns with it'}"
                )
                # The simulator treats copies in turns as computation.
                draw(out, name, title, recorders, spans[True] if overlap else None)
    return 0


def gain(milliseconds: dict[bool, float]) -> str:
    """The part of the step that is saved."""
    return shorter(milliseconds[True], milliseconds[False])


def shorter(now: float, before: float) -> str:
    return f"{100 * (1 - now / before):.1f} %"


def draw(
    out: Path, name: str, title: str, recorders: Sequence[Recorder], predicted: Sequence[Any] | None
) -> None:
    """The step that was just recorded, as a picture and as a trace."""
    spans = spans_of(recorders)
    lanes = [f"rank {recorder.lane}" for recorder in recorders]
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.svg").write_text(timeline_svg(spans, predicted, title, lanes))
    (out / f"{name}.json").write_text(perfetto(spans, predicted, lanes))


# ---- one GPU


@dataclass(frozen=True)
class Work:
    """A batch of random images for a model."""

    model: str
    size: int
    batch: int
    micro_batches: int
    device: torch.device
    precision: Precision

    def __str__(self) -> str:
        return (
            f"{self.model}, batch {self.batch} in {self.micro_batches} micro-batches, {self.precision.name}"
        )


def job_of(work: Work) -> ModelInStages:
    """Dropout is off, because whole and cut models would draw in a different order."""
    size, batch, device = work.size, work.batch, work.device
    torch.manual_seed(0)
    model = create_model(work.model, classes=1000).to(device).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.p = 0.0
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=device)
    return ModelInStages(model, images, labels, work.micro_batches, work.precision)


def balanced(job: ModelInStages, stages: int) -> Sequence[str]:
    """The first module of each stage but the first, chosen by measured times."""
    shape = job.pieces[0][0].shape
    options = ProfileOptions(shape, job.device, job.precision, channels_last=True)
    names, _ = choose_split(job.traced, stages, options)
    return names


@contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The names of parameters whose gradients differ and of buffers whose values differ, in any bit."""
    wrong = [
        name
        for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True)
        if (a.grad is None) != (b.grad is None)
        or (a.grad is not None and b.grad is not None and not torch.equal(a.grad, b.grad))
    ]
    buffers = zip(one.named_buffers(), other.named_buffers(), strict=True)
    return wrong + [name for (name, a), (_, b) in buffers if not torch.equal(a, b)]


def same_bits(works: Sequence[Work], log: Log, until: float = float("inf")) -> int:
    """Compares every schedule with accumulation over the same micro-batches, for two steps. Returns how many
    differ."""
    print("| model | schedule | stages | tensors compared | differing |\n|---|---|---|---|---|")
    bad = 0
    for work in works:
        name = work.model
        if time.monotonic() > until:
            print(f"| {name} | skipped: no time left | | | |")
            continue
        try:
            job = job_of(work)
            untouched = copy.deepcopy(job.model)
            with deterministic():
                for _ in range(2):
                    job.whole()
        except (UserError, RuntimeError) as error:  # not installed, or no deterministic kernels
            print(f"| {name} | skipped: {str(error).splitlines()[0]} | | | |")
            continue
        whole = job.model
        compared = sum(each.grad is not None for each in whole.parameters()) + len([*whole.buffers()])
        for schedule in SCHEDULES:
            stages = 4 if schedule == "interleaved" else 2
            job.model = copy.deepcopy(untouched)
            try:
                with deterministic():
                    wrong = piped_and_differing(job, whole, schedule, stages)
            except Exception as error:  # one that fails must not hide the others
                wrong = [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
            log.add("bits", model=name, schedule=schedule, compared=compared, differing=wrong)
            bad += bool(wrong)
            cell = f"{len(wrong)}, first {wrong[0]}" if wrong else "0"
            print(f"| {name} | {schedule} | {stages} | {compared} | {cell} |", flush=True)
        del job, whole, untouched
        torch.cuda.empty_cache()
    return bad


def piped_and_differing(job: ModelInStages, whole: nn.Module, schedule: str, stages: int) -> list[str]:
    box = Mailbox([LaneDevice.on(job.device) for _ in range(2)])
    lanes = job.cut(even_cuts(job.traced, stages), schedule, box)
    for _ in range(2):
        job.step(box, lanes)
    return differing(whole, job.model)


def mailbox_with(streams: str, places: Sequence[LaneDevice], move: Move) -> Mailbox:
    """Two lane devices, the same for every case: the allocator keeps memory per stream, so new ones would not fit."""
    return Mailbox([places[0]] * 2 if streams == ONE else places, overlap=streams == OWN, move=move)


def overlap_on_gpu(
    work: Work,
    schedules: Sequence[str],
    rounds: int,
    steps: int,
    log: Log,
    out: Path | None,
    until: float = float("inf"),
) -> None:
    """One model, one batch size: every schedule and arrangement of copies, alternating."""
    device, job = work.device, job_of(work)
    settle: Callable[[], None] = (
        partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing
    )
    moves = MOVES if device.type == "cuda" else {"device to device": copy_direct}
    cuts = {stages: balanced(job, stages) for stages in (2, 4)}
    keys = [(schedule, move, streams) for schedule in schedules for move in moves for streams in STREAMS]
    runs: dict[Any, Callable[..., None]] = {"whole": job.whole}
    places = [LaneDevice.on(device) for _ in range(2)]
    for key in keys:
        schedule, move, streams = key
        box = mailbox_with(streams, places, moves[move])
        lanes = job.cut(cuts[4 if schedule == "interleaved" else 2], schedule, box)
        runs[key] = partial(job.step, box, lanes)
    peaks: dict[Any, float] = {}
    for key, run in runs.items():
        for warm in range(3):
            if warm == 2 and device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            run()
            settle()
        peaks[key] = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0

    def timed(run: Callable[..., None]) -> float:
        run()  # the previous case may have left the memory fragmented
        settle()
        begun = time.perf_counter()
        for _ in range(steps):
            run()
        settle()
        return (time.perf_counter() - begun) / steps

    def note(key: Any, seconds: float) -> None:
        log.add("copies on a GPU", work=str(work), key=key, seconds=seconds, peak_gib=peaks[key])

    found = turns(rounds, {key: partial(timed, run) for key, run in runs.items()}, note, until)
    print(
        f"\n{machine(device)}; {work}, cut at {', '.join(cuts[2])} (two "
        f"stages) or {', '.join(cuts[4])} (interleaved); {len(found['whole'])} rounds of {steps} steps, medians\n"
    )
    heads = " | ".join(f"{streams}, ms (spread)" for streams in STREAMS)
    print(f"| schedule | copies | {heads} | shorter than {ONE} by | shorter than {EACH} by | peak, GiB |")
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| the whole model | none | {with_spread(found['whole'])} | - | - | - | - | {peaks['whole']:.1f} |"
    )
    for schedule in schedules:
        for move in moves:
            rounds_of = {streams: found[schedule, move, streams] for streams in STREAMS}
            one, each, own = (median_ms(rounds_of[streams]) for streams in STREAMS)
            print(
                f"| {schedule} | {move} | {' | '.join(map(with_spread, rounds_of.values()))} | "
                f"{shorter(own, one)} | {shorter(own, each)} | {peaks[schedule, move, OWN]:.1f} |",
                flush=True,
            )
    if out is not None:
        for schedule, move, streams in keys:
            runs[schedule, move, streams]()
            recorders = [Recorder(rank, device) for rank in range(2)]
            runs[schedule, move, streams](recorders=recorders)
            file = f"{work.model}-{work.batch}-{schedule}-{move}-{streams}".replace(" ", "-").replace(
                "/", "-"
            )
            title = f"{work}, {schedule}, copies {move}, {streams}"
            draw(out, file, title, recorders, None)
    del runs
    if device.type == "cuda":
        torch.cuda.empty_cache()


def with_spread(seconds: Sequence[float]) -> str:
    """The median, and how far apart the fastest and the slowest round are."""
    return f"{median_ms(seconds):.1f} ({100 * (max(seconds) / min(seconds) - 1):.0f} %)"


def _nothing() -> None:
    return


MODELS = (
    "resnet50",
    "resnet18",
    "vgg11_bn",
    "mobilenet_v2",
    "torchvision/densenet121",
    "torchvision/efficientnet_b0",
    "timm/convnext_atto",
)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per round on the GPU")
    parser.add_argument("--batches", default="1024", help="batch sizes on the GPU, separated by commas")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument(
        "--models", default=",".join(MODELS), help="models whose bits are compared on the GPU"
    )
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="start nothing new on the GPU after this time"
    )
    parser.add_argument(
        "--forward-ms",
        type=float,
        default=8.0,
        help="forward time of a sleeping rank; backward takes twice that",
    )
    parser.add_argument(
        "--transfer-ms", type=float, default=4.0, help="time of one copy between sleeping stages"
    )
    parser.add_argument("--out", type=Path, help="folder for timelines (SVG, and JSON for ui.perfetto.dev)")
    parser.add_argument("--log", help="file for the measurements, as JSON lines")
    parser.add_argument("--cpu", action="store_true", help="sleeping stages only")
    args = parser.parse_args()
    log, transfer, begun = Log(args.log), args.transfer_ms / 1e3, time.monotonic()
    if args.small:
        on_cpu(1, transfer, [Case(schedule, 2, 4) for schedule in SCHEDULES], log, args.out)
        tiny = Work("cifar/resnet8", 32, 8, 4, CPU, FP32)
        bad = same_bits([tiny], log)
        overlap_on_gpu(tiny, ["1f1b"], 1, 1, log, args.out)
        return 1 if bad else 0
    # Two lane devices of one GPU have ten streams; by default only eight run concurrently.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if args.cpu or not torch.cuda.is_available():
        forward = args.forward_ms / 1e3
        cases = [
            Case(schedule, ranks, args.micro_batches, forward, 2 * forward)
            for schedule in SCHEDULES
            for ranks in (2, 4)
        ]
        return on_cpu(args.rounds, transfer, cases, log, args.out)
    device = torch.device("cuda", 0)
    print(f"{machine(device)}: gradients and buffers compared with accumulation, two steps\n")
    works = [Work(name, 224, 16, 4, device, BF16) for name in args.models.split(",")]
    bad = same_bits(works, log, begun + args.seconds / 2)
    for batch in map(int, args.batches.split(",")):
        if time.monotonic() > begun + args.seconds:
            print(f"\nbatch {batch}: skipped, no time left")
            continue
        work = Work(args.model, 224, batch, args.micro_batches, device, BF16)
        try:
            overlap_on_gpu(work, SCHEDULES, args.rounds, args.steps, log, args.out, begun + args.seconds)
        except torch.OutOfMemoryError:
            print(f"\nbatch {batch}: skipped, out of memory")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
