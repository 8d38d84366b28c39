"""How much the GPU decodes beside the CPU: nothing where that is not needed, enough where it is."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.data.gpu import decoder as module
from drumline.data.gpu.decoder import (
    FALL,
    FIRST_RISE,
    IDLE,
    RETREAT,
    UNDER_WAY,
    WINDOW,
    GpuFraction,
    next_fraction,
)

COST = 0.06
"""What decoding everything on the GPU adds to a step there."""


def settled(cpu: float, gpu: float, step: float) -> tuple[float, float]:
    """Follows the rule in a model of a feed: CPU, GPU and step in batches a second, each alone. Returns the fraction
    and the mean speed after it has settled."""
    fraction, speeds = 0.0, []
    for _ in range(400):
        host, device, busy = (1 - fraction) / cpu, fraction / gpu, (1 + COST * fraction) / step
        took = max(host, device, busy)
        speeds.append(1 / took)
        fraction = next_fraction(
            fraction, (took - busy) / took, (took - device) / took if took == host else 0.0
        )
    return fraction, sum(speeds[200:]) / 200


@given(st.floats(1.0, 20.0), st.floats(0.5, 20.0))
def test_nothing_moves_while_the_cpu_keeps_up(cpu: float, gpu: float) -> None:
    assert settled(cpu, gpu, cpu * 0.99) == (0.0, pytest.approx(cpu * 0.99))


@given(st.floats(1.0, 20.0), st.floats(0.1, 5.0), st.floats(1.0, 60.0))
def test_the_speed_approaches_that_of_cpu_and_gpu_together(cpu: float, gain: float, step: float) -> None:
    gpu = gain * cpu
    fraction, speed = settled(cpu, gpu, step)
    best = max(
        1 / max((1 - f) / cpu, f / gpu, (1 + COST * f) / step) for f in (n / 1000 for n in range(1001))
    )
    assert 0.0 <= fraction <= 1.0
    assert speed > 0.9 * best
    if cpu + gpu > 1.5 * step:  # enough to spare: then the step hardly waits
        assert speed > 0.97 * best


def test_the_fraction_rises_by_what_was_missing_and_falls_slowly() -> None:
    assert next_fraction(0.0, 0.1, 1.0) == pytest.approx(0.1)
    assert next_fraction(0.0, 0.9, 1.0) == FIRST_RISE
    assert next_fraction(0.2, 0.1, 0.9) == pytest.approx(0.3), "no more than was missing"
    assert next_fraction(0.2, 0.9, 0.5) == pytest.approx(0.2 / 0.6), (
        "the GPU's fifth took half as long as the rest"
    )
    assert next_fraction(0.5, 0.0, 0.0) == 0.5 - FALL
    assert next_fraction(0.0, 0.0, 0.0) == 0.0
    assert next_fraction(1.0, 0.2, 0.5) == 1.0
    assert next_fraction(0.5, 0.2, 0.0) == 0.5 * RETREAT, "the GPU's half is the slower one"


class Event:
    """A point in time on the device, in milliseconds."""

    def __init__(self, at: float, now: float = 1e9) -> None:
        self.at, self.now = at, now

    def query(self) -> bool:
        return self.at <= self.now

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query(), "the time of an event that has not come yet cannot be asked for"
        return other.at - self.at


def test_a_decision_uses_only_batches_made_with_the_current_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float, float]] = []

    def note(fraction: float, idle: float, host_wait: float) -> float:
        asked.append((fraction, idle, host_wait))
        return fraction + 0.25

    monkeypatch.setattr(module, "next_fraction", note)
    fraction = GpuFraction()
    for number in range(2 * (UNDER_WAY + WINDOW) + 1):
        # Each needs 10 ms; the first eight come 5 ms late, the next four 2 ms, then in time.
        late = 5.0 if number < UNDER_WAY else 2.0 if number < UNDER_WAY + WINDOW else -1.0
        fraction.handed(Event(10.0 * number), Event(10.0 * number + late))  # type: ignore[arg-type]
    assert [(before, pytest.approx(idle)) for before, idle, _ in asked] == [(0.0, 0.2), (0.25, 0.0)]
    assert fraction.value == 0.5


def test_no_event_is_read_before_it_has_passed() -> None:
    fraction = GpuFraction()
    for number in range(40):
        fraction.handed(Event(10.0 * number, now=0.0), Event(10.0 * number + 1, now=0.0))  # type: ignore[arg-type]
    fraction = GpuFraction()
    fraction.handed(Event(0.0, now=500.0), Event(1.0, now=500.0))  # type: ignore[arg-type]
    for number in range(40):  # each came in time, but the step has not yet got as far as wanting the next
        fraction.handed(Event(1000.0 + number, now=500.0), Event(0.0, now=500.0))  # type: ignore[arg-type]
    assert fraction.value == 0.0


def test_the_fraction_falls_at_every_window_while_the_device_is_busy() -> None:
    fraction = GpuFraction()
    fraction.value = 0.5
    batches = UNDER_WAY + 3 * WINDOW
    for number in range(batches + 1):
        fraction.handed(Event(10.0 * number), Event(10.0 * number - 5))  # type: ignore[arg-type]
    assert fraction.value == pytest.approx(0.5 - 3 * FALL)
    assert IDLE > 0


def test_waiting_for_the_host_is_measured_between_items(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0.0, 1.0)  # each look at the clock is a second later
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    fraction = GpuFraction()
    assert list(fraction.timed(iter("abc"))) == ["a", "b", "c"]
    # Of the two looks an item takes, the time between them is the wait; the rest is the feed's own work.
    assert (fraction._host_s, fraction._fed_s) == (3.0, 6.0)
