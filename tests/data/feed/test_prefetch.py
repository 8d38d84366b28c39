"""An iterator that runs ahead: order, errors, bounds, and nothing left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from drumline.core.errors import UserError
from drumline.data.feed.prefetch import prefetch


class Source:
    """Counts; says whether it was closed, and by which thread."""

    def __init__(self, count: int, error: BaseException | None = None) -> None:
        self.count, self.error = count, error
        self.given = 0
        self.closed_by: list[threading.Thread] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.given == self.count:
            if self.error:
                raise self.error
            raise StopIteration
        self.given += 1
        return self.given - 1

    def close(self) -> None:
        self.closed_by.append(threading.current_thread())


def feeds() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "drumline-feed"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


@pytest.mark.parametrize("ready", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_items_come_in_order_and_the_source_is_closed_once(count: int, ready: int) -> None:
    source = Source(count)
    assert list(prefetch(source, ready)) == list(range(count))
    assert len(source.closed_by) == 1
    assert feeds() == []


def test_items_that_are_none_or_false_are_items() -> None:
    assert list(prefetch((item for item in (None, False, 0, ())), 2)) == [None, False, 0, ()]


def test_it_runs_ahead_but_no_further_than_asked() -> None:
    source = Source(100)
    with closing(prefetch(source, 3)) as items:
        assert next(items) == 0
        # Three wait in the queue, and one in the thread's hands.
        until(lambda: source.given >= 5)
        time.sleep(0.05)
        assert source.given == 5
        assert next(items) == 1
        until(lambda: source.given >= 6)
        time.sleep(0.05)
        assert source.given == 6


@pytest.mark.parametrize("error", [UserError("what", "fix"), ValueError("odd"), KeyboardInterrupt()])
def test_what_the_source_raises_is_raised_where_its_item_was_wanted(error: BaseException) -> None:
    source = Source(4, error)
    items = prefetch(source, 2)
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(type(error)) as caught:
        next(items)
    assert caught.value is error
    assert len(source.closed_by) == 1
    assert feeds() == []


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_closing_early_ends_the_thread_and_closes_the_source_first(taken: int) -> None:
    source = Source(10**9)
    items = prefetch(source, 2)
    for _ in range(taken):
        next(items)
    (feed,) = feeds()
    items.close()
    assert not feed.is_alive()
    assert source.closed_by == [feed]
    assert list(items) == []


def test_an_error_at_the_consumer_ends_the_thread() -> None:
    source = Source(10**9)

    def consume() -> None:
        with closing(prefetch(source, 2)) as items:
            for item in items:
                assert item < 3

    with pytest.raises(AssertionError):
        consume()
    assert len(source.closed_by) == 1
    assert feeds() == []


def test_a_generators_own_ending_is_run_in_the_thread_it_ran_in() -> None:
    """CUDA streams and processes want to be given back where they were taken."""
    threads = []

    def generator() -> Iterator[int]:
        threads.append(threading.current_thread())
        try:
            while True:
                yield 1
        finally:
            threads.append(threading.current_thread())

    with closing(prefetch(generator(), 2)) as items:
        next(items)
    assert threads[0] is threads[1]
    assert threads[0] is not threading.current_thread()


def test_what_is_never_asked_for_anything_starts_no_thread() -> None:
    items = prefetch(Source(5), 2)
    assert feeds() == []
    items.close()
    assert feeds() == []
