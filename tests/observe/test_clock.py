"""The clock tells waiting from computing, never waits for the device and never grows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from drumline.core.account import Account
from drumline.observe.clock import BatchEvents, DeviceTimes, StepClock, _DeviceTimer
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
    assert seconds_per_step(torch.device("cpu"), 300) < 5e-6


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


def _split(timer: _DeviceTimer) -> tuple[float, float, float]:
    """Seconds of a step: waiting for data, computing, waiting for the host."""
    times = timer.mean()
    return times.data_s, times.compute_s, times.late_s


def _timer(device: Device, depth: int = 4, sample_every: int = 3) -> _DeviceTimer:
    stream: Any = None
    return _DeviceTimer(depth, sample_every, make_event=device.event, current_stream=lambda: stream)


def _step(timer: _DeviceTimer, device: Device, ms: float, ready: Event | None = None) -> None:
    timer.begin(lambda: BatchEvents(ready=ready))
    device.compute(ms)
    timer.end()


def test_a_gpu_gives_compute_time_from_sampled_steps() -> None:
    device = Device()
    timer = _timer(device)
    timer.resume()
    for _ in range(10):
        _step(timer, device, 20.0)
        device.catch_up()
    assert _split(timer) == pytest.approx((0.0, 0.02, 0.0))
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
    assert _split(timer) == pytest.approx(expected)


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
    assert _split(timer) == pytest.approx((0.0, 0.02, 0.004))


@pytest.mark.parametrize(
    ("late_ms", "copy_ms", "copied_s"), [(0.0, 5.0, 0.005), (3.0, 5.0, 0.005), (6.0, 0.0, 0.0)]
)
def test_a_batch_on_its_way_to_the_device_is_waited_for_as_a_copy(
    late_ms: float, copy_ms: float, copied_s: float
) -> None:
    device = Device()
    timer = _timer(device, sample_every=1)
    timer.resume()
    for _ in range(6):
        device.compute(late_ms)  # no batch yet
        arrived, ready = device.event(), device.event()
        arrived.record(None)
        device.compute(copy_ms)
        ready.record(None)
        timer.begin(lambda arrived=arrived, ready=ready: BatchEvents(arrived, ready))
        device.compute(20.0)
        timer.end()
        device.catch_up()
    assert timer.mean().copy_s == pytest.approx(copied_s)
    assert timer.mean().data_s == pytest.approx((late_ms + copy_ms) / 1e3)


def test_a_copy_that_began_while_the_device_computed_is_waited_for_only_from_then_on() -> None:
    device = Device()
    timer = _timer(device, sample_every=1)
    arrived, ready = device.event(), device.event()
    arrived.record(None)
    device.compute(50.0)
    timer.resume()
    device.compute(4.0)
    ready.record(None)
    timer.begin(lambda: BatchEvents(arrived, ready))
    device.compute(20.0)
    timer.end()
    device.catch_up()
    assert (timer.mean().data_s, timer.mean().copy_s) == (0.004, 0.004)


def test_the_parts_of_an_eager_step_are_timed_on_the_device() -> None:
    device = Device()
    timer = _timer(device, sample_every=1)
    timer.resume()
    for _ in range(3):
        timer.begin(BatchEvents)
        device.compute(1.0)
        for part, by_loop, ms in (
            ("forward", True, 5.0),
            ("backward", True, 9.0),
            ("optimizer", False, 0.0),  # another thread cannot say that
            ("exchange", False, 3.0),  # autograd's thread, when the last gradient is there
            ("optimizer", True, 2.0),
        ):
            timer.mark(part, by_loop)
            device.compute(ms)
        timer.end()
        device.catch_up()
    expected = {"forward": 0.005, "backward": 0.009, "exchange": 0.003, "optimizer": 0.002}
    assert timer.mean().parts == pytest.approx(expected)
    assert timer.mean().compute_s == pytest.approx(0.02)
    before = device.events
    for _ in range(3):
        timer.begin(BatchEvents)
        timer.mark("forward", True)
        timer.end()
        device.catch_up()
    assert device.events <= before + 2, "events are used again"


def test_parts_are_marked_only_in_sampled_steps() -> None:
    parts = Account(clock=HandTime())
    clock = StepClock(torch.device("cpu"), parts=parts)
    device = Device()
    clock._device = _timer(device, sample_every=3)
    clock.resume()
    for _ in range(6):
        clock.step_begin()
        with parts.within("forward"):
            device.compute(4.0)
        clock.step_end()
        device.catch_up()
    assert clock.take().device_parts["forward"] == pytest.approx(6 * 0.004)
    assert device.recorded == 2 * (3 + 2) + 1, (
        "events and marks of steps 1 and 4, and the begin of the next sample"
    )


def test_a_batch_that_the_gpu_makes_itself_is_data_and_what_comes_before_is_a_late_host() -> None:
    parts = Account(clock=HandTime())
    clock = StepClock(torch.device("cpu"), parts=parts)
    device = Device()
    clock._device = _timer(device, sample_every=1)
    clock.resume()
    for _ in range(4):
        clock.step_begin()
        device.compute(20.0)
        clock.step_end()
        device.compute(3.0)  # idle
        parts.enter("data")
        device.compute(5.0)
        parts.enter("other")
        device.catch_up()
    assert clock._device.mean().data_s == pytest.approx(0.75 * 0.005), "the first step has no gap before it"
    assert clock._device.mean().late_s == pytest.approx(0.75 * 0.003)
    assert clock._device.mean().compute_s == pytest.approx(0.02)


def test_a_host_that_is_not_ahead_is_seen() -> None:
    for ahead in (False, True):
        device = Device()
        timer = _timer(device, sample_every=1)
        timer.resume()
        for _ in range(4):
            timer.begin(BatchEvents)
            if not ahead:
                device.catch_up()  # it begins the step while the host still starts its work
            device.compute(20.0)
            timer.end()
            device.catch_up()
        assert timer.mean().behind == pytest.approx(float(not ahead))


def test_device_times_add_up() -> None:
    one, other = DeviceTimes(1, 2, 3, 4, 5, {"forward": 1.0}), DeviceTimes(1, 1, 1, 1, 1, {"backward": 2.0})
    assert one.plus(other) == DeviceTimes(2, 3, 4, 5, 6, {"forward": 1.0, "backward": 2.0})
    assert one.times(2) == DeviceTimes(2, 4, 6, 8, 10, {"forward": 2.0})


def test_an_evaluation_is_no_gap() -> None:
    device = Device()
    timer = _timer(device, sample_every=1)
    timer.resume()
    for _ in range(4):
        _step(timer, device, 20.0)
        device.compute(500.0)  # an evaluation
        timer.resume()
        device.catch_up()
    assert _split(timer) == pytest.approx((0.0, 0.02, 0.0))


def test_a_slow_first_step_is_not_multiplied() -> None:
    device = Device()
    timer = _timer(device)
    timer.resume()
    for ms in [1000.0] + [10.0] * 9:
        _step(timer, device, ms)
        device.catch_up()
    assert timer.mean().compute_s == pytest.approx(0.109)


def test_steps_the_gpu_has_not_finished_are_read_later_and_never_waited_for() -> None:
    device = Device()
    timer = _timer(device)
    timer.resume()
    for _ in range(4):
        _step(timer, device, 20.0)
    assert all(math.isnan(each) for each in _split(timer)), "nothing is known yet, and that is not zero"
    device.catch_up()
    assert timer.mean().compute_s == pytest.approx(0.02)
    timer.forget()
    assert timer.mean().compute_s == pytest.approx(0.02), "without a new sample the last speed holds"


def test_a_gpu_far_behind_is_sampled_less_with_no_more_events() -> None:
    device = Device()
    timer = _timer(device, depth=4, sample_every=1)
    timer.resume()
    for _ in range(100):
        _step(timer, device, 20.0)
    device.catch_up()
    assert device.recorded == 3 * 4
    assert timer.mean().compute_s == pytest.approx(0.02)
    timer.forget()
    for _ in range(100):
        _step(timer, device, 40.0)
        device.catch_up()
    assert device.events == 12, "used again, not made anew"
    assert timer.mean().compute_s == pytest.approx(0.04, rel=0.02)


def test_a_step_that_raised_loses_no_event() -> None:
    device = Device()
    timer = _timer(device, depth=1, sample_every=1)
    timer.resume()
    for _ in range(3):
        timer.begin(BatchEvents)
        device.compute(500.0)
    _step(timer, device, 20.0)
    device.catch_up()
    assert timer.mean().compute_s == pytest.approx(0.02)
