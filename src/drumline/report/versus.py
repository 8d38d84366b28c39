"""Several runs side by side: their results, the settings in which they differ, and their curves in one chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drumline.config.toml import short_literal
from drumline.core.text import duration, loss_text
from drumline.observe.runs import differences
from drumline.report.charts import DASHES, Axis, Series, line_chart
from drumline.report.elements import Cell, Child, el, table
from drumline.report.learning import FEW_CLASSES, STATES, loss_axis, points
from drumline.report.read import RunFacts

COLOURS = 8


def results(runs: Sequence[RunFacts]) -> Child:
    """A row for each run; the best value of each column is marked."""
    columns: list[tuple[str, list[float | None], Any, bool]] = [
        ("best top-1", [run.score(run.best, "top1") for run in runs], "{:.2%}".format, True),
        ("top-5", [run.score(run.best, "top5") for run in runs], "{:.2%}".format, True),
        ("loss", [run.score(run.best, "loss") for run in runs], loss_text, False),
        (
            "ECE",
            [run.report.calibration_error if run.report else None for run in runs],
            "{:.1%}".format,
            False,
        ),
        ("img/s", [_speed(run) for run in runs], "{:,.0f}".format, True),
        ("time", [run.summary.seconds for run in runs], duration, False),
    ]
    if all(len(run.classes) < FEW_CLASSES for run in runs):
        del columns[1]
    header: list[Cell] = ["run", "state", "epoch", *(name for name, *_ in columns)]
    rows: list[list[Cell]] = []
    for number, run in enumerate(runs):
        row: list[Cell] = [
            [el("i", class_=f"patch b{1 + number % COLOURS}", aria_hidden="true"), names(runs)[number]],
            f"{STATES.get(run.summary.state, '')} {run.summary.state}",
            f"{run.summary.epoch:.3g}",
        ]
        for _, values, text, higher in columns:
            known = [value for value in values if value is not None]
            value = values[number]
            top = value is not None and len(known) > 1 and value == (max(known) if higher else min(known))
            shown = "–" if value is None else text(value)
            row.append(el("b", f"{shown} ★", title="best of these runs") if top else shown)
        rows.append(row)
    return table("Results", header, rows)


def settings(runs: Sequence[RunFacts]) -> Child:
    """The settings that are not the same in all runs."""
    varied = differences([run.summary for run in runs])
    fields = sorted({name for each in varied for name in each})
    if not fields:
        return el("p", "All settings are the same.")
    rows = [
        [name, *(short_literal(each[name]) if name in each else "–" for each in varied)] for name in fields
    ]
    return table("Settings that differ", ["setting", *names(runs)], rows, numbers=False)


def curves(runs: Sequence[RunFacts]) -> list[Child]:
    """The charts with a line for each run."""
    evals = [run.evals for run in runs]
    train = [run.train for run in runs]
    percent = Axis("accuracy", "{:.0%}".format)
    loss = _lines(runs, evals, "loss", marked=True)
    training = _lines(runs, train, "loss")
    charts = [
        line_chart("Top-1", _lines(runs, evals, "top1", marked=True), percent),
        line_chart("Evaluation loss", loss, loss_axis([y for each in loss for _, y in each.points])),
        line_chart("Training loss", training, loss_axis([y for each in training for _, y in each.points])),
    ]
    if any(len(run.classes) >= FEW_CLASSES for run in runs):
        charts.append(line_chart("Top-5", _lines(runs, evals, "top5", marked=True), percent))
    charts += [
        line_chart("Learning rate", _lines(runs, train, "lr"), Axis("learning rate", "{:.2g}".format)),
        line_chart(
            "Throughput, img/s",
            _lines(runs, train, "images_per_s"),
            Axis("images per second", "{:,.0f}".format, low=0.0),
        ),
    ]
    return [chart for chart in charts if chart is not None]


def by_class(runs: Sequence[RunFacts]) -> list[Child]:
    """The classes in which the runs differ most."""
    if any(run.report is None for run in runs) or len({run.classes for run in runs}) > 1:
        return []
    found: dict[str, list[float]] = {}
    for run in runs:
        assert run.report is not None
        for one in run.report.classes:
            if one.samples:
                found.setdefault(one.name, []).append(one.accuracy)
    whole = {name: values for name, values in found.items() if len(values) == len(runs)}
    widest = sorted(whole, key=lambda name: min(whole[name]) - max(whole[name]))[:12]
    rows = [[name, *(f"{value:.1%}" for value in whole[name])] for name in widest]
    return [table("Accuracy of the classes that differ most", ["class", *names(runs)], rows)] if rows else []


def names(runs: Sequence[RunFacts]) -> list[str]:
    """The names of the runs; their paths if some have the same name."""
    short = [run.name for run in runs]
    return short if len(set(short)) == len(short) else [run.summary.path for run in runs]


def _lines(
    runs: Sequence[RunFacts], lines: Sequence[Sequence[Mapping[str, Any]]], name: str, marked: bool = False
) -> list[Series]:
    return [
        Series(label, points(own, name), 1 + number % COLOURS, number % len(DASHES), marked)
        for number, (label, own) in enumerate(zip(names(runs), lines, strict=True))
    ]


def _speed(run: RunFacts) -> float | None:
    intervals = run.evidence.intervals
    return intervals[-1].images_per_s if intervals else None
