"""Charts as SVG: lines, stacked columns, and the reliability diagram.

Promises: a chart is a figure with a title, a legend and, folded, a table of its numbers, for screen readers and for
the script that shows values. Series differ in dashes and markers, too, not in colour alone. Colours are variables of
the style sheet. Nothing that is not finite is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from xml.etree.ElementTree import Element

from drumline.report.elements import Child, el, folded, table

Point = tuple[float, float]
T = TypeVar("T")
WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 22, 40
MOST = 240
"""Points of a line; more are averaged."""
ROWS = 60
"""Rows of its table."""
LOG_FROM = 30
"""From this ratio of the largest to the smallest value on, a loss has a logarithmic axis."""
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 2", "1 4", "6 2 2 2")
SHAPES = ("circle", "square", "triangle", "diamond")


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str
    points: Sequence[Point]
    colour: int
    """From 1 on; dashes and markers follow from `look`."""
    look: int = 0
    marked: bool = False
    """Whether each point has a marker, as long as there are few."""


@dataclass(frozen=True)
class Axis:
    """How the values of a chart are written, and the range that it shows."""

    label: str
    text: Callable[[float], str]
    low: float | None = None
    high: float | None = None
    log: bool = False


def line_chart(
    title: str,
    series: Sequence[Series],
    axis: Axis,
    x_label: str = "epoch",
    best: tuple[float, str] | None = None,
) -> Element | None:
    """Lines over a common x. `best` marks an x with a text. None if there is nothing to draw."""
    series = [shown for each in series if (shown := _drawable(each, axis.log)).points]
    if not series:
        return None
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points]
    frame = _Frame(_spread(min(xs), max(xs)), _range(ys, axis), axis)
    parts: list[Child] = [*frame.grid(), *frame.x_axis(x_label)]
    if best is not None:
        at = frame.x(best[0])
        parts.append(el("line", class_="best", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM))
        right = at > WIDTH / 2
        parts.append(
            el(
                "text",
                best[1],
                class_="best",
                x=at + (5 if right else -5),
                y=TOP - 8,
                text_anchor="end" if right else "start",
            )
        )
    for each in series:
        parts += _line(each, frame)
    ends = "; ".join(
        f"{each.name} from {axis.text(each.points[0][1])} to {axis.text(each.points[-1][1])}"
        for each in series
    )
    picture = _svg(f"{title}: {ends}", parts, "plot")
    for name, value in (("x0", frame.xs[0]), ("x1", frame.xs[1])):
        picture.set(f"data-{name}", repr(value))
    return _figure(title, picture, _legend(series), _numbers(title, series, axis, x_label))


def stacked_columns(
    title: str,
    columns: Sequence[tuple[str, dict[str, float]]],
    kinds: dict[str, str],
    axis: Axis,
    x_label: str,
) -> Element:
    """Columns that are divided into parts. `kinds` names the parts, from the bottom to the top, and the class of
    each."""
    highest = max(sum(parts.values()) for _, parts in columns)
    frame = _Frame((0.0, float(len(columns))), (0.0, highest or 1.0), axis)
    parts: list[Child] = [el("defs", map(_hatch, kinds.values())), *frame.grid(), frame.x_title(x_label)]
    every = max(1, math.ceil(len(columns) / 8))
    for number, (name, values) in enumerate(columns):
        left, right, base = frame.x(number + 0.08), frame.x(number + 0.92), 0.0
        for kind, class_ in kinds.items():
            value = values.get(kind, 0.0)
            if value > 0:
                top, bottom = frame.y(base + value), frame.y(base)
                tip = el("title", f"{x_label} {name}: {kind} {axis.text(value)}")
                box = {"x": left, "y": top, "width": right - left, "height": bottom - top}
                fill = f"fill:url(#hatch-{class_.split()[0]})" if "wait" in class_ else None
                parts.append(el("rect", tip, class_=f"part {class_}", style=fill, **box))
                base += value
        if number % every == 0:
            parts.append(_tick(name, (left + right) / 2))
    shown = {kind: class_ for kind, class_ in kinds.items() if any(each.get(kind) for _, each in columns)}
    picture = _svg(f"{title}; the table has the numbers", parts)
    rows = [
        [name, *(axis.text(values.get(kind, 0.0)) for kind in shown)]
        for name, values in thinned(columns, ROWS)
    ]
    numbers = table(title, [x_label, *shown], rows)
    return _figure(title, picture, None, folded("Numbers", numbers))


def parts_legend(kinds: dict[str, str]) -> Element:
    """The legend of parts: a patch and a name for each."""
    return el(
        "ul",
        [
            el("li", el("i", class_=f"patch {class_}", aria_hidden="true"), kind)
            for kind, class_ in kinds.items()
        ],
        class_="legend",
    )


def reliability(bins: Sequence[tuple[int, float, float]]) -> Element:
    """The diagram of a calibration: for each bin of confidence its samples, its accuracy and its mean confidence."""
    axis = Axis("accuracy", "{:.0%}".format, 0.0, 1.0)
    frame = _Frame((0.0, 1.0), (0.0, 1.0), axis)
    parts: list[Child] = [*frame.grid(), *frame.x_axis("confidence", "{:.0%}".format)]
    most, width = max(samples for samples, _, _ in bins), 1 / len(bins)
    for number, (samples, accuracy, confidence) in enumerate(bins):
        if not samples:
            continue
        left, wide = frame.x(number * width) + 1, frame.x(width) - frame.x(0.0) - 2
        top, zero, wanted = frame.y(accuracy), frame.y(0.0), frame.y(confidence)
        tip = (
            f"confidence {number * width:.0%} to {(number + 1) * width:.0%}: {samples:,} samples, "
            f"{accuracy:.1%} right, mean confidence {confidence:.1%}"
        )
        faint = 0.35 + 0.65 * samples / most
        parts.append(
            el(
                "rect", el("title", tip), class_="calibrated", x=left, y=top, width=wide,
                height=max(0.0, zero - top), fill_opacity=faint,
            )
        )  # fmt: skip
        gap = {"x": left, "y": min(top, wanted), "width": wide, "height": abs(top - wanted)}
        parts.append(el("rect", class_="gap", **gap))
    parts.append(
        el("line", class_="ideal", x1=frame.x(0.0), y1=frame.y(0.0), x2=frame.x(1.0), y2=frame.y(1.0))
    )
    title = "Confidence against accuracy"
    picture = _svg(f"{title}; the table has the numbers", parts)
    rows = [
        [f"{n * width:.0%}–{(n + 1) * width:.0%}", f"{samples:,}", f"{accuracy:.1%}", f"{confidence:.1%}"]
        for n, (samples, accuracy, confidence) in enumerate(bins)
        if samples
    ]
    numbers = table(title, ["confidence", "samples", "accuracy", "mean confidence"], rows)
    legend = parts_legend({"accuracy": "calibrated", "distance to the confidence": "gap"})
    return _figure(title, picture, legend, folded("Numbers", numbers))


def thinned(rows: Sequence[T], most: int) -> list[T]:
    """At most this many of the rows, evenly chosen, with the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(number * (len(rows) - 1) / (most - 1))] for number in range(most)]


