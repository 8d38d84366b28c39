"""Charts show what they are given, whatever its size."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree.ElementTree import Element, tostring

import pytest

from drumline.report.charts import Axis, Series, averaged, line_chart, thinned, ticks
from drumline.report.learning import loss_axis

PLAIN = Axis("loss", "{:.3g}".format)


def drawn(*series: Series, axis: Axis = PLAIN) -> Element:
    chart = line_chart("Loss", series, axis)
    assert chart is not None
    return chart


def paths(chart: Element) -> list[str]:
    svg = chart.find("svg")
    assert svg is not None
    return [path.get("d", "") for path in svg.findall("path") if "line" in path.get("class", "")]


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 7.3, 1e6, 1e12])
def test_ticks_are_round_and_inside(scale: float) -> None:
    found = ticks(0.13 * scale, 0.97 * scale)
    assert 3 <= len(found) <= 11
    assert all(0.13 * scale * 0.999 <= tick <= 0.97 * scale * 1.001 for tick in found)
    steps = {float(f"{b - a:.3g}") for a, b in pairwise(found)}
    assert len(steps) == 1
    assert float(f"{steps.pop():.0e}") in {
        factor * 10.0**power for power in range(-12, 14) for factor in (1, 2, 5)
    }


def test_a_long_line_is_averaged_and_keeps_its_ends() -> None:
    points = [(float(x), float(x % 2)) for x in range(100_000)]
    found = averaged(points)
    assert len(found) <= 240
    assert found[-1] == points[-1]
    assert all(abs(y - 0.5) < 0.01 for _, y in found[:-1])
    chart = drawn(Series("a", points, 1))
    assert len(tostring(chart)) < 20_000


def test_what_is_not_finite_is_not_drawn() -> None:
    chart = drawn(Series("a", [(1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0)], 1))
    (path,) = paths(chart)
    assert path.count("L") == 1
    assert "nan" not in path
    assert line_chart("Loss", [Series("a", [(1, math.nan)], 1)], PLAIN) is None
    assert line_chart("Loss", [Series("a", [], 1)], PLAIN) is None


def test_one_point_is_a_marker() -> None:
    svg = drawn(Series("a", [(1.0, 5.0)], 1)).find("svg")
    assert svg is not None
    assert len(svg.findall("circle")) == 1


def test_a_loss_that_falls_from_a_high_start_has_a_logarithmic_axis() -> None:
    assert loss_axis([397.0, 3.1, 0.68]).log
    assert not loss_axis([2.5, 1.4, 0.7]).log
    assert not loss_axis([2.5, 0.0]).log
    chart = drawn(Series("a", [(1, 400.0), (2, 4.0), (3, 0.04)], 1), axis=loss_axis([400.0, 0.04]))
    heights = [float(place.split()[1]) for place in paths(chart)[0].removeprefix("M").split("L")]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)


def test_series_differ_in_more_than_colour_and_the_numbers_are_there() -> None:
    chart = drawn(*(Series(f"run {n}", [(1, n + 1.0), (2, n + 2.0)], n + 1, n) for n in range(8)))
    svg = chart.find("svg")
    assert svg is not None
    dashes = [path.get("stroke-dasharray") for path in svg.findall("path") if "line" in path.get("class", "")]
    assert len(set(dashes)) == 8
    assert "run 7 from 8 to 9" in svg.get("aria-label", "")
    cells = [cell.text for cell in chart.iter("td")]
    assert cells[:8] == [f"{n + 1}" for n in range(8)]


def test_few_rows_of_many_are_evenly_chosen() -> None:
    assert thinned(list(range(5)), 5) == [0, 1, 2, 3, 4]
    found = thinned(list(range(1001)), 11)
    assert found == list(range(0, 1001, 100))
