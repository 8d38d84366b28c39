"""What an evaluation reports beyond its metrics: about each class, about pairs of classes, and about confidence.

Promises: computed from one prediction for each sample, gathered as integers, so it has the same bits on any number of
processes. Probabilities are in fixed point. Classes are those of the model, by name. Pure, except `Predictions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.parallel.world import World
from drumline.training.metrics import BINS, FIXED_POINT, Outputs

Numbers = NDArray[np.int64]
NO_CLASS = -1
"""The prediction of a model whose output contains NaN."""


class Predictions:
    """Collects the predicted class of each sample and its probability while an evaluation runs."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self._rows = torch.zeros((samples, 2), dtype=torch.int64, device=device)

    def add(self, outputs: Outputs) -> None:
        """Records a batch. Never waits for the device."""
        self._rows[outputs.samples, 0] = outputs.prediction - NO_CLASS
        probability = outputs.logits.softmax(dim=1).amax(dim=1).nan_to_num(0.0)
        self._rows[outputs.samples, 1] = probability.mul(FIXED_POINT).round().long()

    def gather(self, world: World) -> tuple[Numbers, Numbers]:
        """The predicted class and the probability, in fixed point, of each sample. Every rank calls it; each sample
        was recorded on one of them."""
        predicted, probability = world.all_reduce(self._rows).cpu().unbind(dim=1)
        return (predicted + NO_CLASS).numpy(), probability.numpy()


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

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: the distance between mean probability and accuracy in each bin of
        probabilities, averaged over the samples."""
        if not self.finite:
            return math.nan
        bins = np.maximum(self.probabilities * BINS - 1, 0) // FIXED_POINT  # a bin includes its upper bound
        gaps = np.zeros(BINS, dtype=np.int64)
        np.add.at(gaps, bins, self.probabilities - FIXED_POINT * self.right.astype(np.int64))
        return int(np.abs(gaps).sum()) / FIXED_POINT / len(self.labels)

    def result(self) -> dict[str, float]:
        """The figures of the whole set, by name."""
        return {
            "balanced_accuracy": self.balanced_accuracy,
            "macro_f1": self.macro_f1,
            "calibration_error": self.calibration_error,
            "mean_confidence": self.confidence,
        }
