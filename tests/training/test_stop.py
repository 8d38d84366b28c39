"""A run ends between two steps, on all ranks at the same one."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.parallel.world import single_process
from drumline.state.checkpoint import newest_valid
from drumline.training import stop as stop_module
from drumline.training.stop import STOPS, StopSign
from tests.runs.command import TINY, environment
from tests.training import ranks, tiny


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_is_seen_at_the_next_step(number: signal.Signals) -> None:
    with StopSign(single_process(tiny.CPU)) as stop:
        assert not stop.seen(1)
        os.kill(os.getpid(), number)
        assert stop.seen(2)
        assert stop.seen(3)
        assert stop.stopped_by == number.name
        stop.finish()


def test_the_previous_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in STOPS]
    with StopSign(single_process(tiny.CPU)):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in STOPS] == before


def test_a_hang_up_that_nohup_ignores_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSign(single_process(tiny.CPU)) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.seen(1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_in_another_thread_needs_no_signal_handlers() -> None:
    """As in a notebook's thread, where Python allows none."""

    def run() -> bool:
        with StopSign(single_process(tiny.CPU)) as stop:
            return stop.seen(1)

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(run).result()


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_and_can_continue(tmp_path: Path) -> None:
    words = (*TINY, "run.name=x", "train.epochs=500", "train.log_every=1", "checkpoint.every_epochs=0")
    child, terminal = pty.fork()
    if not child:
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-m", "drumline", "train", *words], environment())
    deadline, log = time.monotonic() + 120, tmp_path / "runs/x/metrics.jsonl"
    while not log.exists() or not log.stat().st_size:
        assert time.monotonic() < deadline
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 1 << 16)
    os.close(terminal)
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == 128 + signal.SIGHUP
    assert "stopped: SIGHUP after step " in (tmp_path / "runs/x/log.txt").read_text()
    assert newest_valid(tmp_path / "runs/x/checkpoints")[0] is not None


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once() -> None:
    code = (
        "import os, signal, time, torch\n"
        "from drumline.parallel.world import single_process\n"
        "from drumline.training.stop import StopSign\n"
        "with StopSign(single_process(torch.device('cpu')), record=lambda text: print(text, flush=True)):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"  # the same request, passed on by a wrapper too
        "    time.sleep(0.6)\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('too long', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "still here\nstopped: SIGTERM again: ended at once, without saving\n"
    assert done.stderr.startswith(
        "SIGTERM: finishing the step, then saving; SIGTERM again ends the run at once"
    )
    assert done.returncode == 128 + signal.SIGKILL


class Pair:
    """A world of two whose other rank is never asked."""

    size = 2

    def all_reduce_max_async(self, message: torch.Tensor) -> Any:
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("world", [single_process(tiny.CPU), Pair()])
@pytest.mark.parametrize("first", [1, 1_000_001])
def test_requests_are_looked_for_as_often_as_the_steps_of_this_process_are_long(
    world: Any, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run did not take the steps of the processes before it in the time since it began."""
    now = 0.0
    monkeypatch.setattr(stop_module, "time", SimpleNamespace(perf_counter=lambda: now, monotonic=lambda: now))
    with StopSign(world) as stop:
        assert stop.seconds_per_step == 0
        for step in range(first, first + 4):
            now += 2.5
            assert not stop.seen(step)
        assert stop.seconds_per_step == pytest.approx(2.5)
        os.kill(os.getpid(), signal.SIGTERM)
        assert any(stop.seen(step) for step in (first + 4, first + 5))
        assert stop.stopped_by == "SIGTERM"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(size: int) -> None:
    found = ranks.results(size)
    assert [result["asked"] for result in found] == [False] * (size - 1) + [True]
    assert len({result["stopped_at"] for result in found}) == 1
    assert 20 <= found[0]["stopped_at"] < 5000


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_without_a_signal_no_rank_stops(size: int) -> None:
    assert not any(result["unasked"] for result in ranks.results(size))


def test_an_alarm_is_heard_at_once_by_a_process_alone() -> None:
    with StopSign(single_process(tiny.CPU), lambda step: 3 if step == 4 else 0) as stop:
        heard = [(stop.seen(step), stop.alarm) for step in (3, 4, 5)]
    assert heard == [(False, 0), (False, 3), (False, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_an_alarm_of_one_rank_reaches_all_at_the_same_step(size: int) -> None:
    found = [result["alarms"] for result in ranks.results(size)]
    assert found == [found[0]] * size
    assert [alarm for _, alarm in found[0]] == [7, 7]
    assert found[0][0][0] >= 7
