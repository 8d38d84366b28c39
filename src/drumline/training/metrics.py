"""The metrics of an evaluation, in one table: logs, results, `drumline eval` and its help are made from it.

To add a metric, write a function that gives its value for each sample of a batch, and add an entry to `METRICS`.

Promises: a metric has the same bits on any number of processes and in any layout. It is computed from sums over the
samples, which do not depend on the order of addition: counts are integers, and fractions are summed in fixed point.
No value is made up: a metric that sums fractions is NaN when an output of the model is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from drumline.core.text import loss_text
from drumline.report.units import FIXED_POINT

if TYPE_CHECKING:  # `drumline eval --help` lists the table without importing torch
    from torch import Tensor

LARGEST_SUM = 2.0**38
"""The largest sum of fractions over a set: in fixed point, it fits into 64 bits in any order of addition."""


@dataclass(frozen=True)
class Outputs:
    """The model's outputs on a batch, as metrics see them."""

    logits: Tensor
    """fp32, (samples, classes)."""
    labels: Tensor
    samples: Tensor
    """The ids of the samples."""

    @cached_property
    def rank(self) -> Tensor:
        """The number of classes that precede each label; of equal logits, the lower class comes first. In a row with
        NaN the label comes last, so a broken model is never right."""
        import torch

        logits, labels = self.logits, self.labels[:, None]
        own, classes = logits.gather(1, labels), torch.arange(logits.shape[1], device=logits.device)
        before = (logits > own) | ((logits == own) & (classes < labels))
        return before.sum(dim=1).masked_fill(logits.isnan().any(dim=1), _LAST)

    @cached_property
    def prediction(self) -> Tensor:
        """The class of each row's largest logit, the lowest one in a tie; -1 in a row with NaN."""
        import torch

        logits = self.logits
        classes = torch.arange(logits.shape[1], device=logits.device)
        first = classes.where(logits == logits.amax(dim=1, keepdim=True), _LAST).amin(dim=1)
        return first.masked_fill(logits.isnan().any(dim=1), -1)


_LAST = 1 << 30


def mean(totals: Sequence[float], samples: int) -> float:
    """The mean over the samples of a metric with one number per sample."""
    return totals[0] / samples


@dataclass(frozen=True)
class Metric:
    """An entry of the table."""

    name: str
    """In metrics.jsonl, TensorBoard and results."""
    about: str
    """For the help of `drumline eval`."""
    rows: Callable[[Outputs], Tensor]
    """The numbers to sum, one or more for each sample: (samples,) or (samples, numbers). Booleans and integers are
    counted, floats are summed in fixed point."""
    value: Callable[[Sequence[float], int], float] = mean
    """The metric, from the sums over all samples and the number of samples."""
    label: str = ""
    """In the lines of log.txt and the screen; empty: the metric is in the files alone."""
    epoch_label: str = ""
    """The label in a line that also shows the loss of training, if it is a different one."""
    text: Callable[[float], str] = "{:.2%}".format
    higher: bool = True
    """Whether a higher value is better."""
    min_classes: int = 0
    """Logs omit it for models with fewer classes, because top-5 of six or ten classes is not meaningful."""
    count: str = ""
    """The name under which the first sum is reported, too."""
    shows_count: bool = False
    """Whether a result on its own shows that sum and the number of samples in parentheses."""


def _cross_entropy(outputs: Outputs) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs.logits, outputs.labels, reduction="none")


METRICS: tuple[Metric, ...] = (
    Metric(
        "top1",
        "fraction of samples whose label is the model's first guess",
        lambda outputs: outputs.rank < 1,
        label="top-1",
        count="correct",
        shows_count=True,
    ),
    Metric(
        "top5",
        "fraction of samples whose label is among the first five",
        lambda outputs: outputs.rank < 5,
        label="top-5",
        min_classes=11,
        count="correct5",
    ),
    Metric(
        "loss",
        "mean cross-entropy",
        _cross_entropy,
        label="loss",
        epoch_label="evaluation loss",
        text=loss_text,
        higher=False,
    ),
)
"""In the order of logs and results."""


