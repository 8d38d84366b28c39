"""A run ends between two steps, on all ranks at the same one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from drumline.launch.world import alone
from drumline.train.stop import StopSign
from tests.train import ranks, tiny


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_seen_at_the_next_step(number: signal.Signals) -> None:
    with StopSign(alone(tiny.CPU)) as stop:
        assert not stop.seen(1)
        os.kill(os.getpid(), number)
        assert stop.seen(2)
        assert stop.seen(3)
        stop.settle()


def test_the_handlers_from_before_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSign(alone(tiny.CPU)):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once() -> None:
    code = (
        "import os, signal, time, torch\n"
        "from drumline.launch.world import alone\n"
        "from drumline.train.stop import StopSign\n"
        "with StopSign(alone(torch.device('cpu'))):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"  # the same request, passed on by a wrapper too
        "    time.sleep(0.6)\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('too long', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "still here\n"
    assert done.returncode == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(size: int) -> None:
    found = ranks.results(size)
    assert [result["asked"] for result in found] == [False] * (size - 1) + [True]
    assert len({result["stopped_at"] for result in found}) == 1
    assert 20 <= found[0]["stopped_at"] < 5000


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_nobody_stops_when_nobody_was_asked(size: int) -> None:
    assert not any(result["unasked"] for result in ranks.results(size))


def test_an_alarm_is_heard_at_once_by_a_process_alone() -> None:
    with StopSign(alone(tiny.CPU), lambda step: 3 if step == 4 else 0) as stop:
        heard = [(stop.seen(step), stop.alarm) for step in (3, 4, 5)]
    assert heard == [(False, 0), (False, 3), (False, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_an_alarm_of_one_rank_reaches_all_at_the_same_step(size: int) -> None:
    found = [result["alarms"] for result in ranks.results(size)]
    assert found == [found[0]] * size
    assert [alarm for _, alarm in found[0]] == [7, 7]
    assert found[0][0][0] >= 7
