"""Tables of a comparison: the layers around the differences, and the totals.

Promises: pure. Lines fit the given width, whatever the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drumline.comparison.align import Pair
from drumline.comparison.findings import Finding
from drumline.comparison.layers import Layer
from drumline.comparison.measure import Measured
from drumline.comparison.wording import layer_text, size_text, times
from drumline.core.text import counted, printable


def totals_lines(measured: Measured) -> list[str]:
    """A table of both models' totals."""
    one, other = measured.totals
    numbers = [
        ("parameters", "{:,}", one.parameters, other.parameters),
        ("GFLOPs per image, forward", "{:.3g}", one.flops / 1e9, other.flops / 1e9),
        ("MiB of activations per image", "{:.3g}", one.kept_bytes / 2**20, other.kept_bytes / 2**20),
    ]
    rows = [(title, form.format(a), form.format(b), _ratio(a, b)) for title, form, a, b in numbers]
    ms = "{:.4g}".format
    rows.append(
        (
            "ms per step (forward, backward)",
            ms(1000 * one.step_s),
            ms(1000 * other.step_s),
            times(measured.ratio),
        )
    )
    return [
        f"{title:<31}{a:>14}{b:>14}{ratio:>10}" for title, a, b, ratio in [("", "A", "B", "B / A"), *rows]
    ]


def _ratio(one: float, other: float) -> str:
    return "equal" if one == other else times(other / one) if one else "-"


CONTEXT, MOST = 2, 24
"""Layers shown around a difference, and rows of the table in all."""


@dataclass(frozen=True)
class _Columns:
    """The widths of the table's columns."""

    name: int
    text: int
    output: int
    number: int
    memory: bool

    @staticmethod
    def of(width: int) -> _Columns:
        memory, output, number = width >= 110, 13 if width >= 100 else 12, 8 if width >= 100 else 7
        room = width - 2 - 2 * output - (4 if memory else 2) * number
        return _Columns(room * 9 // 20, room - room * 9 // 20, output, number, memory)


def table_lines(
    measured: Measured, findings: Iterable[Finding], width: int, every: bool = False
) -> list[str]:
    """The layers around the differences, or all of them."""
    pairs = measured.differences.pairs
    named = {number for finding in findings for number in finding.layers}
    marks = [_mark(measured, pair, named) for pair in pairs]
    shown = list(range(len(pairs))) if every else _region([bool(mark.strip()) for mark in marks])
    if not shown:
        return []
    columns = _Columns.of(width)
    heads = ["MiB A", "MiB B"] if columns.memory else []
    lines = [
        "  "
        + " " * (columns.name + columns.text)
        + f"{'output A':>{columns.output}}{'output B':>{columns.output}}"
        + "".join(f"{head:>{columns.number}}" for head in (*heads, "ms A", "ms B"))
    ]
    last = -1
    for number in (*shown, len(pairs)):
        if number > last + 1:
            hidden = sum(bool(mark.strip()) for mark in marks[last + 1 : number])
            more = f", {hidden:,} of them different" if hidden else ""
            lines.append(f"  ... {counted(number - last - 1, 'layer')}{more} ...")
        if number < len(pairs):
            lines += _rows(measured, pairs[number], marks[number], columns)
        last = number
    return [line.rstrip() for line in lines]


def _mark(measured: Measured, pair: Pair, named: set[int]) -> str:
    i, j = pair
    if j is None:
        return "- "
    if i is None:
        return "+ "
    if i == measured.values.layer and i in named:
        return "≠ "
    found = measured.differences
    changed = {each.a for each in found.changed} | {each.a for each in found.wiring}
    return "~ " if i in changed else "  "


def _region(marked: Sequence[bool]) -> list[int]:
    """Positions of the first marked rows with their context, at most `MOST`."""
    near: list[int] = []
    for number, mark in enumerate(marked):
        if mark:
            around = range(max(0, number - CONTEXT), min(len(marked), number + CONTEXT + 1))
            new = [each for each in around if not near or each > near[-1]]
            if len(near) + len(new) > MOST:
                break
            near += new
    return near


def _rows(measured: Measured, pair: Pair, mark: str, columns: _Columns) -> list[str]:
    a = None if pair[0] is None else measured.a[pair[0]]
    b = None if pair[1] is None else measured.b[pair[1]]
    if mark == "~ " and a is not None and b is not None:
        return [_line("- ", a, None, columns, _own(a, b)), _line("+ ", None, b, columns, _own(b, a))]
    return [_line(mark, a, b, columns)]


def _own(layer: Layer, other: Layer) -> str:
    """The layer in words, with the settings that differ from those of the other one."""
    text = layer_text(layer)
    if layer_text(other) != text:
        return text
    extra = [
        f"{key} {size_text(value)}"
        for key, value in layer.settings.items()
        if other.settings.get(key) != value and key != "in"
    ]
    return ", ".join([text, *extra])


def _line(mark: str, a: Layer | None, b: Layer | None, columns: _Columns, text: str = "") -> str:
    shown = a or b
    assert shown is not None
    outputs = ["×".join(map(str, layer.output[1:])) if layer else "-" for layer in (a, b)]
    if outputs[0] == outputs[1]:
        outputs[1] = "="
    numbers = [f"{layer.kept_bytes / 2**20:.2f}" if layer else "-" for layer in (a, b) if columns.memory]
    numbers += [f"{1000 * layer.seconds:.2f}" if layer else "-" for layer in (a, b)]
    return (
        mark
        + _cell(shown.name or "-", columns.name)
        + _cell((text or layer_text(shown)).replace("convolution", "conv"), columns.text)
        + "".join(f"{output:>{columns.output}}" for output in outputs)
        + "".join(f"{number:>{columns.number}}" for number in numbers)
    )


def _cell(text: str, width: int) -> str:
    """Text of this width, with a space behind it. What is too long loses its beginning, if it is a name."""
    text = printable(text)
    if len(text) >= width:
        text = f"…{text[len(text) - width + 2 :]}" if " " not in text else f"{text[: width - 2]}…"
    return f"{text:<{width}}"
