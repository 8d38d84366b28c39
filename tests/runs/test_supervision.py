"""A run that loses its processes one after the other and restarts by itself."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from drumline.core.heartbeat import SLOT, VARIABLE, Phase
from tests.data.damage import build_damaged_set
from tests.runs.command import LOADED, TINY, begin, metrics, sha256, still_running, train, wait_until

pytestmark = pytest.mark.slow

LONG = (*LOADED, "train.epochs=10", "train.eval_every=0")
"""50 steps."""


@dataclass(frozen=True)
class LostProcesses:
    """A finished run that lost rank 0 and a loader process, and whose rank 1 was stopped."""

    folder: Path
    code: int
    result: dict[str, Any]
    said: str
    left: list[psutil.Process]
    hang_seconds: float


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> LostProcesses:
    folder = tmp_path_factory.mktemp("lost")
    build_damaged_set(folder / "photos", kinds=())
    words = ("parallel.processes=2", "launch.restarts=3", "launch.hang=3")  # resume=never, a name of its own
    run = begin("train", *LONG, *words, folder=folder)
    seen: list[psutil.Process] = []
    hang_seconds = 0.0
    try:
        for act in (kill_rank(0), kill_loader, stop_rank(1)):
            wait_for_step(folder, newest(folder) + 7, run)
            seen += psutil.Process(run.pid).children(recursive=True)
            begun, trainers = time.monotonic(), list(workers(run).values())
            act(run)
            _, left = psutil.wait_procs(trainers, timeout=20)
            assert left == []
            hang_seconds = time.monotonic() - begun  # in the end, those of stop_rank
        out, said = run.communicate(timeout=120)
    finally:
        run.kill()
    left = still_running(seen, 1)
    result = json.loads(out.splitlines()[-1]) if out else {}
    return LostProcesses(folder, run.returncode, result, said, left, hang_seconds)


def test_a_stop_signal_after_the_result_does_not_change_the_exit_code(tmp_path: Path) -> None:
    run = begin("train", *TINY, "train.steps=2", "launch.restarts=1", folder=tmp_path)
    try:
        assert run.stdout is not None
        assert json.loads(run.stdout.readline())["finished"]
        run.terminate()
        _, said = run.communicate(timeout=30)
    finally:
        run.kill()
    assert run.returncode == 0, said


def test_a_run_that_loses_processes_restarts_and_ends_with_the_same_bits(lost: LostProcesses) -> None:
    assert lost.code == 0, lost.said
    assert lost.result["finished"]
    assert [path.name for path in (lost.folder / "runs").iterdir()] == ["photos-resnet8-1"]
    train(lost.folder, "reference", "parallel.processes=2", recipe=LONG)
    assert sha256(lost.folder, "photos-resnet8-1") == sha256(lost.folder, "reference")
    steps = [line["step"] for line in metrics(lost.folder, "photos-resnet8-1", "train")]
    assert steps == [line["step"] for line in metrics(lost.folder, "reference", "train")]


def test_each_restart_reports_the_lost_rank_and_when_training_continues(lost: LostProcesses) -> None:
    lines = [line for line in lost.said.splitlines() if "restart " in line]
    assert len(lines) == 3, lost.said
    for number, line in enumerate(lines, 1):
        assert line.endswith(f"; restart {number} of 3")
    found = re.match(
        r"rank 0: killed by SIGKILL \(out of memory\? .*\); noticed within (\d\.\d\d) s", lines[0]
    )
    assert found, lines[0]
    assert float(found[1]) < 1
    assert "rank 1: a loader process was killed" in lines[1]
    assert re.match(
        r"rank 1: hung: no progress for [345]\.\d s; it is stopped by SIGSTOP or a debugger", lines[2]
    )
    again = re.findall(r"training again: step \d+ finished \d+\.\d s after rank \d was lost", lost.said)
    assert len(again) == 3, lost.said
    assert lost.said.count("resumed from runs/photos-resnet8-1/checkpoints/step-") == 3


def test_the_run_log_has_the_failures_and_restarts(lost: LostProcesses) -> None:
    log = (lost.folder / "runs/photos-resnet8-1/log.txt").read_text()
    entries = [line.partition("  ")[2] for line in log.splitlines() if line[0].isdigit()]
    ends = [text for text in entries if text.startswith(("started: drumline train ", "failed: "))]
    assert [text.partition(":")[0] for text in ends] == ["started", "failed"] * 3 + ["started"]
    for number, text in enumerate(ends[1::2], 1):
        assert text.startswith("failed: rank ")
        assert text.endswith(f"; restart {number} of 3")
    assert "launcher: rank 1: stepping" in log
    assert len([text for text in entries if text.startswith("launcher: training again: step ")]) == 3
    assert entries[-1].startswith("finished: top-1 ")
    assert "was killed (kill -9" not in log


def test_a_stopped_rank_is_noticed_in_time_and_the_stacks_of_the_others_are_printed(
    lost: LostProcesses,
) -> None:
    assert lost.hang_seconds < 3 + 3
    block = lost.said[lost.said.index("rank 0: stepping, ") :]
    assert "drumline/training/loop.py" in block[: block.index("rank 1: ")]
    assert "rank 1: stepping" in block
    assert "stopped by SIGSTOP or a debugger, so its stack cannot be read" in block


def test_a_restart_gives_no_warning_about_unchanged_settings(lost: LostProcesses) -> None:
    assert "may differ" not in lost.said
    not_learning = (
        r"the model is not learning|after only \d+ steps, top-1 \([\d.]+%\) is no better than always"
    )
    known = rf"with data\.batch = 12, one of 2 processes|{not_learning}"
    assert re.findall(rf"WARNING: (?!{known}).*", lost.said) == []
    assert "Traceback" not in lost.said


def test_a_run_with_many_restarts_leaves_no_process_behind(lost: LostProcesses) -> None:
    assert lost.left == []


@pytest.mark.parametrize("restarts", [0, 1])
def test_no_process_outlives_a_killed_run_by_a_second(restarts: int, tmp_path: Path) -> None:
    build_damaged_set(tmp_path / "photos", kinds=())
    words = ("run.name=x", "train.epochs=500", f"launch.restarts={restarts}")
    run = begin("train", *LONG, *words, folder=tmp_path)
    try:
        wait_for_step(tmp_path, 7, run)
        family = psutil.Process(run.pid).children(recursive=True)
        # A loader, the server that forked it, and the trainer where a launcher has started it.
        assert len(family) >= 2 + restarts
    finally:
        run.kill()
    assert still_running(family, 1) == []
    run.communicate()


Act = Callable[[subprocess.Popen[str]], None]


def kill_rank(rank: int) -> Act:
    return lambda run: workers(run)[rank].kill()


def stop_rank(rank: int) -> Act:
    """In the middle of a step: it may just be saving."""

    def stop(run: subprocess.Popen[str]) -> None:
        process = workers(run)[rank]
        path, _, slot = process.environ()[VARIABLE].rpartition(":")
        while True:
            process.suspend()
            while process.status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
            _, _, phase = struct.unpack_from("=3q", Path(path).read_bytes(), int(slot) * SLOT)
            if phase == Phase.STEPPING:
                return
            process.resume()
            time.sleep(0.005)

    return stop


def kill_loader(run: subprocess.Popen[str]) -> None:
    """The loader of rank 1: the process that its fork server has forked."""
    server = next(child for child in workers(run)[1].children() if "forkserver" in " ".join(child.cmdline()))
    server.children()[0].kill()


def workers(run: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The trainers that a launcher has started, by rank."""
    return {int(child.environ()["RANK"]): child for child in psutil.Process(run.pid).children()}


def newest(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("runs/*/checkpoints/step-*[0-9]")), default=0)


def wait_for_step(folder: Path, step: int, run: subprocess.Popen[str]) -> None:
    """Until there is a checkpoint of this step or a later one."""
    wait_until(lambda: newest(folder) >= step, run)
