"""Drumline's loop compared with a hand-written loop that does the same work, on one GPU.

    python benchmarks/loop_overhead.py
    python benchmarks/loop_overhead.py --small      # a tiny network on a CPU: a check that the script works

Both loops take the same resident uint8 batches, normalise on the GPU, run the same model under bf16 autocast, use the
same fused SGD and the same kernels. The hand-written loop is a careful one: no host sync, no logging. Drumline runs
its complete loop: metrics, timing, learning-rate schedule, stop signal, guards. Rounds alternate, so that a change of
clock speed affects both. Prints a markdown table.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from drumline.config.recipe import Checkpoint, Data, Model, Optim, Parallel, Recipe, Run, Train
from drumline.core.arithmetic import set_deterministic
from drumline.data.feed.batch import Batch, make_batch
from drumline.data.feed.sampler import training_requests
from drumline.models import create_model
from drumline.parallel.world import single_process
from drumline.state.fingerprint import state_sha256
from drumline.training.guards import RunGuards
from drumline.training.loop import take_steps
from drumline.training.rehearse import rehearse
from drumline.training.run import Run as TrainingRun
from drumline.training.sets import normaliser, open_sets
from drumline.training.step import TrainStep
from drumline.training.stop import StopSign
from drumline.training.task import classification
from harness import Parser, name_of, pick_device, synchronize

WARM, SMALL_WARM = 20, 2
RATE = 0.01
"""Of both loops. With 0.1, the tiny network, which has no normalisation layers, overflows within 40 steps."""


class TinyCNN(nn.Module):
    """Three convolutions and two linear layers on 32 x 32 images: a step so short that launching its kernels from
    Python takes most of the time."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 32), (32, 64), (64, 64))
        )
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.head = nn.Linear(128, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution in self.convolutions:
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


def tiny_cnn(classes: int) -> nn.Module:
    return TinyCNN(classes)


class Timed:
    """A step that records when the timed steps begin and end, with the GPU idle at both."""

    def __init__(
        self, step: Any, device: torch.device, warm: int, last: int, settle: Callable[[], None]
    ) -> None:
        self.step, self.device, self.warm, self.last, self.settle = step, device, warm, last, settle
        self.begun = self.ended = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __call__(self, batch: Batch, index: int, rate: float) -> None:
        if index == self.warm:
            self.settle()
            synchronize(self.device)
            self.begun = time.perf_counter()
        self.step(batch, index, rate)
        if index == self.last:
            synchronize(self.device)
            self.ended = time.perf_counter()


def ours(recipe: Recipe, steps: int, warm: int = WARM) -> tuple[float, float, str]:
    """Seconds per step of Drumline's loop, seconds of a bare graph replay, and the hash of the final state."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        recipe = replace(
            recipe,
            run=replace(recipe.run, dir=folder),
            train=replace(recipe.train, steps=warm + steps, eval_every=0),
        )
        world = single_process(device_of(recipe))
        run = TrainingRun(recipe, world, classification, cleanup)
        # TensorBoard is imported on a background thread with the first metric: a start-up cost.
        timed = Timed(run.step, world.device, warm, warm + steps - 1, settle=run.reporter.run_log.flush)
        run.step = timed  # type: ignore[assignment]
        guards = RunGuards(run)
        with StopSign(world, guards.poll) as stop:
            rehearse(run, run.single_batch(0))
            run.begin()
            take_steps(run, guards, stop)
        state = state_sha256(run.state.tensors())
        return (timed.ended - timed.begun) / steps, replay_alone(timed.step, steps), state


def replay_alone(step: TrainStep, times: int) -> float:
    """The GPU's own time for a captured step: the minimum for any loop. NaN if nothing is captured."""
    if step._graph is None:
        return float("nan")
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        step._graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / times


def by_hand(recipe: Recipe, steps: int, warm: int = WARM) -> float:
    """Seconds per step of the hand-written loop."""
    device = device_of(recipe)
    world = single_process(device)
    set_deterministic(recipe.run.deterministic)
    sets = open_sets(recipe, world)
    requests = training_requests(
        seed=0, samples=len(sets.train), batch=recipe.data.batch, first_step=0, last_step=8, local=slice(None)
    )
    batches = [
        Batch(*(tensor.to(device) for tensor in make_batch(sets.train, sets.transform, 0, request).batch))
        for request in requests
    ]
    torch.manual_seed(0)
    model = create_model(recipe.model.name, classes=len(sets.train.classes)).to(device)
    model = model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    if recipe.train.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4, fused=True)
    normalise = normaliser(sets, recipe)
    begun = 0.0
    for index in range(warm + steps):
        if index == warm:
            synchronize(device)
            begun = time.perf_counter()
        batch = batches[index % len(batches)]
        images = normalise(batch.images)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), batch.labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    synchronize(device)
    seconds = (time.perf_counter() - begun) / steps
    if not loss.item() < 2 * math.log(len(sets.train.classes)):
        raise SystemExit(
            f"{recipe.model.name} diverges at a learning rate of {RATE}, so its times mean nothing"
        )
    return seconds


