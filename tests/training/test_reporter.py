"""Readings come late, in order, and all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drumline.core.host_copy import HostCopy
from drumline.parallel.world import single_process
from drumline.training.reporter import MeterReader, Reading
from drumline.training.task import Meter
from tests.training import ranks, tiny


def test_a_reading_holds_the_sums_since_the_one_before() -> None:
    meter = Meter(0, tiny.CPU)
    reader = MeterReader(meter, single_process(tiny.CPU))
    meter.loss.add_(6.0)
    meter.correct.add_(2)
    meter.samples.add_(4)
    reader.request(10)
    assert meter.sums.tolist() == [0, 0, 0, 0]
    meter.sums += torch.tensor([1.0, 1, 2, 0])
    reader.request(20)
    assert reader.ready() == [Reading(10, 6.0, 2, 4), Reading(20, 1.0, 1, 2)]
    assert reader.ready() == []
    assert reader.drain() == []


def test_a_peek_leaves_the_meter_as_it_is_and_gives_the_newest_sums() -> None:
    meter = Meter(0, tiny.CPU)
    reader = MeterReader(meter, single_process(tiny.CPU))
    assert reader.peeked() is None
    for step in (1, 2):
        meter.sums += torch.tensor([3.0, 1, 2, 0])
        reader.peek(step)
    assert reader.peeked() == Reading(2, 6.0, 2, 4)
    assert reader.peeked() is None
    reader.request(2)
    assert reader.ready() == [Reading(2, 6.0, 2, 4)]


def test_loss_and_accuracy_are_means_over_samples() -> None:
    reading = Reading(step=1, loss_sum=6.0, correct=3, samples=4)
    assert (reading.loss, reading.accuracy) == (1.5, 0.75)
    assert Reading(1, 0.0, 0, 0).loss == 0
    assert Reading(1, 6.0, correct=1, samples=4, unlabelled=2).accuracy == 0.5


def test_ready_does_not_wait_for_late_readings() -> None:
    class Event:
        def __init__(self) -> None:
            self.done = False

        def query(self) -> bool:
            return self.done

        def synchronize(self) -> None:
            self.done = True

    reader = MeterReader(torch.zeros(4, dtype=torch.float64), single_process(tiny.CPU))
    first, second = Event(), Event()
    second.done = True
    for step, event in ((1, first), (2, second)):
        late = HostCopy(torch.tensor([1.0, 1, 1, 0]))
        late._event = event  # type: ignore[assignment]
        reader._requested.append((step, late))
    assert reader.ready() == []
    assert [reading.step for reading in reader.drain()] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_reading_covers_the_whole_world(size: int) -> None:
    """Three steps of ten samples: loss and count of the global batches, on every rank."""
    batches, rates, loss = [tiny.make(10, seed) for seed in range(3)], [0.1, 0.05, 0.2], 0.0
    for done in range(3):
        model = tiny.plain()
        tiny.reference_steps(model, batches[:done], rates[:done], tiny.SGD)
        logits = model(tiny.normalised(batches[done].images))
        loss += 10 * nn.functional.cross_entropy(logits, batches[done].labels, label_smoothing=0.1).item()
    for result in ranks.results(size):
        assert result["reading"]["samples"] == 30
        assert result["reading"]["loss_sum"] == pytest.approx(loss, rel=1e-4)
        assert result["meter_after"] == [0, 0, 0, 0]
