"""A run over two machines, as two network namespaces that know each other by address only."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.hosts import Host, why_not
from tests.launch.job import is_running

HERE = Path(__file__).parent
PORT = 29511

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def start(host: Host, folder: Path, mode: list[str], parallel: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "job.py"), str(folder), *mode]
    request = {"command": command, "processes": 1, "parallel": {"nodes": 2, "timeout": 60.0, **parallel}}
    return subprocess.Popen(
        [*host.prefix, sys.executable, str(HERE / "launcher_process.py"), json.dumps(request)],
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*launchers: subprocess.Popen[str]) -> list[str]:
    try:
        return [launcher.communicate(timeout=90)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()


@pytest.mark.parametrize("how", ["address", "numbered", "file"])
def test_workers_on_two_hosts_reduce_a_sum(hosts: tuple[Host, Host], tmp_path: Path, how: str) -> None:
    # torch numbers machines by address; numbered by the user, the second host is machine 0 and has the store.
    order = hosts[::-1] if how == "numbered" else hosts
    place = f"file://{tmp_path}/meet" if how == "file" else f"{order[0].address}:{PORT}"
    launchers = []
    for number in (1, 0):  # the one that has to wait for the store comes first
        parallel: dict[str, Any] = {"rendezvous": place}
        if how == "numbered":
            parallel["node_rank"] = number
        launchers.append(start(order[number], tmp_path, ["sums"], parallel))
    outputs = finish(*launchers)
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    for rank, host in enumerate(order):
        facts = json.loads((tmp_path / f"report-{rank}").read_text())
        assert facts["sum"] == 3.0
        assert facts["env"]["GLOO_SOCKET_IFNAME"] == host.interface
        assert facts["env"]["NCCL_SOCKET_IFNAME"] == f"={host.interface}"
        assert facts["rank_info"]["master_addr"] == order[0].address
        assert (facts["rank_info"]["node_rank"], facts["rank_info"]["local_rank"]) == (rank, 0)
        assert host.address in facts["addresses"]
        assert outputs[1 - rank].splitlines() == [
            f"1 process here, network interface {host.interface} ({host.address})",
            f"waiting for 2 machines at {place}",
            f"machine {rank} of 2: starting ranks {rank} to {rank} of 2",
        ]
    assert not (tmp_path / "meet").exists()


def test_a_failure_on_one_host_ends_both_and_is_shown_on_both(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    # The host that fails has the store: it must not leave before the other has read why.
    parallel = {"rendezvous": f"{hosts[1].address}:{PORT}"}
    launchers = [start(host, tmp_path, ["sums", "fail"], parallel) for host in hosts]
    begin = time.monotonic()
    outputs = finish(*launchers)
    assert time.monotonic() - begin < 45
    assert [launcher.returncode for launcher in launchers] == [1, 1]
    for output in outputs:
        assert f"rank 1 on {socket.gethostname()} ({hosts[1].address}) failed:" in output
        assert output.rstrip().endswith("RuntimeError: the other machine has a cat too")
        assert output.count("Traceback") == 1
    for rank in range(2):
        assert not is_running(int((tmp_path / f"pid-{rank}").read_text()))


def test_a_host_that_vanishes_ends_the_other(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    parallel = {"rendezvous": f"{hosts[0].address}:{PORT}"}
    launchers = [start(host, tmp_path, ["deaf"], parallel) for host in hosts]
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    launchers[0].kill()
    output = finish(launchers[1])[0]
    assert launchers[1].returncode == 1
    assert re.search(
        rf"lost contact with the rendezvous at {hosts[0].address}:{PORT} for \d+ s$", output.rstrip()
    )
    for name in ("pid-0", "pid-0-loader", "pid-1", "pid-1-loader"):
        assert not is_running(int((tmp_path / name).read_text())), name
