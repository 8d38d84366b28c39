"""The curves of two runs at the same epochs."""

from __future__ import annotations

from typing import Any

from drumline.comparison.runs import MOST, curve_lines, curve_points


def lines(epochs: int, begin: float, pace: float, gain: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"time": begin, "kind": "train", "epoch": 0.0, "loss": 2.0}]
    for epoch in range(1, epochs + 1):
        found.append(
            {
                "time": begin + pace * epoch,
                "kind": "eval",
                "epoch": float(epoch),
                "loss": 2 / epoch,
                "top1": gain * epoch,
            }
        )
    return found


def test_both_runs_are_shown_at_the_epochs_that_both_have() -> None:
    points = curve_points(lines(3, 100, 10, 0.1), lines(2, 5000, 30, 0.2))
    assert [point.epoch for point in points] == [1.0, 2.0]
    assert (points[1].top1, points[1].seconds) == ((0.2, 0.4), (20.0, 60.0))
    assert curve_lines(points)[-1].split() == ["2", "1.0000", "1.0000", "20.00%", "40.00%", "0:20", "1:00"]


def test_a_long_run_has_a_short_table_that_ends_with_its_last_epoch() -> None:
    table = curve_lines(curve_points(lines(95, 0, 1, 0.01), lines(95, 0, 1, 0.01)))
    assert len(table) <= MOST + 2
    assert table[-1].split()[0] == "95"
    assert max(map(len, table)) <= 80


def test_averaged_weights_count_and_damaged_lines_do_not() -> None:
    extra = {"time": 9.0, "kind": "eval", "epoch": 1.0, "top1": 0.1, "average_top1": 0.5, "loss": None}
    points = curve_points([extra, {"kind": "eval"}, {}], [extra])
    assert points[0].top1 == (0.5, 0.5)
    assert points[0].loss == (None, None)
    assert curve_points([], [extra]) == []
    assert curve_lines([]) == []
