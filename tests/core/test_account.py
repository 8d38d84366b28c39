"""The account of a loop's time: every moment is in one part, of one thread."""

from __future__ import annotations

import threading
from time import process_time

import pytest

from drumline.core.account import PARTS, Account


class HandTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_parts_sum_to_the_wall_time() -> None:
    hand = HandTime()
    account = Account(clock=hand)
    for seconds, part in enumerate(PARTS):
        account.enter(part)
        hand.now += seconds
    sums = account.sums()
    assert sums == {part: float(seconds) for seconds, part in enumerate(PARTS)}
    assert sum(sums.values()) == hand.now - 100


def test_a_part_within_another_ends_where_it_began_also_after_an_error() -> None:
    hand = HandTime()
    account = Account(clock=hand)
    account.enter("forward")

    def fail() -> None:
        with account.within("teacher"):
            hand.now += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    hand.now += 1
    assert (account.sums()["teacher"], account.sums()["forward"]) == (2.0, 1.0)


@pytest.mark.parametrize(("around", "counted"), [("backward", "exchange"), ("evaluation", "evaluation")])
def test_waiting_for_others_in_an_evaluation_is_evaluation(around: str, counted: str) -> None:
    hand = HandTime()
    account = Account(clock=hand)
    account.enter(around)
    with account.waiting():
        hand.now += 2
    assert account.sums()[counted] == 2.0
    account.enter("log")
    assert account.enter("data") == "log"


def test_another_thread_changes_nothing() -> None:
    hand = HandTime()
    account = Account(clock=hand)
    account.enter("forward")

    def other() -> None:
        with account.waiting():
            hand.now += 1

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert account.sums()["forward"] == 1.0


def test_parts_are_recorded_between_record_and_recorded_and_no_more_than_asked_for() -> None:
    hand = HandTime()
    account = Account(clock=hand)
    account.record(10)
    for part in ("data", "forward"):
        hand.now += 1
        account.enter(part)
    assert account.recorded() == [(100.0, "other"), (101.0, "data"), (102.0, "forward")]
    assert account.recorded() == []
    account.record(2)
    for part in ("backward", "optimizer", "log"):
        hand.now += 1
        with account.within(part):
            continue
    assert account.recorded() == [(102.0, "forward"), (103.0, "backward")]
    assert account.sums()["forward"] == 3.0, "sums go on as ever"


def test_recording_leaves_enter_as_fast_as_it_was() -> None:
    """CPU time of a hundred thousand calls before a recording and after it, in alternating rounds."""
    ratios = []
    for _ in range(5):
        plain, recorded = Account(), Account()
        recorded.record(100)
        for _ in range(200):
            recorded.enter("data")
        recorded.recorded()
        ratios.append(_cpu_s(recorded) / _cpu_s(plain))
    assert min(ratios) < 1.25, ratios


def _cpu_s(account: Account) -> float:
    began = process_time()
    for _ in range(100_000):
        account.enter("forward")
    return process_time() - began
