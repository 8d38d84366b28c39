"""Reads the rank from the variables of every kind of launcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from drumline.core.environment import (
    LAUNCHER,
    RankInfo,
    first_host,
    read_rank_info,
    slurm_port,
    tasks_on_node,
    thread_defaults,
    threads_asked,
    to_env,
)
from drumline.core.errors import UserError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "node[01-03,07],gpu5",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_ID": "1234567",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_a_process_that_no_launcher_started_has_no_rank() -> None:
    assert read_rank_info({}) is None
    assert read_rank_info({"MASTER_ADDR": "10.0.0.1", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) is None


def test_torchrun_and_our_launcher_are_distinguished() -> None:
    expected = RankInfo(5, 8, 1, 4, 1, "10.0.0.1", 29500, "torchrun")
    assert read_rank_info(TORCHRUN) == expected
    ours = read_rank_info(TORCHRUN | {"DRUMLINE_LAUNCHER": "77"})
    assert ours is not None
    assert ours.started_by == "drumline"


def test_torchrun_inside_a_slurm_job_is_torchrun() -> None:
    info = read_rank_info(SRUN | TORCHRUN)
    assert info is not None
    assert (info.started_by, info.rank) == ("torchrun", 5)


def test_four_variables_by_hand_are_enough() -> None:
    assert read_rank_info(BY_HAND) == RankInfo(1, 2, 0, 1, 1, "10.0.0.1", 29500, "env")
    assert read_rank_info(BY_HAND | {"MASTER_ADDR": "localhost"}) == RankInfo(
        1, 2, 1, 2, 0, "localhost", 29500, "env"
    )
    several = BY_HAND | {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    assert read_rank_info(several) == RankInfo(6, 8, 2, 4, 1, "10.0.0.1", 29500, "env")


def test_srun_tasks_find_their_rank_and_the_first_host() -> None:
    expected_port = 10000 + (31 * 1234567) % 20000
    assert read_rank_info(SRUN) == RankInfo(5, 7, 1, 2, 2, "node01", expected_port, "slurm")
    chosen = read_rank_info(SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1500"})
    assert chosen is not None
    assert (chosen.master_addr, chosen.master_port) == ("head", 1500)


def test_an_srun_step_uses_its_own_tasks_and_hosts_not_the_jobs() -> None:
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "gpu5",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_ID": "3",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "0",
    }
    expected_port = 10000 + (31 * 1234567 + 3) % 20000
    assert read_rank_info(SRUN | step) == RankInfo(1, 2, 1, 2, 0, "gpu5", expected_port, "slurm")


def test_a_single_slurm_task_and_a_batch_script_are_alone() -> None:
    assert read_rank_info(SRUN | {"SLURM_NTASKS": "1"}) is None
    batch = SRUN | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}
    assert read_rank_info(batch) is None
    assert read_rank_info(batch | {"SLURM_STEP_ID": "0"}) is not None


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_set_of_variables_names_the_missing_one(missing: str) -> None:
    env = {key: value for key, value in BY_HAND.items() if key != missing}
    with pytest.raises(UserError, match=f"{missing} is not set"):
        read_rank_info(env)


@pytest.mark.parametrize("missing", ["SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID"])
def test_half_a_set_of_slurm_variables_names_the_missing_one(missing: str) -> None:
    env = {key: value for key, value in SRUN.items() if key != missing}
    with pytest.raises(UserError, match=f"{missing} is not set"):
        read_rank_info(env)


def test_impossible_values_are_rejected() -> None:
    with pytest.raises(UserError, match="RANK = 'one' is not a whole number"):
        read_rank_info(BY_HAND | {"RANK": "one"})
    with pytest.raises(UserError, match="RANK = 2 does not fit WORLD_SIZE = 2"):
        read_rank_info(BY_HAND | {"RANK": "2"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,07],gpu5", "node01"),
        ("gpu5,node[01-03]", "gpu5"),
        ("a[8,9]", "a8"),
        ("rack[2-3]n[007-009]-ib,b", "rack2n007-ib"),
        ("single", "single"),
        ("with-dash1", "with-dash1"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "node[1-3", "node]1", ",a"])
def test_an_unreadable_node_list_is_rejected(nodes: str) -> None:
    with pytest.raises(UserError, match="Slurm node list"):
        first_host(nodes)


def test_tasks_on_each_node_of_slurms_notation() -> None:
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    with pytest.raises(UserError, match="has no node 4"):
        tasks_on_node("2(x3),1", 4)


def test_slurm_ports_stay_below_the_kernels_range_and_differ_between_neighbours() -> None:
    ports = [slurm_port(job, step) for job in range(5000, 5100) for step in range(4)]
    assert all(10000 <= port < 30000 for port in ports)
    assert len(set(ports)) == len(ports)


def test_what_is_written_is_read_back() -> None:
    info = RankInfo(5, 8, 1, 4, 1, "10.0.0.1", 29500, "env")
    assert read_rank_info(to_env(info)) == info


def test_waiting_threads_give_up_their_core_unless_the_user_chose() -> None:
    assert thread_defaults({}) == {"OMP_WAIT_POLICY": "passive"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert thread_defaults({name: "1"}) == {}


def test_threads_set_by_the_user_are_distinguished_from_those_set_by_torchrun() -> None:
    assert threads_asked({}) == 0
    assert threads_asked({"OMP_NUM_THREADS": "3"}) == 3
    assert threads_asked({"OMP_NUM_THREADS": "4,2"}) == 4
    assert threads_asked({"OMP_NUM_THREADS": "many"}) == 0
    elastic = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert threads_asked(elastic) == 0
    assert threads_asked({**elastic, "OMP_NUM_THREADS": "2"}) == 2
    assert threads_asked({**elastic, LAUNCHER: "17"}) == 1


def test_the_command_sets_what_threads_do_before_torch_is_loaded() -> None:
    code = (
        "import os, sys; from drumline.cli import main; assert 'torch' not in sys.modules; main(['--version']); "
        "assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    kept = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split()[-1] == "passive"
