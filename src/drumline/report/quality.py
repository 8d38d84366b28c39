"""How good a model is: confusions, classes, calibration, agreement with the teacher, and pictures of mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from drumline.report.charts import reliability
from drumline.report.elements import Cell, Child, el, folded, table
from drumline.report.read import RunFacts
from drumline.report.record import TILE, Sheet
from drumline.report.scores import NO_CLASS, ClassScore, Report
from drumline.report.units import FIXED_POINT

MATRIX = 20
"""Classes of the largest confusion matrix."""
PAIRS = 12
LISTED = 24
"""Classes that are listed at once; the others are folded."""
FOLDED = 5_000
"""The most that are folded: 200,000 classes would be a page of 33 MB."""


def confusion(run: RunFacts) -> list[Child]:
    """The confusion matrix, or its most confused part, and the most confused pairs."""
    if (report := run.report) is None:
        return []
    chosen = _chosen(report)
    if len(chosen) < 2:
        return []
    place = {number: index for index, number in enumerate(chosen)}
    cells = [[0] * len(chosen) for _ in chosen]
    totals = {one.number: one.samples for one in report.classes}
    for label, prediction, often in report.confusions:
        if label in place and prediction in place:
            cells[place[label]][place[prediction]] = often
    whole = len(chosen) == len(report.classes)
    title = (
        "Confusion matrix"
        if whole
        else f"Confusion matrix of the {len(chosen)} classes that are confused most"
    )
    rows: list[Sequence[Cell]] = []
    for label, counts in zip(chosen, cells, strict=True):
        row: list[Cell] = [report.names[label]]
        for prediction, often in zip(chosen, counts, strict=True):
            share = often / totals[label] if totals[label] else 0.0
            row.append(_cell(report, label, prediction, often, share))
        rows.append(row)
    header: list[Cell] = [el("span", "label ↓ prediction →", class_="corner")]
    header += [el("span", report.names[number], class_="tilt") for number in chosen]
    matrix = table(title, header, rows, class_="matrix", numbers=False)
    return [el("div", matrix, pairs(report), class_="pair")]


def _chosen(report: Report) -> list[int]:
    """All classes, in their order, if there are few; otherwise those of the most frequent confusions, those that are
    confused with each other side by side."""
    if len(report.classes) <= MATRIX:
        return [one.number for one in report.classes]
    found: dict[int, None] = {}
    for label, prediction, _ in report.confusions:
        if label != prediction and prediction != NO_CLASS and len(found) < MATRIX:
            found.update({label: None, prediction: None})
    return list(found)[:MATRIX]


def _cell(report: Report, label: int, prediction: int, often: int, share: float) -> Element:
    right = label == prediction
    names = report.names[label], report.names[prediction]
    text = f"{names[0]}: {often:,} right" if right else f"{names[0]} taken for {names[1]}: {often:,}"
    shade = f"--a:{0.08 + 0.62 * math.sqrt(share):.2f}" if often else None  # any text stays readable on it
    kind = "hit" if right else "miss"
    return el("span", f"{often:,}" if often else "·", class_=kind, style=shade, title=f"{text} ({share:.0%})")


def pairs(report: Report) -> Element | None:
    """The most frequent confusions."""
    found = [each for each in report.confusions if NO_CLASS != each[1] != each[0]][:PAIRS]
    totals = {one.number: one.samples for one in report.classes}
    rows = [
        [report.names[label], report.names[prediction], f"{often:,}", f"{often / max(1, totals[label]):.0%}"]
        for label, prediction, often in found
    ]
    header = ["class", "taken for", "times", "of its samples"]
    return table("Most confused pairs", header, rows) if rows else None


def classes(run: RunFacts) -> list[Child]:
    """The accuracy of each class, the worst first."""
    if (report := run.report) is None:
        return []
    scored = sorted(
        (one for one in report.classes if one.samples), key=lambda one: (one.accuracy, -one.samples)
    )
    shown = scored if len(scored) <= LISTED else scored[: LISTED - 6] + scored[-6:]
    title = "Accuracy by class, the worst first"
    if len(scored) > LISTED:
        title = f"The {LISTED - 6} worst and the 6 best of {len(scored):,} classes"
    parts: list[Child] = [_class_table(title, shown)]
    if len(scored) > LISTED:
        every = _class_table("Accuracy by class, the worst first", scored[:FOLDED])
        title = f"All {len(scored):,} classes" if len(scored) <= FOLDED else f"The {FOLDED:,} worst classes"
        parts.append(folded(title, every))
    return parts


def _class_table(title: str, scored: Sequence[ClassScore]) -> Element:
    rows: list[list[Cell]] = [
        [
            one.name,
            el("div", el("i", style=f"width:{one.accuracy:.1%}"), class_="meter", aria_hidden="true"),
            f"{one.accuracy:.1%}",
            f"{one.precision:.1%}" if one.predicted else "–",
            f"{one.samples:,}",
            f"{one.confused_with} ({one.confused:,})" if one.confused else "–",
        ]
        for one in scored
    ]
    return table(title, ["class", "", "accuracy", "precision", "samples", "most often taken for"], rows)


def calibration(run: RunFacts) -> list[Child]:
    """The calibration."""
    if (report := run.report) is None:
        return []
    bins = [
        (samples, right / samples, probability / FIXED_POINT / samples) if samples else (0, 0.0, 0.0)
        for samples, right, probability in report.calibration
    ]
    accuracy = sum(samples * right for samples, right, _ in bins) / len(report.labels)
    gap = report.confidence - accuracy
    how = "over-confident" if gap > 0 else "under-confident"
    text = (
        f"Expected calibration error {report.calibration_error:.1%}. The mean confidence is {report.confidence:.1%}, "
        f"the accuracy {accuracy:.1%}: "
    )
    text += (
        f"the model is {how} by {abs(gap):.1%}."
        if abs(gap) >= 0.005
        else "on average, the model is well calibrated."
    )
    return [el("p", text), el("div", reliability(bins), class_="charts")]


def teacher(run: RunFacts) -> list[Child]:
    """How student and teacher agree."""
    report, evaluation = run.report, run.evaluation
    if report is None or evaluation is None or evaluation.teacher is None:
        return []
    asked = evaluation.teacher >= 0
    total = int(asked.sum())
    if not total:
        return []
    own, theirs = report.right[asked], evaluation.labels[asked] == evaluation.teacher[asked]
    same = evaluation.predictions[asked] == evaluation.teacher[asked]
    counts = {
        "both right": int((own & theirs).sum()),
        "only the student right": int((own & ~theirs).sum()),
        "only the teacher right": int((~own & theirs).sum()),
        "both wrong, the same class": int((~own & ~theirs & same).sum()),
        "both wrong, different classes": int((~own & ~theirs & ~same).sum()),
    }
    text = (
        f"The student predicts the teacher's class for {same.mean():.1%} of {total:,} images. "
        f"The teacher is right on {theirs.mean():.1%}, the student on {own.mean():.1%}."
    )
    bar = el(
        "div",
        [
            el(
                "i",
                class_=f"seg t{number}",
                style=f"width:{100 * count / total:.2f}%",
                title=f"{name}: {count:,}",
            )
            for number, (name, count) in enumerate(counts.items())
        ],
        class_="bar tall",
        aria_hidden="true",
    )
    rows: list[list[Cell]] = [
        [[el("i", class_=f"patch t{number}", aria_hidden="true"), name], f"{count:,}", f"{count / total:.1%}"]
        for number, (name, count) in enumerate(counts.items())
    ]
    return [el("p", text), bar, table("Student and teacher", ["", "images", "share"], rows)]


def mistakes(run: RunFacts) -> list[Child]:
    """The worst mistakes of the recorded evaluation."""
    sheet, evaluation = run.mistakes, run.evaluation
    if run.report is None or sheet is None or evaluation is None or sheet.step != evaluation.step:
        return []
    text = (
        "The wrong predictions with the highest confidence, each with its probability and, below, the label. "
        "Wrong labels often appear here."
    )
    return [el("p", text), pictures(sheet, wrong=True)]


def batch(run: RunFacts) -> list[Child]:
    """What the model sees in training."""
    if run.batch is None:
        return []
    text = f"The first images of the batch of step {run.batch.step + 1:,}, as the model sees them."
    return [el("p", text), pictures(run.batch, wrong=False)]


def pictures(sheet: Sheet, wrong: bool) -> Element:
    """A sheet as a list of pictures with captions."""
    tiles = []
    scale = TILE / max(sheet.width, sheet.height)
    width, height = round(sheet.width * scale), round(sheet.height * scale)
    rows = -(-len(sheet.tiles) // sheet.columns)
    for number, tile in enumerate(sheet.tiles):
        x, y = number % sheet.columns * width, number // sheet.columns * height
        name = f"{tile.sample}: {tile.label} taken for {tile.prediction}" if wrong else tile.label
        picture = el(
            "span",
            class_="picture",
            role="img",
            aria_label=name,
            title=tile.sample or None,
            style=f"width:{width}px;height:{height}px;background-position:-{x}px -{y}px",
        )
        caption: list[Child] = [el("b", tile.label)]
        if wrong:
            caption = [
                el("b", tile.prediction),
                f" {tile.probability:.0%}",
                el("br"),
                el("small", f"is {tile.label}"),
            ]
        tiles.append(el("li", picture, el("span", caption, class_="caption")))
    size = f"{sheet.columns * width}px {rows * height}px"
    # Once for all pictures: the image is the largest part of the page.
    rule = f"--sheet:url({sheet.image});--size:{size}"
    return el("ul", tiles, class_="pictures" + (" pixels" if scale >= 2 else ""), style=rule)
