"""The same worker program under other launchers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.launch.network import free_port

JOB = str(Path(__file__).parent / "job.py")

pytestmark = pytest.mark.slow


def _finish(commands: list[list[str]], environments: list[dict[str, str]]) -> None:
    processes = [
        subprocess.Popen(command, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | extra)
        for command, extra in zip(commands, environments, strict=True)
    ]
    try:
        assert [process.wait(timeout=60) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()


def _check(folder: Path, started_by: str) -> None:
    for rank in range(2):
        facts = json.loads((folder / f"report-{rank}").read_text())
        assert facts["sum"] == 3.0
        assert (facts["rank_info"]["started_by"], facts["rank_info"]["local_rank"]) == (started_by, rank)


def test_torchrun_starts_workers_that_find_each_other(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    _finish([[*torchrun, JOB, str(tmp_path), "sums"]], [{"OMP_NUM_THREADS": "1"}])
    _check(tmp_path, "torchrun")


def test_variables_by_hand_start_workers_that_find_each_other(tmp_path: Path) -> None:
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    command = [sys.executable, JOB, str(tmp_path), "sums"]
    _finish([command, command], [meet | {"RANK": str(rank)} for rank in range(2)])
    _check(tmp_path, "env")


def test_srun_starts_workers_that_find_each_other(tmp_path: Path) -> None:
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    command = [sys.executable, JOB, str(tmp_path), "sums"]
    tasks = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    _finish([command, command], tasks)
    _check(tmp_path, "slurm")
