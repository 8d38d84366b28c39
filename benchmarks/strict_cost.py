"""What strict mode costs: its step compared with the plain one.

    python benchmarks/strict_cost.py            # a GPU if there is one: one process, 2, 4 and 8 shards
    python benchmarks/strict_cost.py --cpu      # gloo on the CPU: 2 and 4 processes, 4 shards
    python benchmarks/strict_cost.py --small    # both, tiny, on a CPU: a check that the script works

On the GPU: ResNet-50, batch 256, bf16, the complete loop of `drumline train` with the step as one CUDA graph, plain
and strict; compiled with `--compile`. On the CPU: ResNet-18 at 32 px, batch 64, one thread per process, DDP's
all-reduce and strict mode's ordered sum. Rounds alternate, so that a change of clock speed affects both. Prints a
markdown table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from drumline.config.recipe import Checkpoint, Data, Model, Optim, Parallel, Recipe, Run, Train
from drumline.core.environment import read_rank_info
from drumline.launch.network import free_port
from drumline.parallel.process_group import init_world
from drumline.parallel.world import World
from drumline.training.rehearse import rehearse
from drumline.training.run import Run as TrainingRun
from drumline.training.task import classification
from harness import Parser, name_of, pick_device
from loop_overhead import SMALL_WARM, WARM, case, ours

SHARDS = (2, 4, 8)
CPU_SHARDS, CPU_WARM = 4, 3


def strictly(recipe: Recipe, shards: int) -> Recipe:
    return replace(recipe, run=replace(recipe.run, strict=True, shards=shards))


def whole_loop(rounds: int, steps: int, compiled: bool, small: bool) -> None:
    """One process on one GPU, or on a CPU with `--small`."""
    device, warm = pick_device(small), SMALL_WARM if small else WARM
    model, batch, shape = (
        ("resnet8", 8, "classes=10,size=16,samples=64")
        if small
        else ("resnet50", 256, "classes=1000,size=224,samples=2560")
    )
    plain = case(model, batch, shape, True, compiled, device.type)
    recipes = {"plain": plain} | {f"strict, {shards} shards": strictly(plain, shards) for shards in SHARDS}
    times: dict[str, list[float]] = {name: [] for name in recipes}
    for _ in range(rounds):
        for name, recipe in recipes.items():
            times[name].append(ours(recipe, steps, warm)[0])
            torch.cuda.empty_cache()
    how = "compiled" if compiled else "eager kernels"
    print(
        f"{name_of(device)}, torch {torch.__version__}: {model}, batch {batch}, bf16, {how}, captured if on a GPU;"
    )
    print(
        f"{rounds} rounds of {steps} steps, medians\n\n| mode | ms per step | relative to plain |\n|---|---|---|"
    )
    for name, found in times.items():
        ratios = [mine / base for mine, base in zip(found, times["plain"], strict=True)]
        print(
            f"| {name} | {1e3 * statistics.median(found):.2f} | {statistics.median(ratios):.3f}x |",
            flush=True,
        )


def cpu_recipe(small: bool) -> Recipe:
    return Recipe(
        run=Run(device="cpu"),
        data=Data(source="synthetic", path="classes=10,size=32,samples=512", batch=64, workers=0),
        model=Model(name="resnet8" if small else "resnet18"),
        optim=Optim(schedule="constant"),
        train=Train(steps=10_000, eval_every=0),
        parallel=Parallel(threads=1),
        checkpoint=Checkpoint(every_epochs=0),
    )


def one_rank(rounds: int, steps: int, small: bool) -> None:
    """Runs both modes in this process group, alternating. Rank 0 prints the seconds per step of each."""
    world = init_world(read_rank_info(os.environ), "cpu", "gloo", 300)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        plain = replace(cpu_recipe(small), run=Run(device="cpu", dir=folder))
        modes = {
            name: TrainingRun(recipe, world, classification, cleanup)
            for name, recipe in (("plain", plain), ("strict", strictly(plain, CPU_SHARDS)))
        }
        for run in modes.values():
            rehearse(run, run.single_batch(0))
        for _ in range(rounds):
            found = [timed(run, world, steps) for run in modes.values()]
            if world.is_rank_zero:
                print("SECONDS", *found, flush=True)
    world.close()


def timed(run: TrainingRun, world: World, steps: int) -> float:
    with closing(run.batches(0, CPU_WARM + steps)) as batches:
        for index in range(CPU_WARM + steps):
            if index == CPU_WARM:
                world.barrier()
                begun = time.perf_counter()
            run.step(next(batches), index, 0.01)
    world.barrier()
    return (time.perf_counter() - begun) / steps


def on_cpu(rounds: int, steps: int, small: bool) -> None:
    """Several processes over gloo."""
    print(
        f"{os.cpu_count()} CPU cores, torch {torch.__version__}: {cpu_recipe(small).model.name}, batch 64, "
        f"{CPU_SHARDS} shards, gloo"
    )
    print(
        f"{rounds} rounds of {steps} steps, medians\n\n"
        "| processes | strict relative to plain | spread |\n|---|---|---|"
    )
    for processes in (2,) if small else (2, 4):
        common = {
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, __file__, "--one-rank", "--rounds", str(rounds)]
        command += ["--cpu-steps", str(steps), *(["--small"] if small else [])]
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **common, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(processes)
        ]
        said, *_ = [rank.communicate()[0] for rank in ranks]
        lines = [line.split()[1:] for line in said.splitlines() if line.startswith("SECONDS")]
        ratios = sorted(float(strict) / float(plain) for plain, strict in lines)
        print(
            f"| {processes} | {statistics.median(ratios):.3f}x | {ratios[0]:.3f} to {ratios[-1]:.3f} |",
            flush=True,
        )


def main() -> int:
    parser = Parser(__doc__, rounds=1, steps=2, cpu_steps=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="timed steps per round on the GPU")
    parser.add_argument("--cpu-steps", type=int, default=12, help="timed steps per round on the CPU")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--cpu", action="store_true", help="only the part that runs on the CPU")
    parser.add_argument("--one-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_rank:
        one_rank(args.rounds, args.cpu_steps, args.small)
        return 0
    if args.small:
        print("needs CUDA: skipped ResNet-50 and the CUDA graph")
    if args.small or (torch.cuda.is_available() and not args.cpu):
        whole_loop(args.rounds, args.steps, args.compile, args.small)
    if args.small or args.cpu or not torch.cuda.is_available():
        on_cpu(args.rounds, args.cpu_steps, args.small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
