"""How fast something goes and how long it still takes."""

from __future__ import annotations

import pytest

from drumline.core.progress import Pace


def test_the_time_left_follows_the_recent_speed() -> None:
    pace = Pace()
    assert pace.seconds_left(0, 1000) is None
    for second in range(200):
        pace.update(second, second)
    for second in range(200, 300):
        pace.update(second, 200 + (second - 200) * 10)
    assert pace.seconds_left(299, 2190) == pytest.approx(100)
    assert pace.seconds_left(309, 2190) == pytest.approx(90), "it counts down between updates"
    assert pace.seconds_left(9999, 2190) == 0


def test_many_updates_a_second_still_look_back_half_a_minute() -> None:
    pace = Pace()
    for tick in range(20_000):
        speed = 5 if tick % 100 == 0 else 1
        pace.update(tick / 100, tick * 2 + speed)
    left = pace.seconds_left(199.99, 2 * 19_999 + 2000)
    assert left == pytest.approx(10, rel=0.02)
    assert len(pace._seen) <= 40


def test_a_pause_does_not_slow_the_speed_down() -> None:
    pace = Pace()
    for second in range(10):
        pace.update(second, second * 10)
    pace.pause()
    pace.update(1000, 100)
    assert pace.seconds_left(1000, 200) == pytest.approx(10)
    pace.update(1001, 110)
    assert pace.seconds_left(1001, 210) == pytest.approx(10)


def test_a_resumed_run_counts_from_where_it_began() -> None:
    pace = Pace()
    pace.update(50, 10_000)
    pace.update(60, 10_100)
    assert pace.seconds_left(60, 10_200) == pytest.approx(10)
