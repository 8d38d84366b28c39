"""Counters of the operating system: what a process used between two moments."""

from __future__ import annotations

import os
import sys
import threading
import time

import psutil
import pytest

from drumline.observe.usage import LEVELS, RATES, Usage


def _spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_core_that_is_used_and_memory_and_files_that_are_held_are_counted() -> None:
    before = Usage.now()
    held = bytearray(64 << 20)
    held[::4096] = bytes(len(held[::4096]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]
    _spin(0.2)
    after = Usage.now()
    found = after.since(before)
    seconds = after.time_s - before.time_s
    assert found["own_cores"] * seconds == pytest.approx(0.2, abs=0.15)
    assert found["busy_cores"] * seconds > 0.1
    assert found["memory_mb"] - before.counters["memory_mb"] > 40
    assert found["descriptors"] - before.counters["descriptors"] == 10
    for file in files:
        os.close(file)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_that_sleeps_is_told_from_one_that_runs_or_waits_for_a_core() -> None:
    before = Usage.now()
    time.sleep(0.2)
    _spin(0.1)
    after = Usage.now()
    found, seconds = after.since(before), after.time_s - before.time_s
    awake = (found["loop_cores"] + found["loop_queued"]) * seconds
    assert awake == pytest.approx(seconds - 0.2, abs=0.05), "also on a busy machine"
    assert found["loop_cores"] * seconds >= 0.09


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_calling_thread_is_the_one_that_is_measured() -> None:
    found: list[Usage] = []
    _spin(0.1)
    thread = threading.Thread(target=lambda: found.append(Usage.now()))
    thread.start()
    thread.join()
    mine = Usage.now()
    assert found[0].counters["loop_cores"] < 0.05 < mine.counters["loop_cores"]


def test_what_a_system_does_not_report_is_left_out_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Usage.now()
    for name in ("num_ctx_switches", "num_fds", "io_counters", "children"):
        monkeypatch.setattr(psutil.Process, name, _raise)
    monkeypatch.setattr(psutil, "cpu_times", _raise)
    monkeypatch.setattr(psutil, "virtual_memory", _raise)
    found = Usage.now().since(before)
    assert "threads" in found
    gone = {"switches_s", "descriptors", "disk_mb_s", "own_cores", "busy_cores", "free_memory_mb"}
    assert not gone & set(found)
    assert set(before.counters) <= {*RATES, *LEVELS}


def _raise(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("not in this sandbox")
