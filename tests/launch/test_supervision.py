"""Lost and hung workers are detected and restarted, with real processes that start quickly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from typing import Any

import pytest

from drumline.config.recipe import Launch
from drumline.launch.network import free_port
from tests.launch.job import wait_for
from tests.launch.launches import Run

pytestmark = pytest.mark.slow


def test_a_killed_rank_is_noticed_within_a_second_and_all_start_again(run: Run) -> None:
    assert run.launch("lost", "2", "kill", processes=3, supervision=Launch(restarts=2)) == 0
    assert len(run.lines) == 2, run.lines
    for number, line in enumerate(run.lines, 1):
        found = re.fullmatch(
            r"rank 1: killed by SIGKILL \(out of memory\? .*\); "
            rf"noticed within (\d\.\d\d) s; restart {number} of 2"
            + " in 1 s"
            * (number - 1),  # the first restart is immediate, the others come at growing intervals
            line,
        )
        assert found, line
        assert float(found[1]) < 1
    assert [run.report(rank)["start"] for rank in range(3)] == [2] * 3
    # The others ignore SIGTERM, and the launcher does not wait for them: torch's own would, 30 s at each restart.
    starts = [float((run.folder / f"start-{start}-0").read_text()) for start in range(3)]
    assert starts[2] - starts[0] < 20
    assert run.survivors(1) == []


@pytest.mark.parametrize("restarts", [0, 1])
def test_processes_that_a_lost_worker_started_are_killed_too(run: Run, restarts: int) -> None:
    assert run.launch("lost", "1", "kill", supervision=Launch(restarts=restarts)) == 1 - restarts
    assert (run.folder / "pid-1-child-0").exists()
    assert run.survivors(1) == []


def test_an_error_is_shown_and_restarted(run: Run) -> None:
    assert run.launch("lost", "1", "raise", supervision=Launch(restarts=1)) == 0
    assert len(run.lines) == 2
    assert run.lines[0].startswith("rank 1 failed:\nTraceback")
    assert run.lines[1].startswith("rank 1 failed (RuntimeError: the cat is back); noticed within")
    assert run.lines[1].endswith("restart 1 of 1")


def test_when_restarts_are_used_up_the_run_ends_with_the_cause(run: Run) -> None:
    assert run.launch("lost", "9", "kill", supervision=Launch(restarts=2)) == 1
    assert run.lines[-2].startswith("rank 1: killed by SIGKILL (out of memory?")
    assert run.lines[-1] == "all 2 restarts of launch.restarts are used up"
    assert [line for line in run.lines if "restart 3" in line] == []
    assert run.survivors() == []


def test_a_users_mistake_is_not_restarted(run: Run) -> None:
    assert run.launch("mistake", supervision=Launch(restarts=5)) == 2
    assert len(run.lines) == 1
    assert "restart" not in run.lines[0]


@pytest.mark.parametrize("how", ["stop", "sleep"])
def test_a_hung_rank_is_found_its_stack_printed_and_all_start_again(run: Run, how: str) -> None:
    assert run.launch("hung", how, processes=3, supervision=Launch(restarts=1, hang=1.0), timeout=30.0) == 0
    blocks = {f"rank {rank}": run.lines[rank] for rank in range(3)}
    assert all(line.startswith(f"{name}: stepping, ") for name, line in blocks.items()), run.lines
    assert "6 steps done" in blocks["rank 0"]
    assert "tests/launch/job.py" in blocks["rank 0"]
    assert all(len(block.splitlines()) <= 41 for block in blocks.values())
    if how == "stop":
        assert blocks["rank 1"].endswith("stopped by SIGSTOP or a debugger, so its stack cannot be read")
        why = "it is stopped by SIGSTOP or a debugger"
    else:
        assert "in dream_of_sheep" in blocks["rank 1"].splitlines()[2]
        why = "it has taken the fewest steps, 5"
    assert re.fullmatch(rf"rank 1: hung: no progress for [12]\.\d s; {why}; restart 1 of 1", run.lines[3])
    assert run.survivors() == []


def test_a_hung_rank_ends_a_run_without_restarts(run: Run) -> None:
    assert run.launch("hung", "stop", supervision=Launch(hang=1.0), timeout=30.0) == 1
    assert run.lines[-1].startswith("rank 1: hung: no progress for")
    assert run.survivors() == []


def test_a_rank_that_hangs_does_not_hold_up_a_stop(run: Run) -> None:
    launcher = run.launcher("hung", "stop", "deaf", ready=2, supervision={"hang": 1.0, "restarts": 3})
    os.kill(launcher.pid, signal.SIGTERM)
    _, said = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    assert "SIGTERM: the processes finish their step" in said
    assert "rank 1: hung: no progress for" in said
    assert "restart 1" not in said
    assert run.survivors(1) == []


def test_without_a_limit_no_process_counts_as_hung(run: Run) -> None:
    launcher = run.launcher("hung", "stop", supervision={"hang": 0.0}, parallel={"timeout": 1.0})
    time.sleep(2.0)
    assert launcher.poll() is None
    launcher.kill()
    launcher.communicate(timeout=5)
    assert run.survivors(1) == []


def test_ctrl_c_during_a_restart_leaves_nothing(run: Run) -> None:
    launcher = run.launcher("lost", "1", "kill", "600", ready=1, supervision={"restarts": 9})
    wait_for(run.folder / "start-1-1")
    os.kill(launcher.pid, signal.SIGINT)
    launcher.communicate(timeout=10)
    assert launcher.returncode == 130
    assert run.survivors(1) == []


@pytest.mark.parametrize("at", ["tcp", "file"])
def test_the_other_machine_restarts_too(run: Run, at: str) -> None:
    launchers = two_machines(run, "lost", "1", "kill", at=at, restarts=1)
    outputs = finish(launchers)
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert all("rank 1 on" in output and "restart 1 of 1" in output for output in outputs), outputs
    reports = [run.report(rank) for rank in range(2)]
    assert [report["start"] for report in reports] == [1] * 2
    assert reports[0]["launch"] == reports[1]["launch"]  # the id of the launch, and which start this is
    assert re.fullmatch("[0-9a-f]{32}", reports[0]["launch"][0])
    assert reports[0]["launch"][1] == "1"
    assert run.survivors(1) == []


def test_numbered_machines_restart_too(run: Run) -> None:
    outputs = finish(two_machines(run, "lost", "1", "raise", at="numbered", restarts=1))
    assert all("restart 1 of 1" in output for output in outputs), outputs
    assert [run.report(rank)["start"] for rank in range(2)] == [1] * 2


@pytest.mark.parametrize("at", ["tcp", "file"])
def test_the_remaining_machine_continues_alone_where_that_is_allowed(run: Run, at: str) -> None:
    launchers = two_machines(run, "until_alone", at=at, restarts=1, min_nodes=1)
    for rank in range(2):
        assert wait_for(run.folder / f"ready-{rank}")
    # The second launcher does not host the rendezvous; it ends without a message, together with its worker.
    launchers[1].kill()
    output = finish(launchers[:1])[0]
    assert launchers[0].returncode == 0, output
    assert re.search(
        r"machine 1, .+: lost: no message from its launcher for \d+ s; restart 1 of 1", output
    ), output
    assert "machine 0 of 1: starting ranks 0 to 0 of 1" in output
    assert (run.folder / "alone").read_text() == "1"
    assert run.survivors(1) == []


def test_a_machine_that_comes_back_joins_at_the_next_restart(run: Run) -> None:
    launchers = two_machines(run, "until_alone", at="tcp", restarts=3, min_nodes=1)
    for rank in range(2):
        assert wait_for(run.folder / f"ready-{rank}")
        (run.folder / f"ready-{rank}").unlink()
    assert isinstance(launchers[0].args, list)
    late = subprocess.Popen(launchers[0].args, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        time.sleep(2.5)  # until it has found the run complete
        launchers[1].kill()
        assert all(wait_for(run.folder / f"ready-{rank}") for rank in range(2))
    finally:
        for process in (*launchers, late):
            process.kill()
    outputs = finish([*launchers, late])
    assert "the run is under way without this machine: it joins at the next restart" in outputs[2]
    assert "of 2: starting ranks" in outputs[2]
    assert run.survivors(1) == []


def test_nothing_of_a_run_listens_on_all_interfaces(run: Run) -> None:
    assert run.launch("listens") == 0
    for rank in range(2):
        assert run.report(rank)["addresses"] == ["127.0.0.1"]


def two_machines(run: Run, *mode: str, at: str, **supervision: Any) -> list[subprocess.Popen[str]]:
    """Two launchers with one worker each; the first to be started hosts the rendezvous and is machine 0."""
    place = f"file://{run.folder}/meet" if at == "file" else f"127.0.0.1:{free_port('127.0.0.1')}"
    launchers = []
    for number in range(2):
        parallel = {"nodes": 2, "rendezvous": place, "timeout": 60.0}
        if at == "numbered":
            parallel["node_rank"] = number
        launchers.append(
            run.launcher(*mode, processes=1, ready=0, parallel=parallel, supervision=supervision, hurry=True)
        )
        assert launchers[-1].stderr is not None
        assert "network interface" in launchers[-1].stderr.readline()
        time.sleep(0.3)
    return launchers


def finish(launchers: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [launcher.communicate(timeout=60)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
