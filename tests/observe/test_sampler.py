"""The sampler names the user's line that the loop is in, and only while it takes steps."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

import drumline
from drumline.core.account import EVALUATION, Account
from drumline.observe.sampler import LOOKS_PER_S, Sampler, own_line


def slow_line() -> None:
    time.sleep(0.5)


def test_the_line_that_the_loop_is_in_most_often_is_named_and_the_device_is_read() -> None:
    sampler = Sampler(Account(), lambda: {"gpu_use": 0.5})
    sampler.start()
    try:
        slow_line()
        place, share, device = sampler.take()
        assert place.startswith("test_sampler.py:")
        assert place.endswith(" in slow_line")
        assert share > 0.5
        assert device == {"gpu_use": 0.5}
    finally:
        sampler.stop()
    time.sleep(0.1)
    assert sampler.take()[0] == "", "it has ended"


def test_an_evaluation_does_not_count() -> None:
    account = Account()
    sampler = Sampler(account)
    with account.within(EVALUATION):
        sampler.start()
        slow_line()
        sampler.stop()
    assert sampler.take() == ("", 0.0, {})


def test_a_line_is_the_users_only_if_it_is_called_by_ours_or_by_nobody() -> None:
    def frame() -> FrameType | None:
        return sys._getframe()

    assert own_line(frame()).endswith(" in frame")
    assert own_line(None) == ""
    assert own_line(_inside_ours()) == "", "the innermost function is ours, whoever called it"


def _inside_ours() -> FrameType | None:
    """A frame of the package's own code."""
    held = Account()
    frames: list[FrameType | None] = []
    held.listener = lambda part, counted: frames.append(sys._getframe().f_back)
    held.enter("forward")
    return frames[0]


def test_a_driver_that_hangs_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.observe.sampler._STOP_S", 0.1)
    hangs, goes_on = threading.Event(), threading.Event()

    def read() -> dict[str, float]:
        hangs.set()
        goes_on.wait()
        return {}

    sampler = Sampler(Account(), read)
    sampler.start()
    assert hangs.wait(30)
    began = time.perf_counter()
    sampler.stop()
    assert time.perf_counter() - began < 10
    goes_on.set()


def test_a_project_whose_folder_begins_like_ours_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = str(Path(drumline.__file__).parent)
    for folder, place in ((f"{ours}_models", "own.py:1 in f"), (ours, "")):
        names: dict[str, FrameType] = {}
        code = compile("def f(): return sys._getframe()\nframe = f()", f"{folder}/own.py", "exec")
        exec(code, {"sys": sys}, names)
        assert own_line(names["frame"]) == place


def test_a_look_costs_less_than_a_thousandth_of_the_time() -> None:
    costs = []
    for _ in range(50):
        began = time.thread_time()
        own_line(sys._current_frames().get(0))
        own_line(sys._getframe())
        costs.append(time.thread_time() - began)
    assert min(costs) * LOOKS_PER_S < 1e-3
