"""Numbers read as people write them."""

from __future__ import annotations

import math

import pytest

from drumline.core import wording
from drumline.core.wording import Pace


def test_counts_and_rates_are_grouped_by_thousands() -> None:
    assert wording.count(1234567) == "1,234,567"
    assert wording.rate(1234.4, "img") == "1,234 img/s"
    assert wording.rate(3.21, "img") == "3.2 img/s"


@pytest.mark.parametrize(
    ("part", "text"), [(0.0031, "0.3 %"), (0, "0.0 %"), (0.0994, "9.9 %"), (0.0996, "10 %"), (1, "100 %")]
)
def test_shares_have_a_decimal_only_where_it_tells_something(part: float, text: str) -> None:
    assert wording.share(part) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.34567, "2.3457"), (0.0, "0.0000"), (2.5e-5, "2.50e-05"), (123456.0, "1.23e+05"), (math.nan, "nan")],
)
def test_a_loss_is_readable_at_any_size(value: float, text: str) -> None:
    assert wording.loss(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3599.7, "1:00:00"), (5025, "1:23:45"), (100000, "1 d 3 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text


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
