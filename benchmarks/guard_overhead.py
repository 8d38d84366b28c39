"""What fingerprints and guards cost per step: the same step with neither, each, and both, in one process.

    python benchmarks/guard_overhead.py
    python benchmarks/guard_overhead.py --every 100 --rounds 8
    python benchmarks/guard_overhead.py --small     # a few steps on a CPU: a check that the script works

On a GPU: ResNet-50, bf16, batch 256, as one CUDA graph. Without a GPU: resnet8 on the CPU. Rounds of `--every` steps
alternate between the four, so that a change of clock speed affects all. Each round records exactly one set of
fingerprints. Ratios are taken per round; the table shows their median and range. Fingerprints cover all parameters,
gradients, buffers, momenta and sample ids. Guards check at every step that gradients are finite, poll the result, and
regularly check modes, devices and the optimizer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drumline.config.recipe import Checkpoint, Data, Guard, Model, Optim, Parallel, Recipe, Run, Train
from drumline.data.feed.batch import Batch
from drumline.parallel.world import single_process
from drumline.training.guards import RunGuards
from drumline.training.rehearse import rehearse
from drumline.training.run import Run as TrainingRun
from drumline.training.stop import StopSign
from drumline.training.task import classification
from harness import Parser, pick_device, synchronize

WARM = 10
RATE = 0.01


class Off(RunGuards):
    """Checks nothing."""

    def begin(self) -> None:
        return

    def before(self, index: int) -> None:
        return

    def after(self, done: int, batch: Batch, saving: bool) -> None:
        return

    def poll(self, done: int) -> int:
        return 0


class GuardsAlone(RunGuards):
    """All checks except fingerprints."""

    def after(self, done: int, batch: Batch, saving: bool) -> None:
        if done % self.run.recipe.guard.every == 0:
            self._own_findings(f"step {done}")


KINDS: dict[str, tuple[type[RunGuards], bool]] = {
    "neither": (Off, False),
    "fingerprints": (RunGuards, False),
    "guards": (GuardsAlone, True),
    "both": (RunGuards, True),
}
"""The guards, and whether the step checks that gradients are finite."""


@dataclass
class Arm:
    """One of the four, warmed up and ready."""

    run: TrainingRun
    guards: RunGuards
    stop: StopSign
    batches: Iterator[Batch]
    done: int = 0

    def steps(self, count: int) -> float:
        """Seconds per step, as the loop takes them."""
        synchronize(self.run.world.device)
        begun = time.perf_counter()
        for _ in range(count):
            batch = next(self.batches)
            self.guards.before(self.done)
            self.run.step(batch, self.done, RATE)
            self.done += 1
            self.guards.after(self.done, batch, saving=False)
            if self.stop.seen(self.done) or self.stop.alarm:
                raise SystemExit("stopped")
        synchronize(self.run.world.device)
        return (time.perf_counter() - begun) / count


def arm(recipe: Recipe, kind: str, cleanup: ExitStack) -> Arm:
    build, finite = KINDS[kind]
    device = torch.device("cuda", 0) if recipe.run.device == "cuda" else torch.device("cpu")
    run = TrainingRun(
        replace(recipe, run=replace(recipe.run, name=kind)), single_process(device), classification, cleanup
    )
    if not finite:
        run.step.gate = None
        del run.state.optimizer.found_inf  # type: ignore[attr-defined]
    guards = build(run)
    rehearse(run, run.single_batch(0))
    guards.begin()
    stop = cleanup.enter_context(StopSign(run.world, guards.poll))
    ready = Arm(run, guards, stop, run.batches(0, 10**9))
    ready.steps(WARM)
    run.reporter.run_log.flush()
    return ready


def recipe_of(gpu: bool, every: int, folder: Path) -> Recipe:
    shape = "classes=1000,size=224,samples=2560" if gpu else "classes=10,size=16,samples=512"
    return Recipe(
        run=Run(device="cuda" if gpu else "cpu", dir=str(folder)),
        data=Data(source="synthetic", path=shape, batch=256 if gpu else 32),
        model=Model(name="resnet50" if gpu else "resnet8"),
        optim=Optim(lr=RATE, schedule="constant"),
        train=Train(steps=10**9, precision="bf16" if gpu else "fp32", eval_every=0),
        parallel=Parallel(threads=1),
        guard=Guard(every=every),
        checkpoint=Checkpoint(every_epochs=0),
    )


def main() -> None:
    parser = Parser(__doc__, rounds=1, every=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--every", type=int, default=100, help="steps between records and per round")
    args = parser.parse_args()
    gpu = pick_device(args.small).type == "cuda"
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        recipe = recipe_of(gpu, args.every, Path(folder))
        arms = {kind: arm(recipe, kind, cleanup) for kind in KINDS}
        for number in range(args.rounds):
            # Each round starts with a different one: the first after a pause may run at a faster clock.
            order = [*KINDS][number % len(KINDS) :] + [*KINDS][: number % len(KINDS)]
            for kind in order:
                times[kind].append(arms[kind].steps(args.every))
    where = torch.cuda.get_device_name(0) if gpu else f"CPU, {torch.get_num_threads()} thread(s)"
    work = f"{recipe.model.name}, batch {recipe.data.batch}, {recipe.train.precision}"
    print(f"\n{where}, torch {torch.__version__}; {work}; {args.rounds} rounds of {args.every} steps\n")
    print("| enabled | ms per step | relative to neither, median | range |")
    print("|---|---|---|---|")
    for kind, seconds in times.items():
        ratios = [mine / plain for mine, plain in zip(seconds, times["neither"], strict=True)]
        print(
            f"| {kind} | {1e3 * statistics.median(seconds):.3f} | {statistics.median(ratios):.4f} | "
            f"{min(ratios):.4f} to {max(ratios):.4f} |"
        )


if __name__ == "__main__":
    main()
