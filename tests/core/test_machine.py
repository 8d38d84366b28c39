"""The part of the machine that containers and batch jobs allow a process to use."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil
import pytest

from drumline.core import machine
from drumline.core.machine import raise_descriptor_limit, usable_cores, usable_memory


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000"}, 16),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
    ],
)
def test_cores_are_cut_to_the_containers_share(
    sixteen_cores: None, tmp_path: Path, files: dict[str, str], cores: int
) -> None:
    _write(tmp_path, files)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_is_cut_to_the_containers_limit(tmp_path: Path, file: str) -> None:
    total = psutil.virtual_memory().total
    assert usable_memory(tmp_path) == total
    _write(tmp_path, {file: "1048576"})
    assert usable_memory(tmp_path) == 1048576
    _write(tmp_path, {file: str(2**63 - 4096)})
    assert usable_memory(tmp_path) == total
    _write(tmp_path, {file: "max"})
    assert usable_memory(tmp_path) == total


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1048576), (65536, 1048576)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((100000, 1048576), None),
    ],
)
def test_the_descriptor_limit_is_raised_never_lowered(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], expected: tuple[int, int] | None
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(machine, "descriptor_limits", lambda: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: given.append(pair))
    assert raise_descriptor_limit() == (expected or limits)[0]
    assert given == ([expected] if expected else [])


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
