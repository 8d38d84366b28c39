"""What strict mode costs: its step against the plain one, side by side in one run.

    python benchmarks/strict_cost.py            # a GPU if there is one, one process, 2, 4 and 8 shards
    python benchmarks/strict_cost.py --cpu      # gloo on the CPU, 2 and 4 processes, 4 shards

On the GPU: ResNet-50, batch 256, bf16, the whole loop as `drumline train` runs it, with the step as one CUDA graph,
plain against strict; also compiled (`--compile`). On the CPU: ResNet-18 at 32 px, batch 64, one thread per process,
DDP's all-reduce against our ordered sum. Rounds alternate, so that a change of clock speed hits both. Prints a
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

from drumline.launch.environment import read_place
from drumline.launch.network import free_port
from drumline.launch.world import World, join
from drumline.recipe import Checkpoint, Data, Model, Optim, Parallel, Recipe, Run, Train
from drumline.train.rehearse import rehearse
from drumline.train.start import Running, start
from drumline.train.task import classification
from loop_overhead import case, ours

SHARDS = (2, 4, 8)
CPU_SHARDS, CPU_WARM, CPU_STEPS = 4, 3, 12


def strictly(recipe: Recipe, shards: int) -> Recipe:
    return replace(recipe, run=replace(recipe.run, strict=True, shards=shards))


def on_gpu(rounds: int, steps: int, compiled: bool) -> None:
    """One process, one GPU."""
    plain = case("resnet50", 256, "classes=1000,size=224,samples=2560", True, compiled)
    recipes = {"plain": plain} | {f"strict, {shards} shards": strictly(plain, shards) for shards in SHARDS}
    times: dict[str, list[float]] = {name: [] for name in recipes}
    for _ in range(rounds):
        for name, recipe in recipes.items():
            times[name].append(ours(recipe, steps)[0])
            torch.cuda.empty_cache()
    how = "compiled" if compiled else "eager kernels"
    print(
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}: ResNet-50, batch 256, bf16, {how}, captured; "
    )
    print(f"{rounds} rounds of {steps} steps, medians\n\n| mode | ms per step | to plain |\n|---|---|---|")
    for name, found in times.items():
        ratios = [mine / base for mine, base in zip(found, times["plain"], strict=True)]
        print(
            f"| {name} | {1e3 * statistics.median(found):.2f} | {statistics.median(ratios):.3f}x |",
            flush=True,
        )


def cpu_recipe() -> Recipe:
    return Recipe(
        run=Run(device="cpu"),
        data=Data(source="synthetic", path="classes=10,size=32,samples=512", batch=64, workers=0),
        model=Model(name="resnet18"),
        optim=Optim(schedule="constant"),
        train=Train(steps=10_000, eval_every=0),
        parallel=Parallel(threads=1),
        checkpoint=Checkpoint(every_epochs=0),
    )


def one_rank(rounds: int) -> None:
    """Both modes in this process group, round after round; rank 0 prints the seconds per step of each."""
    world = join(read_place(os.environ), "cpu", "gloo", 300)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        plain = replace(cpu_recipe(), run=Run(device="cpu", dir=folder))
        modes = {
            name: start(recipe, world, classification, cleanup)
            for name, recipe in (("plain", plain), ("strict", strictly(plain, CPU_SHARDS)))
        }
        for run in modes.values():
            rehearse(run, run.rehearsal(0))
        for _ in range(rounds):
            found = [timed(run, world) for run in modes.values()]
            if world.first:
                print("SECONDS", *found, flush=True)
    world.close()


def timed(run: Running, world: World) -> float:
    with closing(run.batches(0, CPU_WARM + CPU_STEPS)) as batches:
        for index in range(CPU_WARM + CPU_STEPS):
            if index == CPU_WARM:
                world.barrier()
                begun = time.perf_counter()
            run.step(next(batches), index, 0.01)
    world.barrier()
    return (time.perf_counter() - begun) / CPU_STEPS


def on_cpu(rounds: int) -> None:
    """Several processes over gloo."""
    print(
        f"{os.cpu_count()} CPU cores, torch {torch.__version__}: ResNet-18, batch 64, {CPU_SHARDS} shards, gloo"
    )
    print(
        f"{rounds} rounds of {CPU_STEPS} steps, medians\n\n| processes | strict to plain | spread |\n|---|---|---|"
    )
    for processes in (2, 4):
        common = {
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, __file__, "--one-rank", "--rounds", str(rounds)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="timed steps a round on the GPU")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--one-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_rank:
        one_rank(args.rounds)
    elif args.cpu or not torch.cuda.is_available():
        on_cpu(args.rounds)
    else:
        on_gpu(args.rounds, args.steps, args.compile)


if __name__ == "__main__":
    main()
