"""A report agrees with sums done by hand, and its lines fit the terminal."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch
from rich.cells import cell_len

from drumline.data.sources import ArrayDataset
from drumline.parallel.world import single_process
from drumline.report.scores import Report
from drumline.report.units import BINS, FIXED_POINT
from drumline.training.metrics import Outputs
from drumline.training.predictions import Predictions
from drumline.training.report_output import class_lines, confusion_csv, predictions_csv, summary
from tests.training import tiny

NAN = math.nan


def report(
    labels: list[int], predictions: list[int], names: str = "abcd", probability: float = 0.5
) -> Report:
    """A report of a model that gives every prediction the same probability."""
    fixed = np.full(len(labels), round(probability * FIXED_POINT))
    return Report(tuple(names), np.array(labels), np.array(predictions), fixed, finite=True)


def random_report(classes: int, samples: int, names: list[str] | None = None) -> Report:
    draw = np.random.default_rng(classes)
    labels = draw.integers(0, classes, samples)
    predictions = np.where(draw.random(samples) < 0.6, labels, draw.integers(0, classes, samples))
    fixed = np.rint(draw.random(samples) * FIXED_POINT).astype(np.int64)
    return Report(names or [f"class {n}" for n in range(classes)], labels, predictions, fixed, finite=True)


def test_classes_are_counted_with_what_they_are_most_often_taken_for() -> None:
    found = report([0, 0, 0, 0, 1, 1], [0, 1, 3, 3, 1, 1]).classes
    assert [(one.name, one.samples, one.correct, one.predicted) for one in found] == [
        ("a", 4, 1, 1),
        ("b", 2, 2, 3),
        ("d", 0, 0, 2),
    ]
    assert [(one.confused_with, one.confused) for one in found] == [("d", 2), ("", 0), ("", 0)]
    assert (found[0].accuracy, found[0].precision, found[0].f1) == (0.25, 1.0, 0.4)
    assert (found[1].accuracy, found[1].precision, found[1].f1) == (1.0, 2 / 3, 0.8)
    assert math.isnan(found[2].accuracy)


def test_balanced_accuracy_and_f1_are_means_over_classes() -> None:
    found = report([0, 0, 0, 0, 1, 1], [0, 1, 3, 3, 1, 1])
    assert found.balanced_accuracy == (0.25 + 1.0) / 2
    assert found.macro_f1 == pytest.approx((0.4 + 0.8 + 0.0) / 3, rel=1e-15)


def test_the_calibration_error_is_the_gap_in_each_bin() -> None:
    found = random_report(7, 900)
    probability, right = found.probabilities / FIXED_POINT, found.labels == found.predictions
    expected = 0.0
    for index in range(BINS):
        inside = (probability > index / BINS) & (probability <= (index + 1) / BINS)
        if inside.any():
            expected += inside.mean() * abs(probability[inside].mean() - right[inside].mean())
    assert found.calibration_error == pytest.approx(expected, abs=1e-12)
    assert found.confidence == pytest.approx(probability.mean(), abs=1e-12)
    assert report([0, 1], [0, 1], probability=1.0).calibration_error == 0
    assert report([0, 1], [0, 0], probability=0.75).calibration_error == 0.25
    assert report([0, 1], [1, 0], probability=0.0).calibration_error == 0, (
        "a probability of 0 is in the first bin"
    )


def test_predictions_equal_those_that_the_metrics_count() -> None:
    """With ties, and NaN, of which no class is predicted."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 3, (200, 6), generator=draw).float()
    logits[7, 3] = NAN
    labels = torch.randint(0, 6, (200,), generator=draw)
    seen = Predictions(200, tiny.CPU)
    order = torch.randperm(200, generator=draw)
    for rows in order.split(33):
        seen.add(Outputs(logits[rows], labels[rows], rows))
    predicted, probability = seen.gather(single_process(tiny.CPU))
    assert predicted[7] == -1
    assert (predicted == labels.numpy()).tolist() == (Outputs(logits, labels, order).rank < 1).tolist()
    expected = logits.softmax(1).amax(1).nan_to_num(0.0)
    assert np.abs(probability / FIXED_POINT - expected.numpy()).max() <= 0.5 / FIXED_POINT


