"""How long a launcher waits before it restarts lost workers."""

from __future__ import annotations

from drumline.launch.workers import Backoff


def test_restarts_without_progress_come_at_growing_intervals() -> None:
    backoff = Backoff()
    assert [backoff.next(0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_progress_makes_the_next_restart_immediate_again() -> None:
    backoff = Backoff()
    assert [backoff.next(step) for step in (0, 0, 0, 7, 7, 7, 9, 8)] == [0, 1, 2, 0, 1, 2, 0, 1]
