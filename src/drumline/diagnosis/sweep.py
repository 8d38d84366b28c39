"""A sweep: measures every combination of some settings in short runs, as a table with the best and the knee.

Promises: all but `measure_rows` is pure. A combination that cannot run is a row with the reason. The knee is the
smallest setting within 5 % of the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_origin

from drumline.config.fields import WrongValue, expected, from_text, nearest, recipe_fields
from drumline.core.errors import UserError
from drumline.core.text import either, percent, rate, wrapped_lines
from drumline.diagnosis.evidence import Evidence
from drumline.diagnosis.figures import Figures

KNEE = 0.05
"""How much slower than the best the knee may be."""


@dataclass(frozen=True)
class Axis:
    """A recipe field and the values to try."""

    field: str
    values: tuple[str, ...]

    def rank(self, value: str) -> int:
        """How large a value is among these: by size if all are numbers, else by their order."""
        try:
            return sorted(self.values, key=float).index(value)
        except ValueError:
            return self.values.index(value)


@dataclass(frozen=True)
class Row:
    """A combination, and what was measured."""

    values: tuple[str, ...]
    """One for each axis."""
    images_per_s: float = 0.0
    data_share: float = 0.0
    """Of a step: waiting for data."""
    memory_mb: float = 0.0
    """Of the device that uses most; without a GPU, of all training processes."""
    cores: float = 0.0
    """CPU cores that the training processes use."""
    error: float = 0.0
    """The standard error of the speed, as a fraction."""
    problem: str = ""
    """Why it could not be measured."""


def read_axes(arguments: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """The axes in a command line, `workers=2,4,8` or `data.workers=2,4,8`, and the other arguments. One value is a
    setting like any other, and so is a list for a field that holds a list."""
    axes, others = dict[str, Axis](), list[str]()
    for text in arguments:
        name, equals, value = text.removeprefix("--").partition("=")
        if not equals or "/" in name or name == "finetune":
            others.append(text)
            continue
        field = field_named(name, text)
        values = tuple(dict.fromkeys(filter(None, value.split(","))))
        # `classes=10,size=32` is one path of a synthetic source.
        if len(values) < 2 or "=" in value or get_origin(recipe_fields()[field].hint) is tuple:
            others.append(f"{field}={value}")
            continue
        for each in values:
            _check_value(field, each)
        axes[field] = Axis(field, values)
    if not axes:
        raise UserError(
            "--sweep needs values to try",
            "for example drumline why --sweep workers=2,4,8 batch=128,256 data.path=photos",
        )
    return list(axes.values()), others


def field_named(name: str, text: str) -> str:
    """The field that a dotted or bare name means."""
    name = name.replace("-", "_")
    if name in recipe_fields():
        return name
    known = [field for field in recipe_fields() if field.rpartition(".")[2] == name]
    if len(known) == 1:
        return known[0]
    guesses = known or list(nearest(name))
    value = text.partition("=")[2]
    raise UserError(
        f"{text}: {'several fields are' if known else 'no field is'} called {name}",
        f"did you mean {either([f'{guess}={value}' for guess in guesses])}?"
        if guesses
        else "`drumline train --help` lists every field",
    )


def combinations(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """Every combination of the values, in the order in which they are written; the last axis varies fastest."""
    return list(product(*(axis.values for axis in axes)))


def settings_of(axes: Sequence[Axis], values: Sequence[str]) -> list[str]:
    """A combination as arguments of `drumline train`."""
    return [f"{axis.field}={value}" for axis, value in zip(axes, values, strict=True)]


def row_of(values: tuple[str, ...], evidence: Evidence, error: float) -> Row:
    """What a short run has measured."""
    figures = Figures(evidence)
    device = max(figures.get("gpu_memory_mb"))
    return Row(
        values,
        figures.images_per_s,
        figures.mean("data_ms") / figures.step_ms,
        device or sum(figures.get("memory_mb")),
        sum(figures.get("own_cores")),
        error,
    )


def best_of(rows: Sequence[Row]) -> Row | None:
    """The fastest."""
    return max((row for row in rows if not row.problem), key=lambda row: row.images_per_s, default=None)


def knee_of(axes: Sequence[Axis], rows: Sequence[Row]) -> Row | None:
    """The smallest combination within 5 % of the best: the one whose values come first on their axes, all together.
    Of several, the fastest."""
    best = best_of(rows)
    if best is None:
        return None
    near = [row for row in rows if not row.problem and row.images_per_s >= (1 - KNEE) * best.images_per_s]

    def size(row: Row) -> tuple[int, float]:
        ranks = (axis.rank(value) for axis, value in zip(axes, row.values, strict=True))
        return sum(ranks), -row.images_per_s

    return min(near, key=size)


def table(axes: Sequence[Axis], rows: Sequence[Row], width: int) -> list[str]:
    """The rows as lines; reasons are wrapped at `width`."""
    best, knee = best_of(rows), knee_of(axes, rows)
    keys = [axis.field.rpartition(".")[2] for axis in axes]
    titles = keys if len(set(keys)) == len(keys) else [axis.field for axis in axes]
    head = [*titles, "img/s", "data wait", "memory", "cores", ""]
    cells = [head, *(_cells(row, row is best, row is knee) for row in rows)]
    widths = [max(len(line[column]) for line in cells if len(line) > column) for column in range(len(head))]
    lines = []
    for row, line in zip([None, *rows], cells, strict=True):
        text = "  ".join(f"{cell:>{size}}" for cell, size in zip(line, widths, strict=False)).rstrip()
        if row is not None and row.problem:
            indent = " " * (len(text) + 2)
            lines += wrapped_lines(row.problem, max(width, len(indent) + 20), indent, f"{text}  ")
        else:
            lines.append(text)
    return lines


def described(row: Row) -> str:
    """A row in a few words."""
    return row.problem or rate(row.images_per_s, "img")


def verdict(axes: Sequence[Axis], rows: Sequence[Row]) -> list[str]:
    """What the table shows, with the flags to paste."""
    best, knee = best_of(rows), knee_of(axes, rows)
    if best is None or knee is None:
        return ["no combination could be measured"]
    lines = [f"best: {' '.join(settings_of(axes, best.values))}"]
    if knee is not best:
        less = percent(1 - knee.images_per_s / best.images_per_s)
        lines.append(
            f"knee: {' '.join(settings_of(axes, knee.values))}, the smallest within 5 % of the best ({less} slower)"
        )
    return lines


def as_json(axes: Sequence[Axis], rows: Sequence[Row]) -> dict[str, Any]:
    """For the line of JSON."""
    best, knee = best_of(rows), knee_of(axes, rows)

    def as_dict(row: Row | None) -> dict[str, Any] | None:
        if row is None:
            return None
        known: Mapping[str, Any] = {
            "images_per_s": row.images_per_s,
            "data_share": row.data_share,
            "memory_mb": row.memory_mb,
            "cores": row.cores,
            "error": row.error,
        }
        return {
            "settings": dict(zip((axis.field for axis in axes), row.values, strict=True)),
            **(dict.fromkeys(known) if row.problem else known),
            "problem": row.problem,
        }

    return {"rows": [as_dict(row) for row in rows], "best": as_dict(best), "knee": as_dict(knee)}


def measure_rows(
    axes: Sequence[Axis], measure: Callable[[Sequence[str]], tuple[Evidence, float]]
) -> Iterator[Row]:
    """Measures every combination."""
    for values in combinations(axes):
        try:
            yield row_of(values, *measure(settings_of(axes, values)))
        except UserError as error:
            yield Row(values, problem=error.what.partition("\n")[0])


def _check_value(field: str, value: str) -> None:
    known = recipe_fields()[field]
    try:
        typed = from_text(known.hint, [value])
    except WrongValue:
        raise UserError(
            f"{field}={value}: expected {expected(known.hint)}", f"for example {field}={known.example()}"
        ) from None
    if wrong := known.check(typed):
        raise UserError(f"{field}={value}: {wrong.what}", wrong.fix)


def _cells(row: Row, best: bool, knee: bool) -> list[str]:
    if row.problem:
        return [*row.values]
    mark = ", ".join(word for word, true in (("best", best), ("knee", knee)) if true)
    return [
        *row.values,
        f"{row.images_per_s:,.{0 if row.images_per_s >= 10 else 1}f}",
        percent(row.data_share),
        f"{row.memory_mb:,.0f} MB",
        f"{row.cores:.1f}",
        mark,
    ]
