from __future__ import annotations

import math
import signal

import pytest

from drumline.diagnosis.evidence import Interval
from drumline.diagnosis.trial import (
    Command,
    announced,
    enough,
    error_of,
    failure,
    steady,
    still_rising,
    whole_cycles,
)


def interval(step: int, seconds: float = 1.0, pause: float = 0.0, steps: int = 10) -> Interval:
    """Ends at a step; `seconds` of steps, and `pause` seconds of evaluation."""
    values = {"step_ms": (1e3 * seconds / steps,), "host_evaluation_ms": (1e3 * pause / steps,)}
    return Interval(step, step / 100, steps, steps * 64 / seconds, values)


def test_settings_replace_those_of_the_same_field_and_come_last_where_they_win() -> None:
    command = Command("train", ("recipe.toml", "--data.batch=8", "data.batch_x=1", "--data.batch", "4"))
    changed = command.having("data.batch=16", "data.path=my photos")
    assert str(changed) == (
        "drumline train recipe.toml data.batch_x=1 --data.batch 4 data.batch=16 'data.path=my photos'"
    )
    assert command.having() == command


def test_the_first_steps_do_not_count() -> None:
    intervals = [interval(10 * number, 0.5) for number in range(1, 8)]
    found = steady(intervals, seconds=5.0)
    assert found[0].step == 20, "the first interval, and those of the first second"
    assert found[0].steps == 20
    assert [each.step for each in found[1:]] == [30, 40, 50, 60, 70]
    assert [each.step for each in steady(intervals, seconds=0.5)][:2] == [10, 20], (
        "the first is always warm-up"
    )


def test_intervals_beyond_the_limit_do_not_count() -> None:
    intervals = [interval(10 * number) for number in range(1, 8)]
    found = steady(intervals, 1.0, within=lambda each: each.step <= 30)
    assert found[-1].step == 30
    assert steady(intervals, 1.0, within=lambda each: False) == []


def test_a_trial_ends_when_its_speed_is_known_or_its_time_is_up() -> None:
    even = [interval(10 * number) for number in range(1, 6)]
    assert not enough(even[:4], seconds=5.0), "too short"
    assert enough(even, seconds=5.0)
    uneven = [interval(10 * number, 1.0 + number % 2) for number in range(1, 5)]
    assert not enough(uneven, seconds=5.0)
    assert enough(uneven * 3, seconds=5.0), "three times as long is long enough"
    assert not enough([interval(10, 6.0)], seconds=5.0), "one interval has no error"


def test_the_error_is_that_of_the_mean() -> None:
    assert error_of([interval(10), interval(20)]) == math.inf
    found = error_of([interval(10, 1.0), interval(20, 1.1), interval(30, 0.9)])
    assert found == pytest.approx(0.1 / math.sqrt(3))


def test_a_measurement_has_as_many_pauses_as_cycles() -> None:
    pauses = [0.0, 2.0, 0.0, 0.0, 2.0, 0.0, 0.0, 2.0, 0.0]
    intervals = [interval(10 * (number + 1), pause=pause) for number, pause in enumerate(pauses)]
    found = whole_cycles(intervals)
    assert [each.step for each in found] == [30, 40, 50, 60, 70, 80]
    assert sum(each.seconds for each in found) == pytest.approx(6 + 2 * 2)
    assert whole_cycles(intervals[:4]) == intervals[:4], "one pause has no cycle"


def test_a_run_that_is_still_getting_faster_is_still_warming_up() -> None:
    starting = [interval(10 * number, seconds) for number, seconds in enumerate([4, 3, 2] + [1] * 9, 1)]
    assert still_rising(starting) == 6
    assert still_rising(starting[6:]) == 0
    assert still_rising(starting[::-1]) == 0, "a run that becomes slower is measured as it is"
    assert still_rising(starting[:5]) == 0, "too few to know"
    found = steady(starting, seconds=1.0)
    assert {each.seconds for each in found[1:]} == {1.0}
    assert found[0].steps + sum(each.steps for each in found[1:]) == 120


def test_the_message_of_a_run_that_fails_is_passed_on() -> None:
    command = Command("train", ("data.path=x",))
    found = failure(2, "run folder x\ndrumline: data.path x does not exist\n  fix: check the path\n", command)
    assert (found.what, found.fix) == ("data.path x does not exist", "check the path")
    found = failure(1, "Traceback\n  File ...\nRuntimeError: shapes\n", command)
    assert found.what == "the run failed: RuntimeError: shapes"
    assert found.fix == "see it fail: drumline train data.path=x"
    assert "memory" in failure(-signal.SIGKILL, "", command).what
    assert "exit code 3" in failure(3, "", command).what


def test_the_time_that_it_takes_is_said() -> None:
    assert announced(3, 5.0) == "3 short runs of about 5 s, and the time to start: about 0:44"
