"""Metrics are exact sums, a broken model is never right, and an entry in the table is all that a new metric takes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from drumline.cli import main
from drumline.core.text import loss_text
from drumline.training import metrics
from drumline.training.metrics import METRICS, Metric, Outputs, Score, Sums, describe, score_of, sum_exactly
from tests.training import ranks

NAN = math.nan
SHOWN = tuple(metric for metric in METRICS if metric.name in ("top1", "top5", "loss"))
"""Some metrics of the table, which may have others."""


def naive(logits: torch.Tensor, labels: torch.Tensor) -> tuple[int, int, int]:
    """Sorts each row by hand: higher first, of equals the lower class first."""
    top1 = top5 = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        if any(math.isnan(value) for value in row):
            continue
        ranking = sorted(range(len(row)), key=lambda i: (-row[i], i))
        top1 += ranking[0] == label
        top5 += label in ranking[:5]
    return len(labels), top1, top5


def outputs(logits: torch.Tensor, labels: torch.Tensor) -> Outputs:
    return Outputs(logits, labels, torch.arange(len(labels)))


def score(logits: torch.Tensor, labels: torch.Tensor, table: tuple[Metric, ...] = SHOWN) -> Score:
    sums = Sums(table, len(labels))
    sums.add(outputs(logits, labels))
    return score_of(table, [each.tolist() for each in sums.sums], sums.fractions)


@pytest.mark.parametrize("classes", [2, 4, 5, 6, 20])
@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_counts_equal_a_naive_ranking_with_ties(classes: int, levels: int) -> None:
    draw = torch.Generator().manual_seed(classes * levels)
    logits = torch.randint(0, levels, (300, classes), generator=draw).float()
    labels = torch.randint(0, classes, (300,), generator=draw)
    found = score(logits, labels)
    assert (found.samples, *found.counts.values()) == naive(logits, labels)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_a_row_of_nan_is_never_right(classes: int) -> None:
    found = score(torch.full((classes, classes), NAN), torch.arange(classes))
    assert (found.samples, found.counts) == (classes, {"correct": 0, "correct5": 0})


@pytest.mark.parametrize("classes", [3, 10])
@pytest.mark.parametrize("where", [0, 1])
def test_a_single_nan_in_a_row_makes_it_wrong(classes: int, where: int) -> None:
    logits = torch.arange(classes).flip(0).float()[None].clone()
    assert set(score(logits, torch.tensor([0])).counts.values()) == {1}
    logits[0, where] = NAN
    assert set(score(logits, torch.tensor([0])).counts.values()) == {0}


def test_infinite_logits_are_ranked_and_leave_no_loss() -> None:
    logits = torch.tensor([[math.inf, 0.0, 0.0], [-math.inf, 0.0, 0.0], [-math.inf, -math.inf, -math.inf]])
    found = score(logits, torch.tensor([0, 0, 0]))
    assert (found.samples, found.correct, found.nonfinite) == (3, 2, 3)
    assert math.isnan(found.values["loss"])
    assert found.result()["loss"] is None


def test_a_large_loss_is_summed_as_it_is_and_one_that_would_overflow_the_sum_leaves_no_mean() -> None:
    assert score(torch.tensor([[0.0, 3e7]]), torch.tensor([0])).values["loss"] == 3e7
    found = score(torch.tensor([[0.0, 3e7], [0.0, 1e20]]), torch.tensor([0, 0]))
    assert found.nonfinite == 0
    assert found.result()["loss"] is None
    assert sum_exactly(torch.tensor([3e7, 1e20])).tolist() == [int(3e7 * 2**24), 1]


def test_the_loss_is_the_cross_entropy_to_the_resolution_of_fixed_point() -> None:
    logits, labels = torch.randn(500, 7), torch.randint(0, 7, (500,))
    expected = nn.functional.cross_entropy(logits.double(), labels).item()
    assert score(logits, labels).values["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("metric", ranks.METRICS, ids=lambda metric: metric.name)
def test_sums_do_not_depend_on_how_samples_are_grouped(metric: Metric) -> None:
    logits, labels = torch.randn(101, 7), torch.randint(0, 7, (101,))
    whole = sum_exactly(metric.rows(outputs(logits, labels)))
    for size in (1, 2, 17, 100):
        pieces = [outputs(logits[i : i + size], labels[i : i + size]) for i in range(0, 101, size)]
        assert torch.equal(torch.stack([sum_exactly(metric.rows(each)) for each in pieces]).sum(0), whole)


def test_metrics_of_several_sums_are_what_they_are_called() -> None:
    """Those of `tests/training/ranks.py`, which no entry of the table needs yet."""
    logits, labels = torch.randn(60, 7), torch.arange(60) % 3
    found = score(logits, labels, ranks.METRICS).values
    right = logits.argmax(1) == labels
    by_class = [right[labels == label].double().mean() for label in range(3)]
    assert found["class_mean"] == pytest.approx(float(sum(by_class)) / 3)
    confidence = logits.double().softmax(1).max(1).values
    expected = 0.0
    for index in range(ranks.BINS):
        inside = (confidence * ranks.BINS).long().clamp(max=ranks.BINS - 1) == index
        expected += abs(float(confidence[inside].sum()) - float(right[inside].sum())) / 60
    assert found["calibration_error"] == pytest.approx(expected, abs=1e-6)


def test_lines_show_labelled_metrics_for_enough_classes() -> None:
    found = Score(8, 0, {"top1": 0.5, "top5": 1.0, "loss": 0.25}, {"correct": 4, "correct5": 8})
    assert describe(found.result(), SHOWN, 11) == "top-1 50.00% (4 of 8), top-5 100.00%, loss 0.2500"
    assert describe(found.result(), SHOWN, 10, epoch=True) == "top-1 50.00%, evaluation loss 0.2500"
    hidden = [replace(metric, label="") for metric in SHOWN]
    assert describe(found.result(), hidden, 11) == ""


@pytest.mark.slow
def test_one_entry_in_the_table_shows_a_metric_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the log, the live line and the result of a run, and in `drumline eval`. (On several processes:
    `test_counts_and_metrics_are_the_same_on_any_number_of_processes`.)"""
    toy = Metric(
        "top3", "fraction within three", lambda outputs: outputs.rank < 3, label="top-3", count="near"
    )
    spread = Metric("spread", "mean range", lambda outputs: outputs.logits.amax(1) - outputs.logits.amin(1))
    shown = replace(spread, label="spread", text=loss_text)
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, toy, shown))
    threads = torch.get_num_threads()
    try:
        argv = [
            "model.name=resnet8",
            "data.batch=359",
            "train.steps=2",
            "train.ema=0.5",
            "parallel.threads=1",
        ]
        assert main(["train", *argv, f"run.dir={tmp_path}", "run.name=one", "run.device=cpu"]) == 0
        trained = capfd.readouterr()
        assert main(["eval", str(tmp_path / "one" / "weights" / "last.safetensors")]) == 0
        evaluated = capfd.readouterr()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    result, again = (json.loads(each.out.splitlines()[-1]) for each in (trained, evaluated))
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    line = next(each for each in lines if each["kind"] == "eval")
    assert result["near"] == again["near"] == round(result["top3"] * result["samples"]) > 0
    assert {"top3", "near", "spread", "average_top3", "average_spread"} <= line.keys()
    for name in ("top3", "spread"):
        assert result[name] == again[name] == line[f"average_{name}"], "the averaged weights are scored"
    live = f"top-3 {line['top3']:.2%}, spread {loss_text(line['spread'])}"
    assert live in trained.err
    assert live in (tmp_path / "one" / "log.txt").read_text()
    assert f"top-3 {again['top3']:.2%}, spread {loss_text(again['spread'])}" in evaluated.err
