"""Each planted problem is named by `why`, and nothing is claimed about healthy runs: short real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.planted import BUSY, HEALTHY, PLANTED, Case, described, judge, run_case
from tests.runs.command import train


def _run(_: str, *args: str, folder: Path) -> None:
    *args, name = args
    train(folder, name.removeprefix("run.name="), *args, recipe=())


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_a_planted_problem_is_named(case: Case, tmp_path: Path) -> None:
    found = judge(case, run_case(case, tmp_path, _run))
    named = [each for each in found if each.code == case.code]
    assert named, described(found)
    assert case.mentions in named[0].text


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_nothing_is_claimed_about_a_healthy_run(case: Case, tmp_path: Path) -> None:
    found = judge(case, run_case(case, tmp_path, _run))
    assert [each for each in found if each.code != BUSY] == [], described(found)
