"""Lines of times come in long epochs too, at the same step on all ranks, and nothing waits for them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from drumline.core.account import PARTS
from drumline.core.environment import TRIAL
from drumline.data.feed.times import FeedTimes
from drumline.observe.clock import StepTimes
from drumline.observe.usage import Usage
from drumline.parallel.world import single_process
from drumline.training.interval import EVERY_S, FIRST_S, LEAST_STEPS, TRIAL_S, IntervalTimes
from tests.training import tiny


def _times(steps: int, compute_s: float = 0.5) -> StepTimes:
    return StepTimes(steps, dict.fromkeys(PARTS, 0.0) | {"forward": compute_s}, 0.0, compute_s, 0.0)


def _interval() -> IntervalTimes:
    return IntervalTimes(single_process(tiny.CPU), FeedTimes())


def test_milliseconds_are_those_of_a_step_and_zeros_are_left_out() -> None:
    interval = _interval()
    interval.facts = {"workers": 2}
    interval.add(_times(3))
    interval.add(_times(2))
    interval.request(5)
    found = interval.arrived()
    assert found is not None
    step, values = found
    assert (step, values["steps"], values["workers"]) == (5, 5, 2)
    assert values["host_forward_ms"] == values["compute_ms"] == [200.0]
    assert "host_log_ms" not in values
    assert values["memory_mb"][0] > 1
    assert interval.arrived() is None
    interval.request(5)
    assert interval.arrived() is None, "no step, no line"


def test_a_gpu_that_has_finished_no_step_gives_no_number() -> None:
    interval = _interval()
    interval.add(StepTimes(4, dict.fromkeys(PARTS, 0.25), math.nan, math.nan, math.nan))
    interval.request(4)
    found = interval.arrived()
    assert found is not None
    assert math.isnan(found[1]["compute_ms"][0])
    assert not math.isnan(found[1]["step_ms"][0])


def test_ranks_exchange_the_same_names_whatever_counters_their_systems_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    for unknown in ((), ("queued_cores", "disk_mb_s")):
        interval = _interval()
        plain = Usage.since
        monkeypatch.setattr(
            Usage,
            "since",
            lambda now, before, unknown=unknown, plain=plain: {
                name: value for name, value in plain(now, before).items() if name not in unknown
            },
        )
        interval.add(_times(3))
        interval.request(3)
        assert interval._pending is not None
        sizes.append(interval._pending._table.shape)
        found = interval.arrived()
        assert found is not None
        assert not set(unknown) & set(found[1])
    assert sizes[0] == sizes[1]


def test_the_first_line_is_due_after_some_seconds_and_the_others_every_half_minute() -> None:
    interval = _interval()
    per_step = 0.05
    assert not interval.due(1, 0.0), "the time of a step is not known yet"
    steps = [step for step in range(2, 3000) if _take(interval, step, per_step)]
    assert abs(steps[0] - FIRST_S / per_step) <= 3
    gaps = {later - earlier for earlier, later in pairwise(steps)}
    assert gaps <= {int(EVERY_S / per_step), int(EVERY_S / per_step) + 1}


def _take(interval: IntervalTimes, step: int, per_step: float) -> bool:
    interval.add(_times(1))
    if not interval.due(step, per_step):
        return False
    interval.request(step)
    assert interval.arrived() is not None
    return True


def test_steps_of_a_minute_still_make_an_interval_of_some_steps() -> None:
    interval = _interval()
    assert not interval.due(1, 60.0)
    assert interval.due(1 + LEAST_STEPS, 60.0)


def test_a_short_run_of_why_has_a_line_each_half_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRIAL, "1")
    interval = _interval()
    steps = [step for step in range(2, 100) if _take(interval, step, 0.05)]
    gaps = {later - earlier for earlier, later in pairwise(steps)}
    assert gaps <= {int(TRIAL_S / 0.05), int(TRIAL_S / 0.05) + 1}
