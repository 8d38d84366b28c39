"""No guard says a word about a script that is right: the worst guard is one that cries wolf."""

from __future__ import annotations

import re

import pytest

from tests.guards.scripts_run import SCRIPTS, run_script

NAMES = re.findall(r"^@right\ndef (\w+)", (SCRIPTS / "right.py").read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])  # on two ranks: cases/
def test_scripts_that_are_right_are_left_alone(size: int) -> None:
    outcome = run_script("right.py", size, seconds=100)
    assert outcome.quiet, outcome.err[0][-3000:] + outcome.err[-1][-3000:]
    for out in outcome.out:
        assert [line.split()[0] for line in out.splitlines()] == NAMES
