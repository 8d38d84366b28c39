"""No guard reports anything about a correct script: false alarms make users switch guards off."""

from __future__ import annotations

import re

import pytest

from tests.guards.scripts_run import SCRIPTS, run_script

NAMES = re.findall(r"^@correct\ndef (\w+)", (SCRIPTS / "correct.py").read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])  # on two ranks: cases/
def test_correct_scripts_get_no_finding(size: int) -> None:
    outcome = run_script("correct.py", size, seconds=100)
    assert outcome.quiet, outcome.err[0][-3000:] + outcome.err[-1][-3000:]
    for out in outcome.out:
        assert [line.split()[0] for line in out.splitlines()] == NAMES
