"""The verdict fits a terminal, shows where the time goes, and ranks differ in columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drumline.diagnosis.evidence import Evidence, Interval
from drumline.diagnosis.figures import Figures
from drumline.diagnosis.rules import diagnose
from drumline.diagnosis.verdict import time_parts, verdict_lines
from tests.diagnosis.test_rules import FACTS, GPU, evidence, interval

CASES = {
    "healthy": evidence(),
    "several reasons": evidence(host_evaluation_ms=300.0, host_teacher_ms=60.0, loop_cores=0.99),
    "ranks that differ": evidence(
        interval(
            facts={**FACTS, "own_code": ["a_long_name_of_a_module.py:1234 in " + "x" * 20] * 2},
            step_ms=(100.0, 100.0),
            host_forward_ms=(30.0, 60.0),
            host_exchange_ms=(31.0, 1.0),
            loop_cores=(0.7, 0.98),
            own_code_share=(0.0, 0.9),
        )
    ),
    "eight ranks": evidence(
        interval(step_ms=(100.0,) * 8, host_exchange_ms=(31.0,) * 7 + (1.0,), loop_cores=0.7)
    ),
    "gpu": evidence(interval(facts=GPU, behind=1.0, gpu_use=0.6), recipe={"train.capture": "off"}),
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", CASES)
def test_lines_fit_the_terminal(name: str, width: int) -> None:
    found = diagnose(CASES[name])
    lines = verdict_lines(CASES[name], found, width)
    assert max(map(len, lines)) <= width
    assert len(lines) < 40


def test_nothing_stands_out_and_the_share_that_computes() -> None:
    lines = verdict_lines(evidence(), [], 80)
    assert lines[-1] == "nothing stands out: 97 % of the time is computation"
    assert lines[0].startswith("100 steps up to step 100: 2,560 img/s at 100 ms per step")
    busy = evidence(interval(facts={**GPU, "captured": True}, gpu_use=0.98))
    assert verdict_lines(busy, [], 80)[-1] == (
        "nothing stands out: 97 % of the time is computation, the GPU is busy for 98 %"
    )


def test_a_short_last_interval_does_not_replace_a_long_first_one() -> None:
    last = replace(interval(2), steps=1)
    lines = verdict_lines(evidence(interval(), last), [], 80)
    assert lines[0].startswith("101 steps up to step 200: ")
    assert verdict_lines(Evidence([last]), [], 80)[0].startswith("1 step up to step 200: ")
    assert "without the first 100" in verdict_lines(evidence(interval(), interval(2)), [], 80)[0]


def test_an_older_run_shows_the_time_that_it_did_not_record() -> None:
    values = {"step_ms": (10.0,), "compute_ms": (4.0,), "data_ms": (1.0,)}
    lines = verdict_lines(Evidence([Interval(9, 1.0, 9, 100.0, values)]), [], 80)
    shares = {line[2:28].strip(): line[28:36].split()[0] for line in lines if "█" in line}
    assert shares == {"computing": "40", "waiting for data": "10", "not recorded": "50"}


def test_a_reason_has_its_sentence_the_flag_and_the_speeds() -> None:
    found = diagnose(evidence(host_teacher_ms=60.0))
    text = "\n".join(verdict_lines(evidence(host_teacher_ms=60.0), found, 120))
    assert "1. The teacher takes 60 % of each step" in text
    assert "Try `distill.cache=teacher-cache`." in text
    assert "Predicted: 2,560 img/s -> 6,400 img/s, 60 % of the time saved." in text


def test_ranks_have_columns_if_they_differ() -> None:
    shown = "\n".join(verdict_lines(CASES["ranks that differ"], [], 80))
    assert "rank 0   rank 1" in shown
    (row,) = [line.split() for line in shown.splitlines() if "waiting for other ranks" in line]
    assert row[-4:] == ["31", "%", "1.0", "%"]
    assert "rank 0" not in "\n".join(verdict_lines(evidence(interval(step_ms=(100.0, 100.0))), [], 80))


def test_sleep_between_two_steps_is_counted_once() -> None:
    asleep = interval(
        compute_ms=1.0, host_other_ms=90.0, host_forward_ms=0.5, host_data_ms=9.0, loop_cores=0.05
    )
    parts = time_parts(Figures(evidence(asleep)), 0)
    assert parts["stall"] > 0
    assert min(parts.values()) >= 0
    assert sum(parts.values()) - parts["data"] == pytest.approx(91.0 + parts["guards"] + parts["log"])


@pytest.mark.parametrize("facts", [FACTS, GPU], ids=["cpu", "gpu"])
def test_the_parts_add_up_to_the_whole_time(facts: dict[str, Any]) -> None:
    inside = (
        {"device_teacher_ms": 20.0, "device_exchange_ms": 5.0} if facts is GPU else {"host_teacher_ms": 20.0}
    )
    one = interval(facts=facts, host_evaluation_ms=20.0, host_checkpoint_ms=5.0, copy_ms=0.5, **inside)
    figures = Figures(Evidence([one]))
    assert sum(time_parts(figures, 0).values()) == pytest.approx(figures.wall_ms, rel=0.01)


def test_a_few_seconds_are_said_to_be_few() -> None:
    short = evidence(interval(step_ms=10.0))
    assert "Only 1.0 s were measured, so chance may dominate" in " ".join(verdict_lines(short, [], 120))
