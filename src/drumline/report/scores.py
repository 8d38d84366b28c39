"""What an evaluation reports beyond its metrics: about each class, about pairs of classes, and about confidence.

Promises: computed from one prediction for each sample, gathered as integers, so it has the same bits on any number of
processes. Probabilities are in fixed point. Classes are those of the model, by name. Pure, and without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.report.units import BINS, FIXED_POINT

Numbers = NDArray[np.int64]
NO_CLASS = -1
"""The prediction of a model whose output contains NaN."""


@dataclass(frozen=True)
class ClassScore:
    """The result of a model on one class."""

    number: int
    """Its index in the model's outputs."""
    name: str
    samples: int
    correct: int
    predicted: int
    """Samples of any class for which the model predicts this one."""
    confused_with: str
    """The class that it is most often mistaken for; empty if it never is."""
    confused: int
    """How often."""

    @property
    def accuracy(self) -> float:
        """The fraction of its samples that are right, also called recall. NaN if it has no samples."""
        return self.correct / self.samples if self.samples else math.nan

    @property
    def precision(self) -> float:
        """The fraction of its predictions that are right. NaN if there are none."""
        return self.correct / self.predicted if self.predicted else math.nan

    @property
    def f1(self) -> float:
        """The harmonic mean of accuracy and precision."""
        return 2 * self.correct / (self.samples + self.predicted)

    def as_dict(self) -> dict[str, Any]:
        """For the line of JSON."""
        return {
            "class": self.name,
            "samples": self.samples,
            "correct": self.correct,
            "predicted": self.predicted,
            "accuracy": self.accuracy,
            "precision": self.precision,
            "f1": self.f1,
            "confused_with": self.confused_with or None,
            "confused": self.confused,
        }


@dataclass(frozen=True)
class Report:
    """Labels, predictions and probabilities of all samples, by sample id; classes are numbered as in the model."""

    names: Sequence[str]
    """Of the model's classes."""
    labels: Numbers
    predictions: Numbers
    probabilities: Numbers
    """In fixed point."""
    finite: bool
    """Whether all outputs of the model were finite. If not, there are no confidence metrics."""

    @cached_property
    def right(self) -> NDArray[np.bool_]:
        """For each sample, whether its prediction is its label."""
        return self.labels == self.predictions

    @cached_property
    def confusions(self) -> list[tuple[int, int, int]]:
        """Label, prediction and count of each pair that occurs, the most frequent first; ties in the order of the
        classes. Includes the diagonal."""
        many = len(self.names) + 1
        pairs, counts = np.unique(self.labels * many + self.predictions - NO_CLASS, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        labels, predictions = pairs[order] // many, pairs[order] % many + NO_CLASS
        return list(zip(labels.tolist(), predictions.tolist(), counts[order].tolist(), strict=True))

    @cached_property
    def classes(self) -> list[ClassScore]:
        """The classes that have samples or predictions, in the model's order."""
        count = len(self.names)
        samples, predicted, correct = (
            np.bincount(numbers, minlength=count).tolist()
            for numbers in (self.labels, self.predictions[self.predictions >= 0], self.labels[self.right])
        )
        worst: dict[int, tuple[int, int]] = {}
        for label, prediction, often in self.confusions:
            if label != prediction and prediction != NO_CLASS:
                worst.setdefault(label, (prediction, often))
        found = []
        for number in range(count):
            if samples[number] or predicted[number]:
                other, often = worst.get(number, (NO_CLASS, 0))
                name = self.names[other] if often else ""
                found.append(
                    ClassScore(
                        number=number,
                        name=self.names[number],
                        samples=samples[number],
                        correct=correct[number],
                        predicted=predicted[number],
                        confused_with=name,
                        confused=often,
                    )
                )
        return found

    @property
    def balanced_accuracy(self) -> float:
        """The mean accuracy of the classes that have samples."""
        each = [one.accuracy for one in self.classes if one.samples]
        return math.fsum(each) / len(each)

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that have samples or predictions."""
        return math.fsum(one.f1 for one in self.classes) / len(self.classes)

    @property
    def confidence(self) -> float:
        """The mean probability of the predicted classes."""
        return int(self.probabilities.sum()) / FIXED_POINT / len(self.labels) if self.finite else math.nan

    @cached_property
    def calibration(self) -> list[tuple[int, int, int]]:
        """For each bin of probabilities: its samples, how many of them are right, and the sum of their probabilities
        in fixed point."""
        bins = np.maximum(self.probabilities * BINS - 1, 0) // FIXED_POINT  # a bin includes its upper bound
        sums = np.zeros((BINS, 3), dtype=np.int64)
        np.add.at(sums, bins, np.stack([np.ones_like(bins), self.right, self.probabilities], axis=1))
        return [(samples, right, probability) for samples, right, probability in sums.tolist()]

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: the distance between mean probability and accuracy in each bin of
        probabilities, averaged over the samples."""
        if not self.finite:
            return math.nan
        gaps = (abs(probability - FIXED_POINT * right) for _, right, probability in self.calibration)
        return sum(gaps) / FIXED_POINT / len(self.labels)

    def result(self) -> dict[str, float]:
        """The figures of the whole set, by name."""
        return {
            "balanced_accuracy": self.balanced_accuracy,
            "macro_f1": self.macro_f1,
            "calibration_error": self.calibration_error,
            "mean_confidence": self.confidence,
        }
