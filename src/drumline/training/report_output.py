"""A report as lines for a terminal, and as CSV files.

Promises: lines fit the given width. Of many classes, only the worst are shown. Names from a data set cannot control a
terminal.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size

from drumline.core.errors import UserError
from drumline.core.files import write_output
from drumline.core.progress import progress
from drumline.core.text import printable
from drumline.data.sources import Dataset, EncodedDataset
from drumline.report.scores import NO_CLASS, ClassScore, Report
from drumline.report.units import FIXED_POINT

FEW = 40
"""Up to this number of classes, all are listed."""
WORST = 20
"""Number of listed classes if there are more."""
PAIRS = 10
"""Number of listed pairs of confused classes if the matrix is too large."""
_LONGEST = 32
"""Characters of a name in a table."""


def summary(report: Report) -> str:
    """The figures of the whole set in one line, which fits 80 columns."""
    text = f"balanced accuracy {report.balanced_accuracy:.2%}, macro F1 {report.macro_f1:.2%}"
    if report.finite:
        text += f", ECE {report.calibration_error:.2%}, confidence {report.confidence:.2%}"
    return text


def class_lines(report: Report, width: int) -> list[str]:
    """A table of the classes, the worst first, and the confusion matrix if it fits, otherwise the most confused
    pairs."""
    scored = sorted(
        (one for one in report.classes if one.samples), key=lambda one: (one.accuracy, -one.samples)
    )
    many = len(scored) > FEW
    shown = scored[:WORST] if many else scored
    lines = _class_table(shown, width)
    if many:
        lines.append(f"... and {len(scored) - WORST:,} more (in the JSON result)")
    more = ([] if many else _matrix_lines(report, width)) or _pair_lines(report, width)
    return [*lines, "", *more] if more else lines


def _class_table(classes: Sequence[ClassScore], width: int) -> list[str]:
    header = ("class", "samples", "correct", "accuracy", "most often mistaken for")
    rows = [
        (
            printable(one.name),
            f"{one.samples:,}",
            f"{one.correct:,}",
            f"{one.accuracy:.1%}",
            f"{printable(one.confused_with)} ({one.confused:,})" if one.confused else "-",
        )
        for one in classes
    ]
    numbers = [max(len(row[column]) for row in (header, *rows)) for column in (1, 2, 3)]
    spare = width - sum(numbers) - 8  # two spaces between columns
    wanted = min(_LONGEST, max(cell_len(row[0]) for row in (header, *rows)))
    first = max(
        min(8, wanted), min(wanted, spare - min(20, max(cell_len(row[4]) for row in (header, *rows))))
    )
    last = max(0, spare - first)
    lines = []
    for row in (header, *rows):
        cells = [_fitted(row[0], first)]
        cells += [f"{text:>{wide}}" for text, wide in zip(row[1:4], numbers, strict=True)]
        lines.append("  ".join([*cells, _fitted(row[4], last)]).rstrip())
    return lines


def _pair_lines(report: Report, width: int) -> list[str]:
    pairs = [each for each in report.confusions if NO_CLASS != each[1] != each[0]][:PAIRS]
    if not pairs:
        return []
    wide = max(len(f"{often:,}") for _, _, often in pairs)
    lines = ["most confused classes:"]
    for label, prediction, often in pairs:
        text = f"{printable(report.names[label])} mistaken for {printable(report.names[prediction])}"
        lines.append(f"  {often:>{wide},}  {_fitted(text, max(8, width - wide - 4)).rstrip()}")
    return lines


def _matrix_lines(report: Report, width: int) -> list[str]:
    """The confusion matrix with a row for each label and a numbered column for each prediction; empty if it does not
    fit."""
    names = [one.name for one in report.classes]
    too_wide = 3 * len(names) > width  # checked first: of 20,000 classes, the matrix would fill the memory
    if too_wide or any(prediction == NO_CLASS for _, prediction, _ in report.confusions):
        return []  # with NaN, the rows would not add up
    rows = list(_matrix_rows(report))
    cell = 2 + max(len(f"{max(map(max, rows)):,}"), len(str(len(names))))
    number = len(str(len(names)))
    title = "label \\ prediction"
    spare = width - cell * len(names) - number - 1
    if spare < 12:
        return []
    first = min(spare, _LONGEST, max(map(cell_len, (title, *map(printable, names)))))
    lines = [
        _fitted(title, first + number + 1) + "".join(f"{index:>{cell}}" for index in range(1, len(names) + 1))
    ]
    for index, (name, row) in enumerate(zip(names, rows, strict=True), 1):
        cells = "".join(f"{count:>{cell},}" if count else f"{'.':>{cell}}" for count in row)
        lines.append(f"{index:>{number}} {_fitted(printable(name), first)}{cells}")
    return lines


def _fitted(text: str, width: int) -> str:
    """The text, padded or cut to exactly this many terminal cells."""
    if cell_len(text) > width:
        return set_cell_size(text, max(0, width - 3)) + "..."[:width]
    return set_cell_size(text, width)


def confusion_csv(report: Report) -> str:
    """The confusion matrix: a row for each label, a column for each prediction, of the classes that have samples or
    predictions. A last column, without a name, counts outputs with NaN, if there are any."""
    nan = bool((report.predictions == NO_CLASS).any())
    names = [_text(one.name) for one in report.classes]
    rows = ([name, *row] for name, row in zip(names, _matrix_rows(report), strict=True))
    return _csv([["label \\ prediction", *names, *([""] * nan)], *rows])


def _matrix_rows(report: Report) -> Iterator[list[int]]:
    position = {one.number: index for index, one in enumerate(report.classes)}
    nan = bool((report.predictions == NO_CLASS).any())
    cells: dict[int, dict[int, int]] = {}
    for label, prediction, often in report.confusions:
        column = len(position) if prediction == NO_CLASS else position[prediction]
        cells.setdefault(position[label], {})[column] = often
    for index in range(len(position)):
        row = cells.get(index, {})
        yield [row.get(column, 0) for column in range(len(position) + nan)]


def write_files(
    report: Report,
    dataset: Dataset,
    broken: Mapping[int, str],
    predictions: str,
    confusion: str,
    log: Callable[[str], None],
) -> None:
    """Writes the files that are asked for, and logs a line for each."""
    if predictions:
        watch = partial(progress, text="writing predictions")
        _write("--predictions", predictions, predictions_csv(report, dataset, broken, watch))
        log(f"predictions written to {predictions}")
    if confusion:
        _write("--confusion", confusion, confusion_csv(report))
        log(f"confusion matrix written to {confusion}")


def _write(option: str, path: str, text: str) -> None:
    try:
        write_output(Path(path), text.encode())
    except OSError as error:
        raise UserError(
            f"{option} {path} cannot be written: {error.strerror or error}", "free space, or write elsewhere"
        ) from error


def predictions_csv(
    report: Report,
    dataset: Dataset,
    broken: Mapping[int, str],
    watch: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> str:
    """A row for each sample in the order of the data: its path (or its number, for arrays), label, prediction, the
    probability of the prediction, and whether that is right. `error` says why a broken sample was scored as a black
    image."""
    rows: list[Sequence[Any]] = [("sample", "label", "prediction", "probability", "correct", "error")]
    for sample in watch(range(len(report.labels))):
        label, prediction = int(report.labels[sample]), int(report.predictions[sample])
        rows.append(
            (
                _text(dataset.where(sample)) if isinstance(dataset, EncodedDataset) else sample,
                _text(report.names[label]),
                "" if prediction == NO_CLASS else _text(report.names[prediction]),
                f"{int(report.probabilities[sample]) / FIXED_POINT:.6f}" if prediction != NO_CLASS else "",
                "true" if label == prediction else "false",
                _text(broken.get(sample, "")),
            )
        )
    return _csv(rows)


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _text(name: str) -> str:
    """A name as valid Unicode: bytes of a file name that are not UTF-8 become `\\udcff` and the like."""
    return name.encode("utf-8", "backslashreplace").decode()
