"""The clock tells waiting from computing, never waits for the device and never grows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from drumline.core.account import Account
from drumline.observe.clock import StepClock, _DeviceTimer
from tests.observe.cost import seconds_per_step


class HandTime:
    """A time that moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand() -> HandTime:
    return HandTime()


def test_on_a_cpu_the_parts_are_data_the_step_and_the_rest(hand: HandTime) -> None:
    parts = Account(clock=hand)
    clock = StepClock(torch.device("cpu"), parts=parts)
    for _ in range(4):
        parts.enter("data")
        hand.now += 0.25
        parts.enter("forward")
        hand.now += 0.5
        parts.enter("backward")
        hand.now += 0.75
        parts.enter("log")
        hand.now += 0.125
        with parts.within("evaluation"):
            hand.now += 3
        clock.step_end()
    times = clock.take()
    assert (times.steps, times.data_s, times.compute_s, times.late_s) == (4, 1.0, 5.0, 0.5)
    assert (times.step_s, times.parts["evaluation"]) == (6.5, 12.0)


def test_take_starts_the_sums_anew_and_sums_add_up(hand: HandTime) -> None:
    parts = Account(clock=hand)
    clock = StepClock(torch.device("cpu"), parts=parts)
    parts.enter("forward")
    hand.now += 1.0
    clock.step_end()
    first = clock.take()
    hand.now += 0.5
    second = clock.take()
    assert (first.steps, first.compute_s) == (1, 1.0)
    assert (second.steps, second.compute_s) == (0, 0.5)
    assert (first + second).steps == 1
    assert (first + second).parts["forward"] == 1.5


def test_a_step_costs_the_host_less_than_5_us_on_a_cpu() -> None:
    assert seconds_per_step(torch.device("cpu"), 2000) < 5e-6


class Device:
    """A stand-in for a GPU: runs what was recorded later, when told, and counts its events."""

    def __init__(self) -> None:
        self.clock_ms = 0.0
        self.queue: list[tuple[Event | None, float]] = []
        self.events = 0
        self.recorded = 0

    def event(self) -> Event:
        self.events += 1
        return Event(self)

    def compute(self, ms: float) -> None:
        self.queue.append((None, ms))

    def catch_up(self) -> None:
        for event, ms in self.queue:
            if event is None:
                self.clock_ms += ms
            else:
                event.at_ms = self.clock_ms
        self.queue.clear()


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ms: float | None = None

    def record(self, stream: Any, /) -> None:
        self.at_ms = None
        self.device.recorded += 1
        self.device.queue.append((self, 0.0))

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end: Event, /) -> float:
        assert self.at_ms is not None, "read before it was done"
        assert end.at_ms is not None, "read before it was done"
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        pytest.fail("the clock must not wait for the device")


def _timer(device: Device, depth: int = 4, sample_every: int = 3) -> _DeviceTimer:
    stream: Any = None
    return _DeviceTimer(depth, sample_every, make_event=device.event, current_stream=lambda: stream)


def _step(timer: _DeviceTimer, device: Device, ms: float, ready: Event | None = None) -> None:
    timer.begin(lambda: ready)
    device.compute(ms)
    timer.end()


def test_a_gpu_gives_compute_time_from_sampled_steps() -> None:
    device = Device()
    timer = _timer(device)
    timer.resume()
    for _ in range(10):
        _step(timer, device, 20.0)
        device.catch_up()
    assert timer.mean() == pytest.approx((0.0, 0.02, 0.0))
    assert device.recorded == 3 * 4, "steps 1, 4, 7 and 10"


@pytest.mark.parametrize(
    ("batch_ms", "host_ms", "expected"),
    [
        (0.0, 0.0, (0.0, 0.02, 0.0)),
        (5.0, 0.0, (0.005, 0.02, 0.0)),
        (5.0, 3.0, (0.005, 0.02, 0.003)),
        (0.0, 3.0, (0.0, 0.02, 0.003)),
    ],
)
def test_a_gap_is_for_data_until_the_batch_is_there_and_then_for_the_host(
    batch_ms: float, host_ms: float, expected: tuple[float, float, float]
) -> None:
    device = Device()
    timer = _timer(device, sample_every=1)
    timer.resume()
    for _ in range(6):
        device.compute(batch_ms)  # idle
        ready = device.event()
        ready.record(None)
        device.compute(host_ms)
        _step(timer, device, 20.0, ready)
        device.catch_up()
    assert timer.mean() == pytest.approx(expected)


def test_a_batch_that_was_early_is_no_wait() -> None:
    device = Device()
    timer = _timer(device, sample_every=1)
    early = device.event()
    early.record(None)
    device.compute(50.0)
    timer.resume()
    device.compute(4.0)
    _step(timer, device, 20.0, early)
    device.catch_up()
    assert timer.mean() == pytest.approx((0.0, 0.02, 0.004))


def test_an_evaluation_is_no_gap() -> None:
    device = Device()
    timer = _timer(device, sample_every=1)
    timer.resume()
    for _ in range(4):
        _step(timer, device, 20.0)
        device.compute(500.0)  # an evaluation
        timer.resume()
        device.catch_up()
    assert timer.mean() == pytest.approx((0.0, 0.02, 0.0))


def test_a_slow_first_step_is_not_multiplied() -> None:
    device = Device()
    timer = _timer(device)
    timer.resume()
    for ms in [1000.0] + [10.0] * 9:
        _step(timer, device, ms)
        device.catch_up()
    assert timer.mean()[1] == pytest.approx(0.109)


def test_steps_the_gpu_has_not_finished_are_read_later_and_never_waited_for() -> None:
    device = Device()
    timer = _timer(device)
    timer.resume()
    for _ in range(4):
        _step(timer, device, 20.0)
    assert all(math.isnan(each) for each in timer.mean()), "nothing is known yet, and that is not zero"
    device.catch_up()
    assert timer.mean()[1] == pytest.approx(0.02)
    timer.forget()
    assert timer.mean()[1] == pytest.approx(0.02), "without a new sample the last speed holds"


def test_a_gpu_far_behind_is_sampled_less_with_no_more_events() -> None:
    device = Device()
    timer = _timer(device, depth=4, sample_every=1)
    timer.resume()
    for _ in range(100):
        _step(timer, device, 20.0)
    device.catch_up()
    assert device.recorded == 3 * 4
    assert timer.mean()[1] == pytest.approx(0.02)
    timer.forget()
    for _ in range(100):
        _step(timer, device, 40.0)
        device.catch_up()
    assert device.events == 12, "used again, not made anew"
    assert timer.mean()[1] == pytest.approx(0.04, rel=0.02)


def test_a_step_that_raised_loses_no_event() -> None:
    device = Device()
    timer = _timer(device, depth=1, sample_every=1)
    timer.resume()
    for _ in range(3):
        timer.begin(lambda: None)
        device.compute(500.0)
    _step(timer, device, 20.0)
    device.catch_up()
    assert timer.mean()[1] == pytest.approx(0.02)