def test_nothing_is_said_about_confidence_if_an_output_is_not_finite() -> None:
    found = Report("ab", np.array([0, 1]), np.array([0, -1]), np.zeros(2, dtype=np.int64), finite=False)
    assert [name for name, value in found.result().items() if math.isnan(value)] == [
        "calibration_error",
        "mean_confidence",
    ]
    assert "ECE" not in summary(found)
    assert len(summary(report([0] * 9, [0] * 9, probability=1.0))) <= 80
    assert found.balanced_accuracy == 0.5
    assert confusion_csv(found) == "label \\ prediction,a,b,\na,1,0,0\nb,0,0,1\n"
    assert not any("prediction" in line for line in class_lines(found, 80)), (
        "no matrix whose rows do not add up"
    )


def test_the_worst_class_comes_first_and_the_matrix_adds_up() -> None:
    found = report([0, 0, 0, 0, 1, 1, 2], [0, 1, 3, 3, 1, 1, 0])
    lines = class_lines(found, 80)
    assert [line.split()[0] for line in lines[1:4]] == ["c", "a", "b"]
    assert lines[2].split() == ["a", "4", "1", "25.0%", "d", "(2)"]
    assert lines[5].split() == ["label", "\\", "prediction", "1", "2", "3", "4"]
    assert [line.split() for line in lines[6:]] == [
        ["1", "a", "1", "1", ".", "2"],
        ["2", "b", ".", "2", ".", "."],
        ["3", "c", "1", ".", ".", "."],
        ["4", "d", ".", ".", ".", "."],
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("classes", [2, 6, 37, 41, 1000])
def test_lines_fit_the_terminal_and_a_thousand_classes_do_not_flood_it(classes: int, width: int) -> None:
    long = "a long name with \x1b[31m and 漢字 of class "
    names = [f"{long[: 3 + 7 * (n % 6)]} {n}" for n in range(classes)]
    lines = class_lines(random_report(classes, 20 * classes, names), width)
    assert all(cell_len(line) <= width for line in lines)
    assert all("\x1b" not in line for line in lines)
    assert len(lines) < (40 if classes > 40 else 2 * classes + 6)
    if classes == 1000:
        assert lines[21] == "... and 980 more (in the JSON result)"
        assert lines[23] == "most confused classes:"


def test_a_class_that_is_taken_for_thousands_of_others_has_no_matrix() -> None:
    samples = 20_000
    labels, fixed = np.zeros(samples, dtype=np.int64), np.zeros(samples, dtype=np.int64)
    found = Report([f"n{n}" for n in range(samples)], labels, np.arange(samples), fixed, finite=True)
    lines = class_lines(found, 80)
    assert lines[1].split() == ["n0", "20,000", "1", "0.0%", "n1", "(1)"]
    assert lines[3] == "most confused classes:"
    assert len(lines) == 14


def test_predictions_are_a_row_for_each_sample() -> None:
    images = np.zeros((3, 2, 2, 1), dtype=np.uint8)
    data = ArrayDataset("npz", images, np.array([0, 1, 1]), ("a", "b"))
    found = report([0, 1, 1], [0, 0, 1], 'a"', probability=0.25)
    rows = list(csv.reader(predictions_csv(found, data, {2: "truncated"}).splitlines()))
    assert rows == [
        ["sample", "label", "prediction", "probability", "correct", "error"],
        ["0", "a", "a", "0.250000", "true", ""],
        ["1", '"', "a", "0.250000", "false", ""],
        ["2", '"', '"', "0.250000", "true", "truncated"],
    ]