def averaged(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """At most this many points, each the mean of its neighbours; the last one stays."""
    if len(points) <= most:
        return list(points)
    size = math.ceil((len(points) - 1) / (most - 1))
    groups = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    means = [(group[-1][0], math.fsum(y for _, y in group) / len(group)) for group in groups]
    return [*means, points[-1]]


def ticks(low: float, high: float, about: int = 5, least: float = 0.0) -> list[float]:
    """Round numbers between two bounds, at least this far apart."""
    span = high - low
    if not span > 0:
        return [low]
    rough = max(span / about, least)
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Frame:
    """Where values lie in the picture."""

    xs: Point
    ys: Point
    axis: Axis

    def x(self, value: float) -> float:
        return LEFT + (value - self.xs[0]) / (self.xs[1] - self.xs[0]) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.ys
        if self.axis.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        inside = min(max((value - low) / (high - low), 0.0), 1.0)
        return HEIGHT - BOTTOM - inside * (HEIGHT - TOP - BOTTOM)

    def grid(self) -> Iterable[Child]:
        values = _log_ticks(*self.ys) if self.axis.log else ticks(*self.ys)
        for value in values:
            at = self.y(value)
            yield el("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at)
            yield _tick(self.axis.text(value), LEFT - 6, at + 4, "end")

    def x_axis(self, label: str, text: Callable[[float], str] = "{:g}".format) -> Iterable[Child]:
        whole = text == "{:g}".format and self.xs[1] - self.xs[0] >= 2  # no halves of epochs
        for value in ticks(*self.xs, about=6, least=1.0 if whole else 0.0):
            yield _tick(text(round(value, 6)), self.x(value))
        yield self.x_title(label)

    def x_title(self, label: str) -> Element:
        return _tick(label, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6)


def _drawable(series: Series, log: bool) -> Series:
    points = [
        (x, y) for x, y in series.points if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log)
    ]
    return Series(series.name, averaged(points), series.colour, series.look, series.marked)


def _spread(low: float, high: float) -> Point:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _range(values: Sequence[float], axis: Axis) -> Point:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if axis.log:
        return (low / 1.2, high * 1.2)
    if axis.low is None and 0 <= low < 0.4 * high:
        low = 0.0
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (
        low if axis.low is not None or low == 0 else low - margin,
        high if axis.high is not None else high + margin,
    )


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 4 else (1, 2, 5) if len(powers) < 4 else (1, 3)
    return [
        factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high
    ]


def _line(series: Series, frame: _Frame) -> list[Child]:
    places = [(frame.x(x), frame.y(y)) for x, y in series.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts: list[Child] = [
        el("path", d=path, class_=f"line c{series.colour}", stroke_dasharray=DASHES[series.look % 8] or None)
    ]
    if len(places) == 1 or (series.marked and len(places) <= 40):
        parts += [_marker(x, y, series) for x, y in places]
    return parts


def _marker(x: float, y: float, series: Series) -> Element:
    class_ = f"dot c{series.colour}"
    shape = SHAPES[series.look % len(SHAPES)]
    if shape == "circle":
        return el("circle", class_=class_, cx=x, cy=y, r=3.2)
    corners = {
        "square": ((-3, -3), (3, -3), (3, 3), (-3, 3)),
        "triangle": ((0, -4), (3.8, 3), (-3.8, 3)),
        "diamond": ((0, -4.4), (4, 0), (0, 4.4), (-4, 0)),
    }[shape]
    return el("path", class_=class_, d="M" + "L".join(f"{x + a:.1f} {y + b:.1f}" for a, b in corners) + "Z")


def _legend(series: Sequence[Series]) -> Element | None:
    if len(series) < 2:
        return None
    items = []
    for each in series:
        dashes = DASHES[each.look % 8] or None
        line = el("line", class_=f"line c{each.colour}", x1=0, x2=26, y1=6, y2=6, stroke_dasharray=dashes)
        swatch: list[Child] = [line]
        if each.marked:
            swatch.append(_marker(13, 6, each))
        items.append(
            el(
                "li",
                el("svg", swatch, viewBox="0 0 26 12", width=26, height=12, aria_hidden="true"),
                each.name,
            )
        )
    return el("ul", items, class_="legend")


def _svg(label: str, parts: list[Child], class_: str | None = None) -> Element:
    return el("svg", parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label, class_=class_)


def _tick(text: str, x: float, y: float = HEIGHT - BOTTOM + 16, anchor: str = "middle") -> Element:
    return el("text", text, class_="tick", x=x, y=y, text_anchor=anchor)


def _hatch(class_: str) -> Element | None:
    """The pattern of a part in which nothing is computed."""
    if "wait" not in class_:
        return None
    name = class_.split()[0]
    line = el("line", class_="hatch", x1=0, y1=0, x2=0, y2=7)
    made = el(
        "pattern", line, id=f"hatch-{name}", class_=name, width=7, height=7, patternUnits="userSpaceOnUse"
    )
    made.set("patternTransform", "rotate(45)")
    return made


def _numbers(title: str, series: Sequence[Series], axis: Axis, x_label: str) -> Element:
    """All series by x; empty where a series has no point."""
    rows: dict[float, dict[int, str]] = {}
    for number, each in enumerate(series):
        for x, y in thinned(each.points, ROWS):
            rows.setdefault(round(x, 4), {})[number] = axis.text(y)
    lines = [[f"{x:g}", *(rows[x].get(number, "") for number in range(len(series)))] for x in sorted(rows)]
    return folded("Numbers", table(title, [x_label, *(each.name for each in series)], lines))


def _figure(title: str, picture: Element, legend: Element | None, *more: Child) -> Element:
    return el("figure", el("figcaption", title), legend, picture, *more)