@dataclass(frozen=True)
class Score:
    """The metrics of a model on a set."""

    samples: int
    nonfinite: int
    """Samples for which the model gave NaN or infinity."""
    values: Mapping[str, float]
    """By metric; NaN: see `metrics.py`."""
    counts: Mapping[str, int]
    """Sums that are reported under a name of their own, such as `correct`."""

    @property
    def accuracy(self) -> float:
        """The fraction of samples for which the top prediction is right."""
        return self.values["top1"]

    @property
    def correct(self) -> int:
        return self.counts["correct"]

    def result(self) -> dict[str, Any]:
        """The numbers by name. JSON has no NaN: such a value is None."""
        values = {name: value if math.isfinite(value) else None for name, value in self.values.items()}
        return {**values, **self.counts, "samples": self.samples}


def no_result(metrics: Sequence[Metric]) -> dict[str, Any]:
    """The result of a model that was not evaluated."""
    counts = {metric.count: 0 for metric in metrics if metric.count}
    return {**{metric.name: None for metric in metrics}, **counts, "samples": 0}


def describe(
    result: Mapping[str, Any], metrics: Sequence[Metric], classes: int = 1000, epoch: bool = False
) -> str:
    """A result in one line: of an epoch, which also shows the loss of training, or on its own. Empty without an
    evaluation."""
    texts = []
    for metric in metrics if result["samples"] else ():
        if metric.label and classes >= metric.min_classes:
            value = math.nan if result[metric.name] is None else result[metric.name]
            text = f"{(epoch and metric.epoch_label) or metric.label} {metric.text(value)}"
            if metric.shows_count and not epoch:
                text += f" ({result[metric.count]:,} of {result['samples']:,})"
            texts.append(text)
    return ", ".join(texts)


class Sums:
    """The sums of metrics over the batches of this process."""

    def __init__(self, metrics: Sequence[Metric], samples: int) -> None:
        self.metrics, self.largest = metrics, LARGEST_SUM / samples
        self.sums: list[Tensor] = []
        """For each metric, its sums and the number of rows that could not be summed; first the number of samples and
        of those with an output that is not finite."""
        self.fractions: list[bool] = []

    def add(self, outputs: Outputs) -> None:
        """Counts a batch. Never waits for the device."""
        import torch

        logits = outputs.logits
        samples = torch.full((), len(logits), device=logits.device)
        rows = [metric.rows(outputs) for metric in self.metrics]
        sums = [torch.stack([samples, (~logits.isfinite().all(dim=1)).sum()])]
        sums += [sum_exactly(each, self.largest) for each in rows]
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)] if self.sums else sums
        self.fractions = [each.is_floating_point() for each in rows]


def sum_exactly(rows: Tensor, largest: float = LARGEST_SUM) -> Tensor:
    """int64: the sum of each column, then the number of rows left out: fractions above `largest`, or not finite."""
    import torch

    rows = rows.reshape(len(rows), -1)
    left_out = torch.zeros((), dtype=torch.int64, device=rows.device)
    if rows.is_floating_point():
        fractions = rows.double()
        summed = fractions.abs() <= largest  # false for NaN
        rows = fractions.where(summed, 0).mul(FIXED_POINT).round().long()
        left_out = (~summed).any(dim=1).sum()
    return torch.cat([rows.sum(dim=0), left_out[None]])


def score_of(metrics: Sequence[Metric], totals: Sequence[Sequence[int]], fractions: Sequence[bool]) -> Score:
    """The score, from the totals of `Sums` over all processes."""
    (samples, nonfinite), *rest = totals
    values, counts = {}, {}
    for metric, (*sums, left_out), fraction in zip(metrics, rest, fractions, strict=True):
        scaled = [each / FIXED_POINT for each in sums] if fraction else sums
        unknown = fraction and (nonfinite or left_out)
        values[metric.name] = math.nan if unknown else metric.value(scaled, samples)
        if metric.count:
            counts[metric.count] = sums[0]
    return Score(samples, nonfinite, values, counts)
