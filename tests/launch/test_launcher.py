"""The launcher's promises, each with real processes. Workers without torch start quickly."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drumline.core.errors import UserError
from drumline.launch.network import free_port
from tests.launch.launches import Run, hello

pytestmark = pytest.mark.slow


def test_workers_get_arguments_environment_and_the_socket_of_the_store_and_nothing_else(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        odd = ["a b", "$$HOME ${local_rank} $local_rank", "ü"]
        assert run.launch("report", *odd) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for rank in range(2):
        facts = run.report(rank)
        assert facts["argv"] == odd
        store = {facts["env"]["DRUMLINE_STORE"]} if rank == 0 else set()
        assert set(facts["descriptors"]) - {"0", "1", "2"} == store, facts["descriptors"]
        assert facts["limits"][0] == min(hard, 65536)
        assert facts["env"]["OMP_NUM_THREADS"] == "3"
        assert facts["env"]["GLOO_SOCKET_IFNAME"] == "lo"
        place = facts["rank_info"]
        assert (place["rank"], place["world_size"], place["local_rank"], place["local_size"]) == (
            rank,
            2,
            rank,
            2,
        )
        assert (place["started_by"], place["master_addr"], place["node_rank"]) == ("drumline", "127.0.0.1", 0)
    assert dict(os.environ) == before
    assert run.survivors() == []


def test_a_launcher_starts_workers_without_importing_torch(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "from drumline.cli import main\n"
        "import drumline.launch.launcher, drumline.launch.workers as workers\n"
        "workers.Popen = lambda command, **given: subprocess.Popen([sys.executable, '-c', ''], **given)\n"
        "code = main(['train', 'parallel.processes=2', 'train.steps=1', f'run.dir={sys.argv[1]}'])\n"
        "print(code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr


def test_threads_set_by_the_user_stay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run.launch("report", processes=1) == 0
    assert run.report(0)["env"]["OMP_NUM_THREADS"] == "5"


def test_workers_connect_over_loopback(run: Run) -> None:
    assert run.launch("sums", processes=2) == 0
    for rank in range(2):
        assert run.report(rank)["sum"] == 3.0
        assert run.report(rank)["addresses"] == ["127.0.0.1"]


def test_a_failing_rank_is_shown_once_and_the_others_are_stopped_within_seconds(run: Run) -> None:
    assert run.launch("raises", processes=3) == 1
    assert run.survivors() == []
    assert run.seconds < 10
    assert len(run.lines) == 1
    assert run.lines[0].startswith("rank 1 failed:\nTraceback")
    assert run.lines[0].endswith("RuntimeError: the cat is on the keyboard")


def test_a_users_mistake_on_every_rank_is_shown_once_without_a_traceback(run: Run) -> None:
    assert run.launch("mistake", processes=3) == 2
    assert len(run.lines) == 1
    assert "data.path = /nowhere does not exist\n  fix: give an existing folder" in run.lines[0]
    assert "Traceback" not in run.lines[0]
    assert run.survivors() == []


def test_a_killed_rank_is_reported_as_the_cause_although_others_report_errors(run: Run) -> None:
    assert run.launch("killed", processes=3) == 1
    assert len(run.lines) == 1
    assert run.lines[0].startswith("rank 1: killed by SIGKILL (out of memory?")
    assert run.survivors() == []


def test_an_exit_code_without_a_message_is_passed_on(run: Run) -> None:
    assert run.launch("mute", processes=2) == 7
    assert run.lines == ["rank 1: exit code 7 and no error message; see its output above"]
    assert run.survivors() == []


def test_torch_adds_no_lines_of_its_own_to_an_error(run: Run) -> None:
    launcher = run.launcher("raises", ready=1)
    output = launcher.communicate(timeout=30)[1]
    assert launcher.returncode == 1
    assert output.startswith(f"{hello(2)}\nrank 1 failed:\nTraceback"), output
    assert output.rstrip().endswith("RuntimeError: the cat is on the keyboard"), output
    assert "torch" not in output


@pytest.mark.parametrize(("number", "again"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_stop_request_reaches_each_worker_once_and_lets_it_save(run: Run, number: int, again: str) -> None:
    launcher = run.launcher("saves", "143")
    os.kill(launcher.pid, number)
    time.sleep(0.1)
    os.kill(launcher.pid, number)  # the same keystroke, passed on by a wrapper too
    output = launcher.communicate(timeout=30)[1]
    assert launcher.returncode == 128 + number
    assert [(run.folder / f"saved-{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert (
        output
        == f"{hello(2)}\n{again}: the processes finish their step, save and exit; {again} again kills them\n"
    )
    assert run.survivors() == []


def test_workers_that_finish_after_a_stop_request_finish_the_run(run: Run) -> None:
    launcher = run.launcher("saves", "0")
    os.kill(launcher.pid, signal.SIGTERM)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 0


def test_workers_that_a_signal_stopped_without_the_launcher_are_no_failure(run: Run) -> None:
    launcher = run.launcher("saves", "143")
    for rank in range(2):
        os.kill(int((run.folder / f"pid-{rank}").read_text()), signal.SIGTERM)
    assert launcher.communicate(timeout=30)[1] == f"{hello(2)}\n"
    assert launcher.returncode == 143


def test_a_rank_that_fails_to_save_is_shown_and_the_others_still_save(run: Run) -> None:
    launcher = run.launcher("saves_or_fails")
    os.kill(launcher.pid, signal.SIGTERM)
    output = launcher.communicate(timeout=30)[1]
    assert launcher.returncode == 1
    assert output.count("rank 1 failed:") == 1
    assert output.rstrip().endswith("RuntimeError: no space left for the checkpoint")
    assert (run.folder / "saved-0").read_text() == "1"
    assert run.survivors() == []


def test_a_second_request_kills_at_once(run: Run) -> None:
    launcher = run.launcher("deaf")
    os.kill(launcher.pid, signal.SIGINT)
    time.sleep(0.8)
    assert launcher.poll() is None
    begin = time.monotonic()
    os.kill(launcher.pid, signal.SIGINT)
    output = launcher.communicate(timeout=30)[1]
    assert time.monotonic() - begin < 5
    assert launcher.returncode == 137
    assert "second SIGINT: killing ranks 0 and 1 without saving" in output
    assert run.survivors(1) == []


def test_workers_that_do_not_leave_in_time_are_killed(run: Run) -> None:
    launcher = run.launcher("deaf", grace=1.0)
    os.kill(launcher.pid, signal.SIGTERM)
    output = launcher.communicate(timeout=30)[1]
    assert launcher.returncode == 137
    assert "still running after 1 s: killing ranks 0 and 1 without saving" in output
    assert run.survivors(1) == []


def test_no_worker_outlives_a_launcher_that_was_killed(run: Run) -> None:
    launcher = run.launcher("deaf")
    assert len(run.survivors(0)) == 4
    launcher.kill()
    launcher.communicate(timeout=5)
    assert run.survivors(5) == []


def test_a_worker_whose_launcher_is_gone_before_it_starts_dies() -> None:
    code = "from drumline.core.processes import die_with_parent; die_with_parent(); print('alive')"
    environment = os.environ | {"DRUMLINE_LAUNCHER": "1" if os.getpid() != 1 else "2"}
    orphan = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert orphan.returncode == -signal.SIGKILL
    assert orphan.stdout == b""
    alone = {key: value for key, value in environment.items() if key != "DRUMLINE_LAUNCHER"}
    assert subprocess.run([sys.executable, "-c", code], env=alone, capture_output=True, check=True).stdout


def test_a_rendezvous_elsewhere_needs_a_number_of_machines(run: Run) -> None:
    with pytest.raises(UserError, match=r"another machine, but parallel\.nodes is 1"):
        run.launch("report", rendezvous="192.0.2.7:29500")
    with pytest.raises(UserError, match=r"env://.*RANK and WORLD_SIZE are not set"):
        run.launch("report", rendezvous="env://")


def test_machines_that_do_not_connect_are_a_user_error_with_the_address(run: Run) -> None:
    with pytest.raises(
        UserError, match=r"2 machines did not connect to 127\.0\.0\.1:\d+ within 1 s"
    ) as caught:
        run.launch("report", nodes=2, rendezvous=f"127.0.0.1:{free_port('127.0.0.1')}", timeout=1.0)
    assert "--parallel.node_rank" in caught.value.fix


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_port_that_another_program_uses_is_reported(run: Run, nodes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match=f"uses the port of {place}") as caught:
            run.launch("report", nodes=nodes, node_rank=0, rendezvous=place, timeout=5.0)
    assert "a different port" in caught.value.fix


def test_a_file_at_the_path_of_the_rendezvous_folder_is_reported(run: Run) -> None:
    meeting = run.folder / "meet"
    meeting.write_text("left by something else")
    with pytest.raises(UserError, match="is a file") as caught:
        run.launch("report", processes=1, nodes=2, rendezvous=f"file://{meeting}")
    assert "delete it" in caught.value.fix


def test_two_launchers_on_one_machine_count_as_two(run: Run) -> None:
    codes, outputs = run.two_launchers("report")
    assert codes == [0, 0], outputs
    assert [run.report(rank)["rank_info"]["node_rank"] for rank in range(2)] == [0, 1]


def test_a_machine_that_is_done_still_reports_the_failure_of_another(run: Run) -> None:
    codes, outputs = run.two_launchers("late")
    assert codes == [1, 1]
    assert all(
        output.rstrip().endswith("RuntimeError: the last mile is the longest") for output in outputs
    ), outputs


@pytest.mark.parametrize("node_rank", ["auto", 0, 1])
def test_a_launcher_that_waits_for_machines_leaves_at_ctrl_c(run: Run, node_rank: int | str) -> None:
    parallel = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port('127.0.0.1')}", "node_rank": node_rank}
    launcher = run.launcher("report", ready=0, parallel=parallel)
    assert launcher.stderr is not None
    assert "network interface" in launcher.stderr.readline()
    assert "waiting for 2 machines" in launcher.stderr.readline()
    time.sleep(0.5)
    assert launcher.poll() is None
    os.kill(launcher.pid, signal.SIGINT)
    launcher.communicate(timeout=5)
    assert launcher.returncode == 128 + signal.SIGINT
