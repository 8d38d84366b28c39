"""What a teacher costs: a hand-written distillation loop, Drumline's loops, and the student alone.

ResNet-34 teaches ResNet-18 with kd (T = 4, 0.1 cross-entropy + 0.9 divergence) at 224 px in bf16 on one GPU:

- hand-written: the loop of RepDistiller's users, under autocast: student forward, teacher forward without gradient,
  `loss.item()`, top-1 and top-5 at each step, torch's SGD, cudnn.benchmark; in NCHW and in channels_last
- Drumline, live: the steps of `drumline distill`, with its metrics and its log
- Drumline, cached: the same with `distill.cache`, filled beforehand; the time includes reading and checking the
  rows
- Drumline, alone: the student without a teacher, as `drumline train` runs it

Drumline's loops run with deterministic kernels, its default, and with the fastest ones (`--run.no-deterministic`),
which the hand-written loops always use. All get the same batches from the same feed: random uint8 images that are
resident on the GPU, normalised there by the same code. Decoding is not measured. Student and teacher have the same
initial weights everywhere, so the first losses must be equal; the script compares them.

The loops alternate in rounds, so that noise affects all. A turn starts with warm-up steps that are not timed, and
the GPU is idle before and after the timed steps. Ratios are medians of the ratios per round. Memory is the peak of
a loop's own tensors.

    python benchmarks/distill_speed.py
    python benchmarks/distill_speed.py --compile                       # and all of them under torch.compile
    python benchmarks/distill_speed.py --small                         # a check that the script works

Exits with 1 if the first losses differ. Takes about 3 minutes on an H200.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from distill_arms import Arm, ByHand, Ours, Plan, has_torchvision, make_recipe
from drumline.core.arithmetic import set_deterministic
from drumline.core.errors import UserError
from drumline.distillation.cache import teacher as stored
from drumline.distillation.task import distillation_task
from drumline.models import create_model
from drumline.state.weights import export_weights
from drumline.training.task import classification
from harness import Parser, synchronize
from photographs import machine

NAIVE, LIVE, CACHED, ALONE = "hand-written", "Drumline, live", "Drumline, cached", "Drumline, alone"
NAIVE_LAST = "hand-written, channels_last"
FASTEST, DETERMINISTIC = "fastest", "same bits"
TARGETS = ((LIVE, NAIVE, 1.15), (CACHED, NAIVE, 1.5), (CACHED, ALONE, 0.95))
"""(loop, baseline, ratio): the loop should be at least this many times as fast as the baseline."""
CLOSE = 0.02
"""The largest relative difference between first losses in bf16."""


@dataclass(frozen=True)
class Entry:
    """A row of the table."""

    name: str
    kernels: str
    compiled: bool
    open: Callable[[ExitStack], Arm]

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.kernels


@dataclass
class Measured:
    """The measurements of an entry."""

    speeds: list[float] = field(default_factory=list)
    memory: int = 0
    graph: bool = False
    first_loss: float = math.nan
    fill: float = math.nan
    """Seconds per epoch to fill the cache."""


Found = dict[tuple[str, str], Measured]


def main() -> int:
    asked = _arguments()
    device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print(
                "distill_speed.py needs a CUDA device (--small runs without one)",
                file=sys.stderr,
            )
            return 2
        # As `drumline` sets it: 32 MiB, which is also cuBLAS's default on an H200.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plan = _plan(asked, device)
    print(f"{machine(device)}\n{_headline(plan)}", flush=True)
    same = True
    with tempfile.TemporaryDirectory(prefix="drumline-distill-") as place:
        folder = Path(place)
        write_set(folder / "set.npz", plan)
        write_teacher(folder / "teacher.safetensors", plan)
        for compiled in (False, True) if asked.compile else (False,):
            found = measure(entries(folder, plan, compiled), plan)
            title = "\nunder torch.compile\n" if compiled else ""
            print(title, table(found), "", *verdicts(found, plan), sep="\n", flush=True)
            same &= _same_losses(found)
    if asked.small:
        print("\nsmall: a check that the script works; the speeds mean nothing")
    return 0 if same else 1


def write_set(file: Path, plan: Plan) -> None:
    """Random images of every class."""
    generator = np.random.default_rng(0)

    def images(count: int) -> Any:
        return generator.integers(0, 256, (count, plan.size, plan.size, 3), dtype=np.uint8)

    labels = np.arange(plan.samples) % plan.classes
    few = plan.batch
    np.savez(file, x_train=images(plan.samples), y_train=labels, x_test=images(few), y_test=labels[:few])


def write_teacher(file: Path, plan: Plan) -> None:
    """Random weights, with BatchNorm statistics of a few random images. Without these, the logits are in the
    hundreds, and rounding in bf16 moves the loss."""
    torch.manual_seed(1)
    teacher = create_model(plan.teacher, classes=plan.classes).train()
    for part in teacher.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the plain mean of all batches seen
    with torch.no_grad():
        teacher(torch.randn(8, 3, plan.size, plan.size))
    export_weights(teacher, file)


def measure(arms: list[Entry], plan: Plan) -> Found:
    """All rounds of these loops. One that Drumline rejects is skipped, with the reason."""
    found: Found = {}
    ready: list[tuple[Entry, Arm]] = []
    with ExitStack() as cleanup:
        for entry in arms:
            measured = Measured()
            try:
                ready.append((entry, _opened(entry, measured, plan, cleanup)))
            except UserError as error:
                print(f"{entry.name}, {entry.kernels}: skipped: {error.what}")
                continue
            found[entry.key] = measured
        for number in range(plan.rounds):
            # The order alternates too.
            for entry, arm in ready if number % 2 == 0 else ready[::-1]:
                speed = take_turn(entry, arm, number, plan)
                found[entry.key].speeds.append(speed)
                print(
                    f"round {number + 1} of {plan.rounds}: {entry.name}, {entry.kernels}: {speed:,.0f} img/s",
                    file=sys.stderr,
                    flush=True,
                )
        ready.clear()
    _free(plan.device)
    return found


def take_turn(entry: Entry, arm: Arm, number: int, plan: Plan) -> float:
    """Images per second of the timed steps of a round."""
    _set_kernels(entry)
    first = number * plan.turn
    begun = 0.0

    def before(index: int) -> None:
        nonlocal begun
        if index == first + plan.warm:
            synchronize(plan.device)
            begun = time.perf_counter()

    arm.take(first, first + plan.turn, before)
    synchronize(plan.device)
    return plan.steps * plan.batch / (time.perf_counter() - begun)


def _opened(entry: Entry, measured: Measured, plan: Plan, cleanup: ExitStack) -> Arm:
    """Builds an arm and has it take its first steps: compiled code, library workspaces, the CUDA graph."""
    began = time.perf_counter()
    _free(plan.device)
    on_gpu = plan.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    _set_kernels(entry)
    fills: list[float] = []
    with mock.patch.object(stored, "fill", _timed(stored.fill, fills)):
        arm = entry.open(cleanup)
    _free(plan.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if isinstance(arm, Ours):
        arm.rehearse()
    arm.take(0, plan.warm, lambda index: None)
    synchronize(plan.device)
    if on_gpu:
        measured.memory = torch.cuda.max_memory_allocated() - before
    measured.graph, measured.first_loss = arm.graph, arm.first_loss
    measured.fill = fills[0] / plan.epochs if fills else math.nan
    took = time.perf_counter() - began
    print(f"{entry.name}, {entry.kernels}: ready after {took:.0f} s", file=sys.stderr, flush=True)
    return arm


def _set_kernels(entry: Entry) -> None:
    """Global in torch, so it is set before each turn. A recorded graph keeps its kernels."""
    set_deterministic(entry.kernels == DETERMINISTIC)


def _timed(work: Callable[..., bool], seconds: list[float]) -> Callable[..., bool]:
    def timed(*arguments: Any, **named: Any) -> bool:
        begun = time.perf_counter()
        whole = work(*arguments, **named)
        seconds.append(time.perf_counter() - begun)
        return whole

    return timed


# The arms


def entries(folder: Path, plan: Plan, compiled: bool) -> list[Entry]:
    """Every loop. Under torch.compile only with the fastest kernels: compiling takes most of the time."""

    def ours(name: str, kernels: str) -> Entry:
        recipe = make_recipe(folder, plan, kernels == DETERMINISTIC, compiled)
        if name == CACHED:
            # A folder for each: different kernels give different outputs.
            cache = str(folder / f"cache-{kernels}-{compiled}")
            recipe = replace(recipe, distill=replace(recipe.distill, cache=cache))
        build = classification if name == ALONE else distillation_task
        return Entry(name, kernels, compiled, lambda cleanup: Ours.open(recipe, build, plan, cleanup))

    def by_hand(name: str) -> Entry:
        last = name == NAIVE_LAST
        recipe = make_recipe(folder, plan, False, compiled)
        return Entry(name, FASTEST, compiled, lambda cleanup: ByHand(recipe, plan, channels_last=last))

    settings = (FASTEST,) if compiled else (DETERMINISTIC, FASTEST)
    return [
        by_hand(NAIVE),
        by_hand(NAIVE_LAST),
        *(ours(name, kernels) for kernels in settings for name in (LIVE, CACHED, ALONE)),
    ]


# The report


def table(found: Found) -> str:
    """The markdown table. Ratios are medians of the ratios per round."""
    lines = [
        "| loop | kernels | CUDA graph | img/s | min..max | vs. hand-written | "
        "vs. hand-written, channels_last | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, kernels), measured in found.items():
        speeds = measured.speeds
        ratios = [
            f"{times(measured, found[naive, FASTEST]):.2f}" if (naive, FASTEST) in found else ""
            for naive in (NAIVE, NAIVE_LAST)
        ]
        lines.append(
            f"| {name} | {kernels} | {'yes' if measured.graph else 'no'} | {statistics.median(speeds):,.0f} | "
            f"{min(speeds):,.0f}..{max(speeds):,.0f} | {' | '.join(ratios)} | {measured.memory / 2**30:.1f} GiB |"
        )
    return "\n".join(lines)


def times(one: Measured, other: Measured) -> float:
    """How many times as fast, in the median of the rounds."""
    return statistics.median(a / b for a, b in zip(one.speeds, other.speeds, strict=True))


def verdicts(found: Found, plan: Plan) -> list[str]:
    """A line for each target and for each cache."""
    lines = []
    for kernels in (DETERMINISTIC, FASTEST):
        for name, baseline, least in TARGETS:
            against = (baseline, FASTEST if baseline == NAIVE else kernels)
            if (name, kernels) in found and against in found:
                ratio = times(found[name, kernels], found[against])
                lines.append(
                    f"{'pass' if ratio >= least else 'FAIL'}: {name} ({kernels}) is {ratio:.2f} times as fast as "
                    f"{baseline} ({against[1]}); target: at least {least:g}"
                )
    for (name, kernels), measured in found.items():
        if name == CACHED and (LIVE, kernels) in found:
            live = plan.per_epoch * plan.batch / statistics.median(found[LIVE, kernels].speeds)
            lines.append(
                f"filling the cache ({kernels}): {measured.fill:.3f} s per epoch, {measured.fill / live:.2f} of the "
                f"time of an epoch with a live teacher ({live:.3f} s)"
            )
    losses = ", ".join(f"{loss:.4f}" for loss in _first_losses(found))
    same = "the same" if _same_losses(found) else "DIFFERENT"
    lines.append(f"first losses with a teacher: {losses}: {same}")
    return lines


def _first_losses(found: Found) -> list[float]:
    return [measured.first_loss for (name, _), measured in found.items() if name != ALONE]


def _same_losses(found: Found) -> bool:
    losses = _first_losses(found)
    return all(abs(loss - losses[0]) <= CLOSE * abs(losses[0]) for loss in losses)


def _headline(plan: Plan) -> str:
    whose = "torchvision's" if has_torchvision() and plan.size == 224 else "Drumline's"
    return (
        f"{plan.teacher} teaches {plan.student}, kd, batch {plan.batch}, {plan.size} x {plan.size}, {plan.classes} "
        f"classes, bf16; {plan.rounds} alternating round(s) of {plan.steps} timed steps after {plan.warm} of "
        f"warm-up; medians; the hand-written loops run {whose} models\n"
    )


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _plan(asked: argparse.Namespace, device: torch.device) -> Plan:
    if asked.small:
        return Plan(device, "resnet14", "resnet8", 10, 32, 32, 8, warm=1, steps=2, rounds=1)
    samples = max(2048, 2 * asked.batch)
    return Plan(
        device, "resnet34", "resnet18", 1000, 224, samples, asked.batch, asked.warm, asked.steps, asked.rounds
    )


def _arguments() -> argparse.Namespace:
    parser = Parser(__doc__, device="cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="timed steps per turn")
    parser.add_argument("--warm", type=int, default=10, help="warm-up steps before them")
    parser.add_argument("--compile", action="store_true", help="also run all of them under torch.compile")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
