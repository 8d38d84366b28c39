"""Beats and stacks across processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator

import pytest

from drumline.core import heartbeat
from drumline.core.heartbeat import Beat, Beats, Phase
from drumline.launch.stacks import LINES, Stacks, format_stacks, innermost, is_stopped


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Beats]:
    monkeypatch.setattr(heartbeat, "_slot", None)
    found = Beats(3)
    yield found
    found.close()


def test_the_launcher_sees_each_workers_beats(beats: Beats) -> None:
    assert beats.read(1) == Beat(0, 0, Phase.STARTING)
    heartbeat.connect(beats.variable(1))
    heartbeat.beat(7)
    assert beats.read(1) == Beat(1, 7, Phase.STEPPING)
    heartbeat.enter(Phase.SAVING)
    assert beats.read(1) == Beat(2, 7, Phase.SAVING)
    assert beats.read(0) == beats.read(2) == Beat()


def test_beats_cross_processes(beats: Beats) -> None:
    code = "import os; from drumline.core import heartbeat as h; h.connect(os.environ); h.beat(5)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | beats.variable(2), check=True)
    assert beats.read(2) == Beat(1, 5, Phase.STEPPING)


def test_without_a_launcher_a_beat_goes_nowhere(beats: Beats) -> None:
    heartbeat.connect({})
    heartbeat.beat(1)
    heartbeat.enter(Phase.ENDING)
    assert beats.read(0) == Beat()


def test_a_beat_takes_about_a_microsecond(beats: Beats) -> None:
    heartbeat.connect(beats.variable(0))
    seconds = min(timeit.repeat("beat(3)", globals={"beat": heartbeat.beat}, number=10_000, repeat=5))
    assert seconds / 10_000 < 5e-6


HANGING = """
import os, threading, time
from drumline.launch.stacks import answer_signal
answer_signal(os.environ)
def under_the_bed():
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
under_the_bed()
"""


def test_a_process_says_where_it_stands_when_asked_again_too() -> None:
    stacks = Stacks(1)
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING],
        env=os.environ | stacks.variable(0),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for _ in range(2):
            answer = stacks.ask({0: process.pid})[0]
            lines = format_stacks(answer)
            assert lines[0] == "main thread:"
            assert re.fullmatch(r"  <string>:[67] in under_the_bed", lines[1])
            assert lines.count("another thread:") == 1
            assert innermost(answer) == lines[1].strip()
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not is_stopped(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_stopped(process.pid)
        assert stacks.ask({0: process.pid}) == {0: ""}
    finally:
        process.kill()
        process.communicate()
        stacks.close()


def test_stacks_are_cut_to_what_a_person_reads() -> None:
    frames = "\n".join(
        f'  File "/x/lib/python3.11/site-packages/torch/a.py", line {n} in f' for n in range(30)
    )
    answer = "\n".join(f"Thread 0x{n} (most recent call first):\n{frames}\n" for n in range(20))
    lines = format_stacks(answer)
    assert len(lines) == LINES
    assert lines[0] == "main thread:"
    assert lines[1] == "  torch/a.py:0 in f"
    assert lines[17] == "  ... 14 more"
    assert lines[-1].endswith("more lines")
    assert format_stacks("") == []
