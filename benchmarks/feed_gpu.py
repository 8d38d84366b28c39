"""Does the GPU wait for its data? Training steps fed by Drumline and by other loaders, next to the synthetic limit.

The step is hand-written and the same for all: copy a uint8 batch to the device, normalise it there, forward and
backward under bf16 autocast in channels_last, fused SGD. The synthetic limit feeds it one resident batch over and
over: nothing can be faster. The others read JPEG files, take a random resized crop of 224, mirror half of them, and
copy batches of 256 to the GPU:

- Drumline with native threads; with the GPU decoding what the threads are too slow for (what `data.decode auto`
  selects); and with the GPU decoding everything it can (`data.decode gpu`)
- torch's DataLoader with torchvision's transforms on PIL images, uint8 tensors, pinned, persistent workers,
  prefetch 4
- timm's create_loader with its PrefetchLoader
- DALI with decoding on the GPU

The feeds alternate in rounds, so that noise affects all. Each turn starts new workers and takes warm-up steps that
are not timed. Drumline's batches are kept (a copy on the GPU, inside the timed part) and compared afterwards with
Pillow's result for the same files, bit for bit, every sample of every step. The files are in the page cache for
all.

    python benchmarks/feed_gpu.py --path photos.tar
    python benchmarks/feed_gpu.py --path photos.tar --only resnet50 --modes compiled --threads 14 16
    python benchmarks/feed_gpu.py --path photos.tar --only none          # the feeds alone, without a model
    python benchmarks/feed_gpu.py --small                                # a check that the script works

Libraries that are not installed are skipped, each with a line. Takes about 8 minutes on an H200 with 16 cores.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from drumline.core.machine import raise_descriptor_limit, usable_cores
from drumline.data.feed.choose import gpu_unavailable
from drumline.data.feed.loader import LoaderWorkers
from drumline.data.feed.transform import Transform
from drumline.data.sources import DatasetSpec, EncodedDataset, open_dataset
from drumline.models import create_model
from feeds import CLASSES, Feed, Plan, dali_loader, data_loader, drumline, requests, synthetic, timm_loader
from harness import Parser, synchronize
from photographs import VERSION, machine, photographs, pillow_window

LIMIT = "synthetic limit"
FILES = 2000
"""The photographs are copied until there are at least this many files."""


class Contestant(NamedTuple):
    """A way to feed the step."""

    name: str
    open: Callable[[], Feed]
    steps: int
    warm: int
    ours: bool = False


class Measured(NamedTuple):
    """One turn."""

    speed: float
    equal: int
    """Samples, of `samples`, whose pixels equal Pillow's. Only Drumline's are compared."""
    samples: int


def main() -> int:
    asked = _arguments()
    began = time.perf_counter()
    device = torch.device(asked.device)
    if asked.small:
        print("needs CUDA: skipped compiled steps and decoding by the GPU")
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "feed_gpu.py needs a CUDA device (--small runs without one)",
            file=sys.stderr,
        )
        return 2
    plan = _plan(asked, device)
    raise_descriptor_limit()
    torch.backends.cudnn.benchmark = True
    with tempfile.TemporaryDirectory(prefix="drumline-feed-") as folder:
        spec, description = lay_out(asked.path, Path(folder), plan, 24 if asked.small else FILES)
        source = open_dataset(spec)
        assert isinstance(source, EncodedDataset)
        transform = Transform(plan.size, "crop-flip", resize=VERSION)
        print(f"{machine(device)}\n{description}")
        reference = torch.from_numpy(pillow_batches(source, transform, plan)).to(device)
        print(
            f"Pillow made {reference[..., 0, 0, 0].numel():,} reference windows   [{_since(began)}]",
            flush=True,
        )
        contestants = _contestants(asked.threads, spec, source, transform, plan)
        turns: dict[tuple[str, str, str], list[Measured]] = defaultdict(list)
        broken = False
        for model, mode in ((name, mode) for name in asked.only for mode in _modes(name, asked.modes)):
            if time.perf_counter() - began > 60 * asked.minutes:
                print(f"{model} {mode}: skipped: the {asked.minutes:g} minutes are over")
                continue
            broken |= measure(model, mode, contestants, reference, plan, turns, began)
            print(f"\n{table(turns, model, mode)}\n", flush=True)
        if asked.small:
            print("small: a check that the script works; the speeds mean nothing\n")
        print(_headline(plan), table(turns), "", _verdict(turns), sep="\n")
    return 1 if broken or any(turn.equal != turn.samples for found in turns.values() for turn in found) else 0


def lay_out(path: str | None, folder: Path, plan: Plan, at_least: int) -> tuple[DatasetSpec, str]:
    """Copies of the photographs in class folders, `at_least` files in all."""
    photos = photographs(path)
    copies = max(2, -(-max(at_least, 2 * plan.batch) // len(photos.data)))
    for copy in range(copies):
        place = folder / f"copy_{copy:03}"
        place.mkdir()
        for number, (name, data) in enumerate(zip(photos.names, photos.data, strict=True)):
            (place / f"{number:05}_{name}").write_bytes(data)
    description = f"{photos.description}; each copied {copies} times, {copies * len(photos.data):,} files"
    return DatasetSpec("folder", str(folder), "train"), description


def pillow_batches(source: EncodedDataset, transform: Transform, plan: Plan) -> NDArray[np.uint8]:
    """Pillow's result for every sample of a turn: (steps, batch, size, size, 3), made in several processes."""
    asked = list(islice(requests(source, plan), plan.settle + plan.steps))
    shape = (len(asked), plan.batch, transform.size, transform.size, 3)
    shared = np.frombuffer(mmap.mmap(-1, int(np.prod(shape))), np.uint8).reshape(shape)

    def make(worker: int) -> None:
        for step, request in list(enumerate(asked))[worker :: plan.workers]:
            for slot, sample in enumerate(request.samples.tolist()):
                with Image.open(source.where(sample)) as image:
                    sizes = np.array([image.size], np.int32)
                    row = transform.geometry(0, request.epoch, [sample], sizes)[0]
                    shared[step, slot] = pillow_window(image, row, transform.size)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=make, args=(worker,)) for worker in range(plan.workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, "a process that makes the reference failed"
    return shared


def measure(
    model: str,
    mode: str,
    contestants: list[Contestant],
    reference: Tensor,
    plan: Plan,
    turns: dict[tuple[str, str, str], list[Measured]],
    began: float,
) -> bool:
    """Runs all rounds of a model in a mode. Skips a feed after it fails, with the reason. Returns whether one of
    Drumline's failed."""
    step = _nothing if model == "none" else training_step(model, mode, plan)
    for images, labels in islice(synthetic(plan), 4):  # compiles, and lets cuDNN choose
        step(images, labels)
    kept = torch.empty_like(reference)
    synchronize(plan.device)
    print(f"{model} {mode}: ready   [{_since(began)}]", flush=True)
    failed: dict[str, bool] = {}
    for number in range(plan.rounds):
        # Who begins alternates too.
        for one in contestants if number % 2 == 0 else contestants[::-1]:
            if one.name in failed or (model == "none" and one.name == LIMIT):
                continue
            try:
                turn = take_turn(one, step, reference, kept, plan)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:600]
                print(f"{one.name}: skipped: it failed: {reason}", flush=True)
                failed[one.name] = one.ours
                continue
            turns[model, mode, one.name].append(turn)
            pixels = f", {turn.equal:,} of {turn.samples:,} samples equal Pillow's" if one.ours else ""
            print(
                f"{model} {mode}, round {number + 1} of {plan.rounds}: {one.name} {turn.speed:,.0f} img/s{pixels}"
                f"   [{_since(began)}]",
                flush=True,
            )
    return any(failed.values())


