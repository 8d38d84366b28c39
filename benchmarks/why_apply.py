"""How well `drumline why --measure --apply` predicts what a change saves, on planted problems.

    python benchmarks/why_apply.py
    python benchmarks/why_apply.py --small      # one problem, very short runs: a check that the script works

Each problem costs a fixed time, because it sleeps: a transform in the process of the step, an evaluation set that is
slow to read, an optimizer whose update takes as long for a small batch as for a large one, guards and saves at every
step of a larger model. `why` finds it, names a setting, predicts the speed, and measures the speed with the setting.
Prints a markdown table. The error of the saving is the predicted fraction of time saved against the measured one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import torch.nn.functional as F

from harness import Parser

BASE = (
    *("data.source=digits", "data.batch=32", "model.name=why_apply:small", "optim.lr=0.01"),
    *("train.loss=why_apply:steady_loss", "parallel.threads=1", "run.device=cpu"),
)
PROBLEMS: dict[str, tuple[str, ...]] = {
    "a slow transform in the step's process": ("data.transform=why_apply:slow_transform",),
    "an evaluation every tenth of an epoch": ("train.eval_every=0.1",),
    "an update that a small batch does not shorten": ("optim.name=why_apply:SlowUpdate", "data.batch=8"),
    "guards at every step": ("model.name=why_apply:large", "guard.every=1"),
    "a checkpoint every second step": ("model.name=why_apply:large", "checkpoint.every_steps=2"),
}
STEP_S, TRANSFORM_S, UPDATE_S, EVALUATION_S = 0.02, 0.003, 0.06, 0.05


class Small(nn.Module):
    """A step that takes a millisecond. Each batch of an evaluation takes longer by a fixed time."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            time.sleep(EVALUATION_S)
        return self.head(F.relu(self.hidden(x.mean(1).flatten(1))))


def small(classes: int) -> nn.Module:
    return Small(classes)


def large(classes: int) -> nn.Module:
    """Eleven million parameters, so that fingerprints and saves take a while, and a step that is still short."""
    return Small(classes, 150_000)


def steady_loss(logits: Tensor, labels: Tensor) -> Tensor:
    time.sleep(STEP_S)
    return F.cross_entropy(logits, labels, reduction="none")


def slow_transform(image: Any, rng: Any) -> Any:
    time.sleep(TRANSFORM_S)
    return image


class SlowUpdate(torch.optim.SGD):
    """An update that takes as long for any batch."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(UPDATE_S)
        return super().step(closure)


def main() -> int:
    parser = Parser(__doc__, seconds=0.5, rounds=1, problems=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each short run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--problems", type=int, default=len(PROBLEMS), help="how many of them")
    options = parser.parse_args()
    names = list(PROBLEMS)[-options.problems :] if not options.small else [list(PROBLEMS)[2]]
    print("| problem | change | img/s before | predicted | measured | error of the speed | error of the saving |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        found = [applied(PROBLEMS[name], options.seconds) for _ in range(options.rounds)]
        print(row(name, [each for each in found if each]), flush=True)
    cores = f"{os.cpu_count()} cores, {os.getloadavg()[0]:.1f} processes waiting for them at the end"
    print(f"\n{options.rounds} rounds, medians; {options.seconds:g} s for each short run; {cores}.")
    return 0


def applied(settings: tuple[str, ...], seconds: float) -> dict[str, Any] | None:
    """What `--apply` reports."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "drumline", "why", "--measure", "--apply", f"--seconds={seconds}"]
            + [*BASE, *settings],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        result: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])["applied"]
    return result


def row(name: str, found: list[dict[str, Any]]) -> str:
    if not found:
        return f"| {name} | nothing to apply | | | | | |"

    def median(key: str) -> float:
        return statistics.median(each[key] for each in found)

    flags = ", ".join(sorted({each["flag"] for each in found}))
    off = statistics.median(each["predicted_saving"] / each["measured_saving"] - 1 for each in found)
    speeds = " | ".join(f"{median(key):,.0f}" for key in ("before", "predicted", "measured"))
    return f"| {name} | `{flags}` | {speeds} | {median('error'):+.0%} | {off:+.0%} |"


if __name__ == "__main__":
    sys.exit(main())
