"""Windows of steps: few, bounded, of the same steps on every rank, and free outside."""

from __future__ import annotations

import json
from typing import Any

from drumline.core.account import Account
from drumline.observe.windows import FIRST, MOST, SKIPPED, STEPS, StepWindows


def train(windows: StepWindows, account: Account, done: int, steps: int) -> int:
    for _ in range(steps):
        for part in ("data", "forward", "backward", "optimizer", "log"):
            account.enter(part)
        done += 1
        windows.step_done(done)
    return done


def read(window: str) -> dict[str, Any]:
    assert window.endswith("}\n")
    found: dict[str, Any] = json.loads(window)
    return found


def test_a_window_has_its_steps_and_their_parts_in_order() -> None:
    account = Account()
    windows = StepWindows(3, {"host": account})
    windows.begin(100)
    train(windows, account, 100, 60)
    window = read(windows.take())
    assert (window["rank"], window["step"]) == (3, 100 + SKIPPED + STEPS)
    assert [step for _, step in window["steps"]] == list(range(103, 124))
    parts = [part for _, part in window["tracks"]["host"]]
    assert parts == ["log", *["data", "forward", "backward", "optimizer", "log"] * STEPS]
    moments = [at for at, _ in window["tracks"]["host"]]
    assert moments == sorted(moments)
    assert 0 <= moments[0] <= moments[-1] <= window["end_us"]
    assert account.recorded() == [], "nothing is recorded any more"


def test_a_short_interval_has_a_short_window_and_a_very_short_one_none() -> None:
    account = Account()
    windows = StepWindows(0, {"host": account})
    windows.begin(0)
    done = train(windows, account, 0, SKIPPED + 5)
    assert [step for _, step in read(windows.take())["steps"]] == list(range(SKIPPED, done + 1))
    windows.begin(done)
    train(windows, account, done, SKIPPED - 1)
    assert windows.take() == ""


def test_a_long_run_has_few_windows() -> None:
    account = Account()
    windows = StepWindows(0, {"host": account})
    done, recorded = 0, []
    for interval in range(1, 301):
        windows.begin(done)
        done = train(windows, account, done, SKIPPED + 2)
        recorded += [interval] if windows.take() else []
    assert recorded == [*range(1, FIRST + 1), 16, 32, 64, 128, 256]


def test_a_window_is_bounded_however_many_parts_a_step_has() -> None:
    account = Account()
    windows = StepWindows(0, {"host": account})
    windows.begin(0)
    for done in range(1, 30):
        for _ in range(1000):
            account.enter("forward")
        windows.step_done(done)
    assert len(read(windows.take())["tracks"]["host"]) == MOST
