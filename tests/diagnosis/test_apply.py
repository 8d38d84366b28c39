from __future__ import annotations

import pytest

from drumline.core.errors import UserError
from drumline.diagnosis.apply import Applied, apply, choose, seconds_needed
from drumline.diagnosis.evidence import Evidence, Interval
from drumline.diagnosis.slowdown import Slowdown
from drumline.diagnosis.trial import Command

COMMAND = Command("train", ("data.path=photos",))
WORKERS = Slowdown("workers", "one worker", 0.5, "data.workers=4", images_per_s=500)


def evidence(speed: float, intervals: int = 2) -> Evidence:
    """100 steps per epoch; a step of 64 images takes 64 / `speed` seconds."""
    values = {"step_ms": (64e3 / speed,)}
    return Evidence([Interval(10 * n + 10, (n + 1) / 10, 10, speed, values) for n in range(intervals)])


def test_the_best_reason_with_a_setting_is_applied() -> None:
    disk = Slowdown("disk", "slow", 0.7, fix="a faster disk")
    idle = Slowdown("threads", "many", 0.0, "parallel.threads=2")
    assert choose([disk, idle, WORKERS]) is WORKERS
    with pytest.raises(UserError, match="no setting removes what was found: slow") as raised:
        choose([disk, idle])
    assert raised.value.fix == "a faster disk"
    with pytest.raises(UserError, match="nothing stands out"):
        choose([])


def test_the_prediction_is_compared_with_the_measurement() -> None:
    speeds = {(): 500.0, ("data.workers=4",): 970.0}
    ran = []

    def run(command: Command) -> Evidence:
        ran.append(command.arguments[1:])
        return evidence(speeds[command.arguments[1:]])

    found = apply(COMMAND, WORKERS, None, run)
    assert ran == [(), ("data.workers=4",)]
    assert (found.before, found.predicted, found.after) == pytest.approx((500, 1000, 970))
    assert found.error == pytest.approx(-0.03)
    assert found.saved == pytest.approx(1 - 500 / 970)
    text, command = found.lines()
    assert text.endswith(
        "500 img/s before, predicted 1,000 img/s, measured 970 img/s: 3.0 % slower than predicted"
    )
    assert command == "drumline train data.path=photos data.workers=4"
    assert apply(COMMAND, WORKERS, evidence(500.0), run).before == pytest.approx(500)
    assert len(ran) == 3, "what is measured already is not measured again"


def test_a_change_that_does_not_help_is_not_recommended() -> None:
    assert Applied(WORKERS, 500, 490, "drumline train").lines()[1] == "the change does not help here"


def test_a_run_too_short_to_be_measured_is_an_error() -> None:
    with pytest.raises(UserError, match="too short"):
        apply(COMMAND, WORKERS, None, lambda command: evidence(500.0, intervals=1))


def test_a_measurement_of_pauses_is_long_enough_for_some_of_them() -> None:
    slow = evidence(64.0)  # a step of a second
    assert seconds_needed(WORKERS, slow, 5.0) == 5.0
    saves = Slowdown("checkpoint", "saves", 0.5, "checkpoint.every_steps=20", images_per_s=64)
    assert seconds_needed(saves, slow, 5.0) == 3 * 20 / 2, "at the speed that is predicted"
    epochs = Slowdown("evaluation", "evaluations", 0.5, "train.eval_every=0.2", images_per_s=64)
    assert seconds_needed(epochs, slow, 5.0) == 3 * 20 / 2
    rare = Slowdown("evaluation", "evaluations", 0.5, "train.eval_every=2", images_per_s=64)
    with pytest.raises(UserError, match="too long for a short run") as raised:
        seconds_needed(rare, slow, 5.0)
    assert "--seconds 300" in raised.value.fix
    assert seconds_needed(rare, slow, 300.0) == 300
