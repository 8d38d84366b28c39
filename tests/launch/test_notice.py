"""What launchers tell each other, over a store in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import DistNetworkError, HashStore

from drumline.launch import notice
from drumline.launch.failure import Failure
from drumline.launch.notice import NoticeBoard

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


def _later(seconds: float, act: Callable[[], object]) -> None:
    threading.Timer(seconds, act).start()
