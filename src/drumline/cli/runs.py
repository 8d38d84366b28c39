"""`drumline runs`: a table of runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.config.fields import recipe_fields
from drumline.config.toml import short_literal
from drumline.core.errors import UserError
from drumline.core.text import duration, loss_text, print_result, printable
from drumline.observe.runs import RunSummary, differences, find_runs, repeats, statistics_of
from drumline.training.defaults import CHOICES
from drumline.training.metrics import METRICS


@dataclass(frozen=True)
class Options:
    """The arguments of `drumline runs`."""

    folders: tuple[str, ...]
    """Folders that contain run folders, or run folders."""


COMMAND = Command(
    name="runs",
    usage="[FOLDER ...]",
    about="""
        List runs with their results and how they differ, in the order of their start.
        FOLDER contains run folders, or is one; the default is `runs`. `settings` has the
        fields of the recipe that are not the same in all listed runs. `best` is the best
        evaluation by the run's own metric (checkpoint.best). Finished runs that differ only in
        run.seed (`drumline train --repeat 5`) or in data.fold (a cross-validation) are
        summarised below the table with mean and standard deviation.

        A run is running, finished, stopped (it has saved and can be resumed), failed (its
        log.txt says why) or killed (`drumline resume RUN` resumes it).

        If stdout is not a terminal, its last line is JSON: a list with an entry for each run.
    """,
    options=Options,
    examples="""
  drumline runs
  drumline runs runs/photos-1 runs/photos-2
""",
)
DEFAULT = "runs"
"""The folder that `run.dir` means by default."""
_LABELS = {metric.name: metric.label for metric in METRICS}
_HEADER = ("run", "state", "epoch", "top-1", "best", "loss", "time", "settings")


def main(argv: list[str]) -> int:
    folders = [Path(name) for name in read_options(argv or [DEFAULT], Options, "runs").folders]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}", "give a folder that contains runs (`--run.dir`)")
    runs = find_runs(folders)
    if not runs:
        raise UserError(
            f"{' and '.join(map(str, folders))} has no runs", "give a folder that contains run folders"
        )
    varied = differences(runs)
    width = get_terminal_size().columns if sys.stdout.isatty() else 1 << 16
    varying = [(group, field) for field in ("run.seed", "data.fold") for group in repeats(runs, field)]
    for line in (*table(runs, varied, width), *chain.from_iterable(repeat_lines(*each) for each in varying)):
        print(line)
    print_result([{**asdict(run), "settings": own} for run, own in zip(runs, varied, strict=True)])
    return 0


def table(runs: Sequence[RunSummary], varied: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """The lines of the table. Numbers that do not fit are left out, and settings are wrapped."""
    rows = [_HEADER, *(_row(run, own) for run, own in zip(runs, varied, strict=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    columns = list(range(len(widths)))
    for spare in _SPARE:
        if sum(widths[column] + 2 for column in columns) > width:
            columns.remove(_HEADER.index(spare))
    lines = []
    for row in rows:
        left = "  ".join(
            f"{row[column]:<{widths[column]}}" if column < 2 else f"{row[column]:>{widths[column]}}"
            for column in columns
        )
        lines += _wrapped(left, row[-1], width)
    return lines


def repeat_lines(runs: Sequence[RunSummary], field: str = "run.seed") -> list[str]:
    """How much the results of runs that differ in this field vary, at the end and in the best evaluation."""
    metric, ended = runs[0].best_metric, [run for run in runs if run.state == "finished"]
    lines = []
    for what, values, text in (
        ("top-1 at the end", [run.top1 for run in ended], "{:.2%}".format),
        (f"best {_LABELS.get(metric, metric)}", [run.best_value for run in ended], _text_of(metric)),
    ):
        if found := statistics_of(values):
            lines.append(
                f"{what} {text(found.mean)} ± {text(found.std)} ({text(found.min)} to {text(found.max)})"
            )
    if not lines:
        return []
    names = f"{printable(ended[0].path)} and {len(ended) - 1} more that differ in {field}"
    return ["", f"{names}: mean ± standard deviation", *(f"  {line}" for line in lines)]


_SPARE = ("time", "loss", "top-1", "epoch")
"""Columns that a narrow terminal does without, the least important first."""
_NARROW = 24
"""Characters that the settings need to stand beside the numbers."""


def _wrapped(left: str, settings: str, width: int) -> list[str]:
    """A row whose settings continue below, in their column or, if that is narrow, indented."""
    if not settings:
        return [left.rstrip()]
    column = len(left) + 2
    if width - column >= _NARROW:
        lines, line, start = [], left + "  ", column
    else:
        lines, line, start = [left.rstrip()], " " * 4, 4
    for text in settings.split("  "):
        if len(line) > start and len(line) + len(text) > width:
            lines, line = [*lines, line.rstrip()], " " * start
        line += text + "  "
    return [*lines, line.rstrip()]


def _row(run: RunSummary, varied: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a run. Settings that a run may choose itself come last. A setting that is the default is left out,
    and so is train.epochs if train.steps decides."""
    known = recipe_fields()
    own = {
        name: value
        for name, value in varied.items()
        if name not in known or _plain(known[name].default) != value
    }
    if run.settings and run.settings.get("train.steps"):
        own.pop("train.epochs", None)
    ordered = sorted(own, key=lambda name: name in CHOICES or name in ("data.mean", "data.std"))
    settings = "  ".join(printable(f"{name}={_text(own[name])}") for name in ordered)
    return (
        printable(run.path),
        run.state,
        f"{round(run.epoch, 1):g}" if run.step else "-",
        f"{run.top1:.2%}" if run.top1 is not None else "-",
        _best(run),
        loss_text(run.loss) if run.loss is not None else "-",
        duration(run.seconds),
        "recipe.toml cannot be read" if run.settings is None else settings,
    )


def _best(run: RunSummary) -> str:
    """The best value of the run's metric and its epoch; with the name of the metric unless it is top-1."""
    if run.best_value is None or run.best_epoch is None:
        return "-"
    value = _text_of(run.best_metric)(run.best_value)
    name = f"{run.best_metric} " if run.best_metric != "top1" else ""
    return f"{name}{value} at {round(run.best_epoch, 1):g}"


def _text_of(metric: str) -> Callable[[float], str]:
    """The format of a metric's values. A metric of a task, such as agreement, is a fraction."""
    return next((each.text for each in METRICS if each.name == metric), "{:.2%}".format)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return value if isinstance(value, str) else short_literal(value)