def device_of(recipe: Recipe) -> torch.device:
    return torch.device("cuda", 0) if recipe.run.device == "cuda" else torch.device("cpu")


def case(
    model: str, batch: int, shape: str, deterministic: bool, compile_: bool = False, device: str = "cuda"
) -> Recipe:
    return Recipe(
        run=Run(device=device, deterministic=deterministic, name="auto"),
        data=Data(source="synthetic", path=shape, batch=batch),
        model=Model(name=model),
        optim=Optim(lr=RATE, schedule="constant"),
        train=Train(precision="bf16", compile=compile_),
        parallel=Parallel(threads="auto" if device == "cuda" else 1),
        checkpoint=Checkpoint(every_epochs=0),
    )


def main() -> int:
    parser = Parser(__doc__, rounds=1, steps=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps",
        type=int,
        default=60,
        help="timed steps per round with ResNet-50; 20 times as many with the tiny CNN",
    )
    args = parser.parse_args()
    device, warm = pick_device(args.small), SMALL_WARM if args.small else WARM
    big, small = "classes=1000,size=224,samples=2560", "classes=10,size=32,samples=2048"
    cases = {
        "ResNet-50, batch 256, fastest kernels": (case("resnet50", 256, big, False), args.steps),
        "ResNet-50, batch 256, deterministic": (case("resnet50", 256, big, True), args.steps),
        "tiny CNN, batch 64, deterministic": (
            case("loop_overhead:tiny_cnn", 64, small, True),
            20 * args.steps,
        ),
    }
    if args.small:
        print("needs CUDA: skipped ResNet-50 and the CUDA graph")
        tiny = case("loop_overhead:tiny_cnn", 64, small, True, device="cpu")
        cases = {"tiny CNN, batch 64, deterministic": (tiny, 20 * args.steps)}
    elif device.type != "cuda":
        print("loop_overhead.py needs a CUDA device (--small runs without one)", file=sys.stderr)
        return 2
    print(f"{name_of(device)}, torch {torch.__version__}, bf16, {args.rounds} rounds, medians\n")
    print(
        "| workload | hand-written, ms | Drumline without graph, ms | Drumline, ms | bare replay, ms | "
        "vs. hand-written | same bits |"
    )
    print("|---|---|---|---|---|---|---|")
    good = True
    for name, (recipe, steps) in cases.items():
        print(f"{name}: {warm} + {steps} steps a round", file=sys.stderr)
        plain = replace(recipe, train=replace(recipe.train, capture="off"))
        hand, eager, captured, floor, hashes = [], [], [], [], set()
        for _ in range(args.rounds):
            hand.append(by_hand(recipe, steps, warm))
            seconds, _, state = ours(plain, steps, warm)
            eager.append(seconds)
            hashes.add(state)
            seconds, bare, state = ours(recipe, steps, warm)
            captured.append(seconds)
            floor.append(bare)
            hashes.add(state)
        hand_ms, eager_ms, ours_ms, bare_ms = (
            1e3 * statistics.median(times) for times in (hand, eager, captured, floor)
        )
        same = ("yes" if len(hashes) == 1 else "NO") if recipe.run.deterministic else "not promised"
        good &= same != "NO"
        print(
            f"| {name} | {hand_ms:.3f} | {eager_ms:.3f} | {ours_ms:.3f} | {bare_ms:.3f} | "
            f"{hand_ms / ours_ms:.3f}x as fast | {same} |",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
