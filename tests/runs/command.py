"""Runs `drumline` as a user types it, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests import warm

TINY = (
    "data.source=digits",
    "data.batch=48",
    "model.name=resnet8",
    "train.epochs=2",
    "parallel.threads=1",
    "checkpoint.every_steps=7",
)
"""58 steps on the embedded digits: a few seconds. 48 is divided by 1, 2, 3 and 4 processes."""

LOADED = (
    *TINY,
    "data.source=folder",
    "data.path=photos",
    "data.size=16",
    "data.batch=12",
    "data.pool=processes",
    "data.workers=1",
)
"""5 steps an epoch on the image files of `build_damaged_set`, with a loader process for each trainer."""


def environment(**extra: str) -> dict[str, str]:
    """Ours, without a launcher's variables."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in drop and "SLURM" not in name}
    return kept | {"PYTHONUNBUFFERED": "1"} | extra


def drumline(*words: str, folder: Path, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs to the end, in a fork of a process that has torch imported."""
    return warm.run([sys.executable, "-m", "drumline", *words], folder, environment(**env), timeout)


def completed(
    command: Sequence[str], folder: Path, timeout: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    """Any command, in a clean environment."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def begin(*words: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    """Starts and does not wait."""
    return subprocess.Popen(
        [sys.executable, "-m", "drumline", *words],
        cwd=folder,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_when(ready: Callable[[], bool], run: subprocess.Popen[str], then: float = 0.0) -> None:
    """Every process of a run gets SIGKILL as soon as it is `ready`, or so many seconds later."""
    family = psutil.Process(run.pid)
    deadline = time.monotonic() + 120
    while not ready():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(then)
    for process in [*family.children(recursive=True), family]:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    run.communicate()


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON on the last line of stdout of a command that went well."""
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def train(folder: Path, name: str, *words: str, recipe: Sequence[str] = TINY) -> dict[str, Any]:
    """A whole run."""
    return result(drumline("train", *recipe, f"run.name={name}", *words, folder=folder))


def sha256(folder: Path, name: str) -> str:
    """What `drumline verify` says of a run."""
    done = drumline("verify", f"runs/{name}", folder=folder)
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("state sha256: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("state sha256: ")


def metrics(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics.jsonl."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]
