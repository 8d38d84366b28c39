"""How well `drumline why --measure --apply` predicts what a change saves, on planted problems.

    python benchmarks/why_apply.py
    python benchmarks/why_apply.py --small      # one problem, very short runs: a check that the script works

Each problem is a sleep, so its cost is known: a transform in the training process, slow files,
evaluations, an optimizer whose update takes as long for a small batch as for a large one, and weights that take long
to collect. `why` finds the problem, names a setting, predicts the speed, and measures the speed with the setting.
Prints a markdown table. The error of the saving compares the predicted with the measured fraction of the time.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import torch.nn.functional as F

from harness import Parser

BASE = ("data.source=digits", "data.batch=32", "model.name=why_apply:small", "optim.lr=0")
"""Nothing is learned, so that no evaluation is followed by the save of a new best."""
FILES = ("data.source=why_apply:far_files", "data.size=16", "data.pool=threads", "data.workers=1")
STEADY = "train.loss=why_apply:steady_loss"
PROBLEMS: dict[str, tuple[str, ...]] = {
    "a slow transform in the step's process": (STEADY, "data.transform=why_apply:slow_transform"),
    "files that arrive late, one worker": (STEADY, *FILES),
    "slow evaluations, twice an epoch": (STEADY, "train.eval_every=0.5"),
    "an update that a small batch does not shorten": ("optim.name=why_apply:SlowUpdate", "data.batch=8"),
    "a checkpoint every second step": (
        STEADY,
        "model.name=why_apply:slow_to_save",
        "checkpoint.every_steps=2",
    ),
}
SIDE = 8
STEP_S, TRANSFORM_S, FILE_S, UPDATE_S, EVALUATION_S, SAVE_S = 0.02, 0.003, 0.003, 0.06, 0.3, 0.05


class FarFiles:
    """One image many times, which arrives late."""

    classes = ("a", "b")

    def __init__(self, count: int) -> None:
        stream = io.BytesIO()
        Image.new("RGB", (16, 16)).save(stream, "JPEG")
        self.image, self.labels = stream.getvalue(), np.arange(count) % 2

    def read(self, sample: int) -> bytes:
        time.sleep(FILE_S)
        return self.image


def far_files(path: str, split: str) -> FarFiles:
    return FarFiles(4096 if split == "train" else 2)


class Small(nn.Module):
    """A step that takes a millisecond. Each batch of an evaluation takes longer by a fixed time."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.hidden = nn.Linear(SIDE**2, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            time.sleep(EVALUATION_S)
        return self.head(F.relu(self.hidden(F.interpolate(x, (SIDE, SIDE)).mean(1).flatten(1))))


def small(classes: int) -> nn.Module:
    return Small(classes)


class SlowToSave(Small):
    """Takes a while to collect its weights, as one that is spread over devices."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        time.sleep(SAVE_S)
        return super().state_dict(*args, **named)


def slow_to_save(classes: int) -> nn.Module:
    return SlowToSave(classes)


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
    parser = Parser(__doc__, seconds=0.5, rounds=1, only="update")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each short run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="those whose name contains this")
    options = parser.parse_args()
    names = [name for name in PROBLEMS if options.only in name]
    print(
        "| problem | change | img/s before | predicted | measured | error of the speed | error of the saving |"
    )
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
        options = ("--measure", "--apply", f"--seconds={seconds}", "parallel.threads=1", "run.device=cpu")
        done = subprocess.run(
            [sys.executable, "-m", "drumline", "why", *options, *BASE, *settings],
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
