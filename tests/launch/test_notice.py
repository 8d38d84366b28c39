"""What launchers tell each other, over a store in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import DistNetworkError, HashStore

from drumline.launch import notice
from drumline.launch.failure import Failure
from drumline.launch.notice import NoticeBoard, State

CAUSE = Failure(3, "boom", time=2.0)
FOLLOWER = Failure(0, "Connection closed by peer", time=1.0, follows=True)


@pytest.fixture
def boards() -> tuple[NoticeBoard, NoticeBoard]:
    store = HashStore()
    return NoticeBoard(store, 0, 2), NoticeBoard(store, 1, 2)


def test_a_failure_is_read_by_the_others_and_only_the_first_counts(
    boards: tuple[NoticeBoard, NoticeBoard],
) -> None:
    assert boards[1].failures() == []
    boards[0].post(CAUSE)
    boards[0].post(FOLLOWER)
    assert boards[1].failures() == [CAUSE]
    assert boards[0].failures() == []


def test_one_who_lost_contact_waits_for_the_cause(boards: tuple[NoticeBoard, NoticeBoard]) -> None:
    _later(0.3, lambda: boards[1].post(CAUSE))
    assert boards[0].wait_for_cause() == [CAUSE]


def test_without_a_cause_the_wait_ends(
    boards: tuple[NoticeBoard, NoticeBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice, "CAUSE_SECONDS", 0.3)
    boards[1].post(FOLLOWER)
    assert boards[0].wait_for_cause() == [FOLLOWER]


def test_the_done_wait_for_each_other_for_a_failure_or_for_a_request(
    boards: tuple[NoticeBoard, NoticeBoard],
) -> None:
    assert boards[0].wait_for_all(give_up=lambda: True) == []
    _later(0.2, lambda: boards[1].post(CAUSE))
    assert boards[0].wait_for_all(give_up=lambda: False) == [CAUSE]
    store = HashStore()
    first, second = NoticeBoard(store, 0, 2), NoticeBoard(store, 1, 2)
    _later(0.2, lambda: second.wait_for_all(give_up=lambda: False))
    assert first.wait_for_all(give_up=lambda: False) == []


def test_the_host_of_the_store_leaves_last(boards: tuple[NoticeBoard, NoticeBoard]) -> None:
    begin = time.monotonic()
    _later(0.4, lambda: boards[1].leave(hosts_store=False))
    assert boards[0].leave(hosts_store=True)
    assert time.monotonic() - begin > 0.3


def test_only_the_last_one_out_is_told_so(boards: tuple[NoticeBoard, NoticeBoard]) -> None:
    assert not boards[0].leave(hosts_store=False)
    assert boards[1].leave(hosts_store=False)


def test_a_store_that_is_gone_ends_every_wait() -> None:
    class Gone(HashStore):
        def _refuse(self, *rest: object) -> bool:
            raise DistNetworkError("gone")

        check = add = set = _refuse  # type: ignore[assignment]

    board = NoticeBoard(Gone(), 0, 2)
    board.post(CAUSE)
    assert board.wait_for_cause() == []
    assert board.wait_for_all(give_up=lambda: False) == []
    assert not board.leave(hosts_store=True)
    with pytest.raises(DistNetworkError):
        board.failures()


def test_machines_agree_on_restarts_folder_and_launch_id(boards: tuple[NoticeBoard, NoticeBoard]) -> None:
    answers: list[tuple[int, str, str]] = []
    old, new = "a" * 32, "b" * 32
    thread = threading.Thread(target=lambda: answers.append(boards[1].agree(2, "photos-1", old)))
    thread.start()
    assert boards[0].agree(0, "", new) == (2, "photos-1", old)  # it has just joined
    thread.join()
    assert answers == [(2, "photos-1", old)]
    assert NoticeBoard(HashStore(), 0, 1).agree(1, "x", new) == (1, "x", new)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        f'["1", "x", "{"0" * 32}"]',
        f'[1, "../up", "{"0" * 32}"]',
        f'[1, "..", "{"0" * 32}"]',
        f'[1, "a\\u001bb", "{"0" * 32}"]',
        '[1, "x", "../up"]',
        "[" * 100_000,
    ],
)
def test_what_another_machine_claims_to_know_is_looked_at(text: str) -> None:
    store = HashStore()
    store.set("drumline/knows/1", text)
    assert NoticeBoard(store, 0, 2).agree(0, "", "a" * 32) == (0, "", "a" * 32)


def test_a_notice_that_is_none_ends_the_run() -> None:
    store = HashStore()
    store.set("drumline/failed/1", "cos\nsystem\n(S'true'\ntR.")
    store.set("drumline/posted", "")
    (failure,) = NoticeBoard(store, 0, 2).failures()
    assert failure.ends
    assert failure.host == "machine 1"


def test_a_launcher_that_falls_silent_is_lost_and_one_that_lives_is_not() -> None:
    store = HashStore()
    first, second = (NoticeBoard(store, machine, 2, pace=0.05) for machine in range(2))
    deadline = time.monotonic() + 0.6
    while time.monotonic() < deadline:
        assert first.live(State(3, True, "photos-1")) == second.live(State(4)) == []
        time.sleep(0.02)
    assert second.elsewhere == [State(3, True, "photos-1")]
    while not (lost := first.live(State())) and time.monotonic() < deadline + 5:
        time.sleep(0.02)
    assert [failure.host for failure in lost] == ["machine 1"]
    assert "no sign of its launcher" in lost[0].message


def _later(seconds: float, act: Callable[[], object]) -> None:
    threading.Timer(seconds, act).start()
