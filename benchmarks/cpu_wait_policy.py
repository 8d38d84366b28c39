"""What waiting OpenMP threads cost on a CPU: spinning (the default) compared with OMP_WAIT_POLICY=passive.

    python benchmarks/cpu_wait_policy.py
    python benchmarks/cpu_wait_policy.py --small      # one round of one step: a check that the script works

Trains a small network with plain torch on 1 and 2 threads, first on the machine as it is, then alongside one busy
process per core. Each policy and number of threads has its own process (libgomp reads the policy when it is loaded),
which stays alive. They alternate in rounds, and the fastest round of each counts. Prints speeds relative to one
spinning thread on the machine as it is. The machine is idle only if nothing else runs: the load average is printed
with the table. With `--real-time`, which needs root, they take precedence over other programs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from drumline.core.machine import usable_cores
from drumline.models import create_model
from harness import Parser

POLICIES = {"spin (default)": {}, "passive": {"OMP_WAIT_POLICY": "passive"}}
ARM = "DRUMLINE_BENCHMARK_ARM"
BUSY = "while True: pass"
Times = dict[tuple[str, str, int], float]


def main() -> None:
    parser = Parser(__doc__, rounds=1, steps=1, batch=4, threads=[2])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6, help="steps per round")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--real-time", action="store_true", help="take precedence over other programs (needs root)"
    )
    options = parser.parse_args()
    if ARM in os.environ:
        work(int(os.environ[ARM]), options.batch, options.steps)
        return
    best: Times = {}
    with ExitStack() as stack:
        arms = {
            (policy, threads): stack.enter_context(arm(variables, threads))
            for policy, variables in POLICIES.items()
            for threads in options.threads
        }
        for _ in range(options.rounds):
            for state, busy in (("as it is", 0), ("busy", usable_cores())):
                with others(busy):
                    for (policy, threads), process in arms.items():
                        key = state, policy, threads
                        seconds = one_round(process, options.real_time and not busy)
                        best[key] = min(best.get(key, float("inf")), seconds)
    show(best, options.threads, options.rounds)


def work(threads: int, batch: int, steps: int) -> None:
    """One arm: answers each line on stdin with the seconds that `steps` steps took."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = create_model("resnet8", classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()
    print("ready", flush=True)
    for line in sys.stdin:
        schedule(first=line == "first\n")
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        print(time.perf_counter() - begun, flush=True)


def schedule(first: bool) -> None:
    """Sets whether all threads of this process take precedence over other programs."""
    kind = os.SCHED_FIFO if first else os.SCHED_OTHER
    for thread in Path("/proc/self/task").iterdir():
        if os.sched_getscheduler(int(thread.name)) != kind:
            os.sched_setscheduler(int(thread.name), kind, os.sched_param(int(first)))


@contextmanager
def arm(variables: dict[str, str], threads: int) -> Iterator[subprocess.Popen[str]]:
    """A process that runs rounds on request."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    }
    process = subprocess.Popen(
        [sys.executable, *sys.argv],
        env={**kept, **variables, ARM: str(threads), "OMP_NUM_THREADS": str(threads)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def one_round(process: subprocess.Popen[str], first: bool) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("first\n" if first else "go\n")
    process.stdin.flush()
    return float(process.stdout.readline())


@contextmanager
def others(count: int) -> Iterator[None]:
    """Runs `count` processes that each keep a core busy."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def show(best: Times, counts: list[int], rounds: int) -> None:
    unit = best["as it is", next(iter(POLICIES)), counts[0]]
    print(f"{usable_cores()} cores, load average {os.getloadavg()[0]:.1f}, best of {rounds} rounds\n")
    print("| machine | threads | " + " | ".join(POLICIES) + " | passive / spin |")
    print("|---|---|" + "---|" * (len(POLICIES) + 1))
    for state in ("as it is", "busy"):
        for threads in counts:
            speeds = [unit / best[state, policy, threads] for policy in POLICIES]
            cells = " | ".join(f"{speed:.2f}" for speed in speeds)
            print(f"| {state} | {threads} | {cells} | {speeds[1] / speeds[0]:.2f} |")


if __name__ == "__main__":
    main()
