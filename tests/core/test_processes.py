"""Processes that work for this one: order, errors, kills, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from drumline.core.errors import UserError
from drumline.core.processes import WorkerKilled, _report_unless_owner_is_gone, map_in_processes

WORKERS = 2


def work(task: int) -> tuple[int, int]:
    if task == 7:
        raise UserError("seven", "another number", code="seven")
    if task == 8:
        raise ConnectionResetError("the network, not a killed process")
    if task == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02 * (task % 3))
    return task, os.getpid()


def results(tasks: Iterator[int] | range) -> Iterator[tuple[int, int]]:
    return map_in_processes(work, tasks, WORKERS, preload=__name__)


@pytest.mark.slow
def test_results_come_in_order_from_a_bounded_number_of_tasks_and_processes_end() -> None:
    taken = []

    def tasks() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number % 7

    with closing(results(tasks())) as made:
        found = [next(made) for _ in range(20)]
        assert len(taken) <= 20 + 2 * WORKERS
    assert [task for task, _ in found] == [number % 7 for number in range(20)]
    pids = {pid for _, pid in found}
    assert len(pids) == WORKERS
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "error"), [(7, UserError), (8, ConnectionResetError), (9, WorkerKilled)])
def test_an_exception_of_a_task_is_raised_here_and_a_kill_has_its_own_error(
    task: int, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        list(results(iter([1, 2, task])))
    assert getattr(caught.value, "code", "") == ("seven" if task == 7 else "")


@pytest.mark.parametrize(
    ("error", "reported"),
    [(ConnectionResetError("gone"), False), (EOFError(), False), (ValueError("a mistake"), True)],
)
def test_a_worker_reports_nothing_about_an_owner_that_was_killed(
    error: Exception, reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _report_unless_owner_is_gone(type(error), error, None)
    assert ("a mistake" in capsys.readouterr().err) == reported
