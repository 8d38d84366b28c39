"""Beats across processes."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from collections.abc import Iterator

import pytest

from drumline.core import heartbeat
from drumline.core.heartbeat import Beat, Beats, Phase


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


def test_beats_are_read_in_another_process(beats: Beats) -> None:
    code = "import os; from drumline.core import heartbeat as h; h.connect(os.environ); h.beat(5)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | beats.variable(2), check=True)
    assert beats.read(2) == Beat(1, 5, Phase.STEPPING)


def test_without_a_launcher_a_beat_does_nothing(beats: Beats) -> None:
    heartbeat.connect({})
    heartbeat.beat(1)
    heartbeat.enter(Phase.ENDING)
    assert beats.read(0) == Beat()


def test_a_beat_takes_about_a_microsecond(beats: Beats) -> None:
    heartbeat.connect(beats.variable(0))
    seconds = min(timeit.repeat("beat(3)", globals={"beat": heartbeat.beat}, number=10_000, repeat=5))
    assert seconds / 10_000 < 5e-6
