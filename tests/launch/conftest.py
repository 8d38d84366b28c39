"""Fixtures: a launch whose processes are killed at the end, and two hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.hosts import Host, two_hosts
from tests.launch.job import is_running
from tests.launch.launches import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    result = Run(tmp_path)
    yield result
    for path in tmp_path.glob("pid-*"):
        if is_running(int(path.read_text())):
            os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link between them, for tests that run as root."""
    with two_hosts() as both:
        yield both
