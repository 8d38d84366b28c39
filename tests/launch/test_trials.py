"""Some of the trials with two hosts; `python -m tests.launch.trials` runs all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import trials
from tests.launch.hosts import Host, why_not

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.mark.parametrize(
    "trial", [trials.cut_then_sigterm, trials.frozen, trials.skewed_clock, trials.stranger, trials.port_held]
)
def test_two_hosts_come_through(
    hosts: tuple[Host, Host], tmp_path: Path, trial: Callable[[trials.Trial], str]
) -> None:
    assert trials.run_trial(trial, hosts, tmp_path, hurry=True)