def take_turn(
    one: Contestant, step: Callable[[Tensor, Tensor], None], reference: Tensor, kept: Tensor, plan: Plan
) -> Measured:
    """Feeds the step: warm-up, then the timed steps, with the device idle at both ends of those."""
    begun, taken = 0.0, 0
    with closing(one.open()) as feed:
        for index, (images, labels) in enumerate(islice(feed, one.warm + one.steps)):
            if index == one.warm:
                synchronize(plan.device)
                begun = time.perf_counter()
            step(images, labels)
            if one.ours:
                # After the step: a buffer that is written to too early would show.
                kept[index].copy_(images.permute(0, 2, 3, 1))
            taken = index + 1
        synchronize(plan.device)
        took = time.perf_counter() - begun
    assert taken == one.warm + one.steps, (one.name, taken)
    if not one.ours:
        return Measured(one.steps * plan.batch / took, 0, 0)
    same = sum(
        int((mine == right).flatten(1).all(1).sum())
        for mine, right in zip(kept[:taken], reference[:taken], strict=True)
    )
    return Measured(one.steps * plan.batch / took, same, taken * plan.batch)


def training_step(name: str, mode: str, plan: Plan) -> Callable[[Tensor, Tensor], None]:
    """A careful hand-written step, without a host sync."""
    torch.compiler.reset()
    torch.manual_seed(0)
    device, on_gpu = plan.device, plan.device.type == "cuda"
    model: nn.Module = (
        create_model(name, classes=CLASSES).to(device, memory_format=torch.channels_last).train()
    )  # type: ignore[call-overload]
    forward = torch.compile(model) if mode == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5, fused=on_gpu)
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).mul(255).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], device=device).mul(255).view(1, 3, 1, 1)

    def step(images: Tensor, labels: Tensor) -> None:
        images = images.contiguous(memory_format=torch.channels_last)
        if images.dtype == torch.uint8:
            images = images.sub(mean).div_(std)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(forward(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def _nothing(images: Tensor, labels: Tensor) -> None:
    """The step of `--only none`."""


def _contestants(
    threads: list[int], spec: DatasetSpec, source: EncodedDataset, transform: Transform, plan: Plan
) -> list[Contestant]:
    found = [Contestant(LIMIT, partial(synthetic, plan), plan.steps, plan.warm)]

    def ours(name: str, workers: LoaderWorkers) -> Contestant:
        feed = partial(drumline, workers, spec, source, transform, plan)
        warm = plan.settle if workers.decode == "both" else plan.warm
        return Contestant(name, feed, plan.steps, warm, ours=True)

    found += [
        ours(f"Drumline, {LoaderWorkers('threads', count)}", LoaderWorkers("threads", count))
        for count in threads
    ]
    if reason := gpu_unavailable(plan.device):
        print(f"Drumline with GPU decode: skipped: {reason}")
    else:
        most = LoaderWorkers("threads", max(threads))
        found.append(ours(f"Drumline, {most} and the GPU", replace(most, decode="both")))
        found.append(ours("Drumline, GPU decode", replace(most, decode="gpu")))
    others: tuple[tuple[str, str, Callable[..., Feed], int], ...] = (
        ("torchvision", f"DataLoader + torchvision, {plan.workers} workers", data_loader, plan.slow_steps),
        ("timm", f"timm, {plan.workers} workers", timm_loader, plan.slow_steps),
        ("nvidia.dali", "DALI, GPU decode", dali_loader, plan.steps),
    )
    for module, name, feed, steps in others:
        try:
            __import__(module)
        except Exception as error:  # an incompatible version raises nearly anything
            print(f"{name}: skipped: {module} cannot be imported ({type(error).__name__}: {error})")
            continue
        found.append(Contestant(name, partial(feed, source, plan), steps, plan.warm))
    return found


# The report


def table(turns: dict[tuple[str, str, str], list[Measured]], model: str = "", mode: str = "") -> str:
    """The markdown table. The ratio to the synthetic limit is taken per round, then averaged."""
    lines = [
        "| model | mode | feed | img/s | min..max | of the limit | Pillow's pixels |",
        "|---|---|---|---|---|---|---|",
    ]
    for (of_model, of_mode, name), found in turns.items():
        if (model and (model, mode) != (of_model, of_mode)) or not found:
            continue
        speeds = [turn.speed for turn in found]
        limits = [turn.speed for turn in turns.get((of_model, of_mode, LIMIT), [])]
        ratio = (
            statistics.mean(a / b for a, b in zip(speeds, limits, strict=False)) if limits else float("nan")
        )
        samples = sum(turn.samples for turn in found)
        pixels = f"{sum(turn.equal for turn in found):,} of {samples:,} samples" if samples else ""
        lines.append(
            f"| {of_model} | {of_mode} | {name} | {statistics.mean(speeds):,.0f} | {min(speeds):,.0f}.."
            f"{max(speeds):,.0f} | {'' if limits == [] else f'{ratio:.3f}'} | {pixels} |"
        )
    return "\n".join(lines)


def _headline(plan: Plan) -> str:
    return (
        f"batch {plan.batch}, {plan.size} x {plan.size}, bf16, channels_last, SGD; means of {plan.rounds} "
        f"alternating rounds of {plan.steps} timed steps ({plan.slow_steps} for worker processes) after {plan.warm} "
        f"warm-up steps ({plan.settle} for the feed that balances CPU and GPU)\n"
    )


def _verdict(turns: dict[tuple[str, str, str], list[Measured]]) -> str:
    samples = sum(turn.samples for found in turns.values() for turn in found)
    equal = sum(turn.equal for found in turns.values() for turn in found)
    return f"Drumline against Pillow: {equal:,} of {samples:,} samples equal, bit for bit"


def _modes(model: str, modes: list[str]) -> list[str]:
    return ["feed alone"] if model == "none" else modes


def _since(began: float) -> str:
    return f"{time.perf_counter() - began:.0f} s"


def _plan(asked: argparse.Namespace, device: torch.device) -> Plan:
    if asked.small:
        return Plan(
            device, batch=8, size=64, workers=2, warm=2, settle=3, steps=2, slow_steps=2, rounds=asked.rounds
        )
    workers = asked.workers
    rounds, steps = (1, 16) if asked.quick else (asked.rounds, asked.steps)
    return Plan(device, asked.batch, 224, workers, 16, 64, steps, min(steps, 2 * workers), rounds)


def _arguments() -> argparse.Namespace:
    parser = Parser(__doc__, device="cpu", only=["resnet18"], modes=["eager"], rounds=1)
    parser.add_argument("--path", help="folder or tar of photographs; default: synthetic ones")
    parser.add_argument(
        "--only", nargs="+", default=["resnet50", "resnet18"], help="models, or none for the feeds alone"
    )
    parser.add_argument("--modes", nargs="+", default=["compiled", "eager"], choices=("eager", "compiled"))
    parser.add_argument(
        "--threads", type=int, nargs="+", help="numbers of Drumline's threads to measure; default: cores"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=usable_cores(),
        help="worker processes of the other loaders; default: cores",
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48, help="timed steps per turn")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no further model after this time")
    parser.add_argument("--quick", action="store_true", help="one round of 16 steps")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    asked.threads = asked.threads or [2 if asked.small else usable_cores()]
    return asked


if __name__ == "__main__":
    sys.exit(main())
