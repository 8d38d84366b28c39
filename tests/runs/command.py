"""Runs the command `drumline` in new processes."""

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
"""58 steps on the embedded digits: a few seconds. 48 is divisible by 1, 2, 3 and 4."""

LOADED = (
    *TINY,
    "data.source=folder",
    "data.path=photos",
    "data.size=16",
    "data.batch=12",
    "data.pool=processes",
    "data.workers=1",
)
"""5 steps per epoch on the image files of `build_damaged_set`, with a loader process per trainer."""


def environment(**extra: str) -> dict[str, str]:
    """The environment of the tests, without a launcher's variables."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in drop and "SLURM" not in name}
    return kept | {"PYTHONUNBUFFERED": "1"} | extra


def drumline(*words: str, folder: Path, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in a fork of a process that has imported torch."""
    return warm.run([sys.executable, "-m", "drumline", *words], folder, environment(**env), timeout)


def completed(
    command: Sequence[str], folder: Path, timeout: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs any command to its end."""
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
    """Starts a command in a new interpreter and does not wait."""
    return subprocess.Popen(
        [sys.executable, "-m", "drumline", *words],
        cwd=folder,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(ready: Callable[[], bool], run: subprocess.Popen[str]) -> None:
    """Waits for a condition. Fails if the run ends first."""
    deadline = time.monotonic() + 120
    while not ready():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def still_running(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """The processes that are alive after `seconds`; zombies do not count."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [process for process in alive if not _is_zombie(process)]


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def kill_when(ready: Callable[[], bool], run: subprocess.Popen[str], then: float = 0.0) -> None:
    """Kills every process of a run as soon as it is `ready`, or `then` seconds later."""
    family = psutil.Process(run.pid)
    wait_until(ready, run)
    time.sleep(then)
    for process in [*family.children(recursive=True), family]:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    run.communicate()


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON on the last line of stdout of a successful command."""
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def train(folder: Path, name: str, *words: str, recipe: Sequence[str] = TINY) -> dict[str, Any]:
    """Trains a run to its end. Returns its result."""
    return result(drumline("train", *recipe, f"run.name={name}", *words, folder=folder))


def sha256(folder: Path, name: str) -> str:
    """The hash that `drumline verify` prints for a run."""
    done = drumline("verify", f"runs/{name}", folder=folder)
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("state sha256: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("state sha256: ")


def metrics(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics.jsonl."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]
