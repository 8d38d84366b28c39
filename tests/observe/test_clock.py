"""The clock tells waiting from computing, never waits for the device and never grows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from drumline.observe import clock as clock_module
from drumline.observe.clock import StepClock, _DeviceTimer
from tests.observe.cost import seconds_per_step


class HandTime:
    """A time that moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> HandTime:
    hand = HandTime()
    monkeypatch.setattr(clock_module, "perf_counter", hand)
    return hand


def test_data_compute_and_other_times_are_separate(hand: HandTime) -> None:
    clock = StepClock(torch.device("cpu"))
    for _ in range(4):
        clock.data_begin()
        hand.now += 0.25
        clock.data_end()
        hand.now += 0.5
        clock.step_begin()
        hand.now += 1.0
        clock.step_end()
    times = clock.take()
    assert (times.steps, times.data_s, times.compute_s, times.wall_s) == (4, 1.0, 4.0, 7.0)


def test_take_starts_the_sums_anew(hand: HandTime) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.step_begin()
    hand.now += 1.0
    clock.step_end()
    clock.take()
    hand.now += 0.5
    times = clock.take()
    assert (times.steps, times.data_s, times.compute_s, times.wall_s) == (0, 0.0, 0.0, 0.5)


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


def _step(timer: _DeviceTimer, device: Device, ms: float) -> None:
    timer.begin()
    device.compute(ms)
    timer.end()


def test_a_gpu_gives_compute_time_from_sampled_steps() -> None:
    device = Device()
    timer = _timer(device)
    for _ in range(10):
        _step(timer, device, 20.0)
        device.catch_up()
    assert timer.take(10) == pytest.approx(0.2)
    assert device.recorded == 2 * 4, "steps 1, 4, 7 and 10"


def test_a_slow_first_step_is_not_multiplied() -> None:
    device = Device()
    timer = _timer(device)
    for ms in [1000.0] + [10.0] * 9:
        _step(timer, device, ms)
        device.catch_up()
    assert timer.take(10) == pytest.approx(1.09)


def test_steps_the_gpu_has_not_finished_are_read_later_and_never_waited_for() -> None:
    device = Device()
    timer = _timer(device)
    for _ in range(4):
        _step(timer, device, 20.0)
    assert math.isnan(timer.take(4)), "nothing is known yet, and that is not zero"
    device.catch_up()
    assert timer.take(4) == pytest.approx(0.08)
    assert timer.take(2) == pytest.approx(0.04), "without a new sample the last speed holds"


def test_a_gpu_far_behind_is_sampled_less_with_no_more_events() -> None:
    device = Device()
    timer = _timer(device, depth=4, sample_every=1)
    for _ in range(100):
        _step(timer, device, 20.0)
    device.catch_up()
    assert device.recorded == 2 * 4
    assert timer.take(100) == pytest.approx(2.0)
    for _ in range(100):
        _step(timer, device, 40.0)
        device.catch_up()
    assert device.events == 8, "used again, not made anew"
    assert timer.take(100) == pytest.approx(4.0)


def test_a_step_that_raised_loses_no_event() -> None:
    device = Device()
    timer = _timer(device, depth=1, sample_every=1)
    for _ in range(3):
        timer.begin()
        device.compute(500.0)
    _step(timer, device, 20.0)
    device.catch_up()
    assert timer.take(1) == pytest.approx(0.02)
