"""What TraceML reports on the problems planted for `drumline why`, as plain PyTorch scripts.

    pip install traceml-ai; python benchmarks/why_traceml.py [--small]

Trains a small convolutional network on random images with a DataLoader, once for each problem, under `traceml run`,
and prints the table of docs/why-slow.md: the verdict of its final summary, and its other warnings. The
problems are those of `tests/diagnosis/planted.py` where a plain script can have them. Needs only a CPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from harness import Parser

PROBLEMS = {
    "healthy": 1,
    "healthy, two processes": 2,
    "slow disk": 1,
    "slow decode": 1,
    "too few workers": 1,
    "slow transform": 1,
    "too many threads": 1,
    "one slow rank": 2,
    "logging on rank 0": 2,
    "a hook that waits": 1,
    "growing memory": 1,
    "open files": 1,
    "throughput decay": 1,
    "exposed exchange": 2,
    "tiny batch": 1,
    "evaluation-heavy": 1,
    "checkpoint-heavy": 1,
    "cold first epoch": 1,
}
"""And in how many processes."""
STEPS = 20
"""Of an epoch."""


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--train", default="", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--only", default="", help="problems whose name contains this")
    options = parser.parse_args()
    if options.train:
        train(options.train, options.epochs)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, CPU\n")
    print("| planted | verdict | warnings |\n|---|---|---|")
    command = shutil.which("traceml", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if command is None:
        print("\nneeds TraceML (pip install traceml-ai)")
        return
    problems = list(PROBLEMS)[:2] if options.small else [name for name in PROBLEMS if options.only in name]
    for problem in problems:
        with tempfile.TemporaryDirectory() as folder:
            first, others = diagnosis(command, problem, Path(folder), options.epochs)
        print(f"| {problem} | {first} | {', '.join(others)} |", flush=True)


def diagnosis(command: str, problem: str, folder: Path, epochs: int) -> tuple[str, list[str]]:
    """TraceML's verdict on a run."""
    words = [command, "run", "--mode", "summary", "--logs-dir", str(folder), "--run-name", "run"]
    words += ["--nproc-per-node", str(PROBLEMS[problem]), __file__]
    words += ["--args", "--train", problem, "--epochs", str(epochs)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    files = list(folder.rglob("final_summary.txt"))
    if done.returncode or not files:
        return f"failed: {(done.stderr.strip().splitlines() or [''])[-1]}", []
    text = files[0].read_text()
    verdict = re.search(r"Verdict: (.*?)\s*\|", text)
    others = re.findall(r"(?:METRICS|MEMORY): ([A-Z ]+[A-Z])", text)
    return (verdict[1] if verdict else "none"), [each for each in others if each not in ("NORMAL", "NO GPU")]


# ---- the script that is watched


class Images(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, problem: str, count: int) -> None:
        self.problem, self.count, self.seen = problem, count, set[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.problem in ("slow disk", "too few workers"):
            time.sleep(0.004)
        if self.problem == "slow transform":
            time.sleep(0.002)
        if self.problem == "slow decode":
            torch.rand(300, 300).sort()
        if self.problem == "cold first epoch" and index not in self.seen:
            time.sleep(0.008)
            self.seen.add(index)
        return torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index)), index % 4


def train(problem: str, epochs: int) -> None:
    import traceml_ai as traceml  # type: ignore[import-not-found]

    traceml.init(mode="auto")
    torch.set_num_threads(16 if problem == "too many threads" else 1)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    if problem == "exposed exchange":
        model = nn.Sequential(
            nn.Flatten(), nn.LazyLinear(1500), nn.ReLU(), nn.Linear(1500, 1500), nn.Linear(1500, 4)
        )
    model(torch.rand(1, 3, 32, 32))
    if world > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch = 2 if problem == "tiny batch" else 16
    data = Images(problem, STEPS * batch)
    workers = {"too few workers": 1, "slow decode": 2, "slow disk": 2}.get(problem, 0)
    loader = DataLoader(data, batch, num_workers=workers, persistent_workers=workers > 0)
    kept: list[Any] = []
    calls = 0
    for _ in range(epochs):
        for images, labels in loader:
            with traceml.trace_step(model):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                calls += 1
                late = (problem == "one slow rank" and rank == 1) or (
                    problem == "logging on rank 0" and rank == 0
                )
                if late or problem == "a hook that waits":
                    time.sleep(0.04)
                if problem == "throughput decay":
                    sum(number * number for number in range(2000 * calls))
                loss.backward()
                optimizer.step()
            if problem == "growing memory":
                kept.append(torch.zeros(1 << 18).fill_(1.0))
            if problem == "open files":
                kept.append(os.open(os.devnull, os.O_RDONLY))
            if problem == "checkpoint-heavy":
                torch.save([torch.rand(1 << 20), model.state_dict()], f"checkpoint-{rank}.pt")
        if problem == "evaluation-heavy":
            with torch.no_grad():
                for images, _ in loader:
                    for _again in range(3):
                        model(images)
    del kept
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
