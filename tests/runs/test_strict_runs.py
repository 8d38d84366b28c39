"""Strict mode as a user types it: killed, resumed on other numbers of processes, compared, and rejected."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.runs.command import TINY, drumline, sha256, train
from tests.runs.test_same_bits import killed_after

pytestmark = pytest.mark.slow

STRICT = ("run.strict=true", "run.shards=4", "train.ema=0.9", "data.mixup=0.2", "parallel.threads=auto")


def test_a_strict_run_killed_and_resumed_on_other_numbers_of_processes_ends_with_the_bits_of_one_process(
    tmp_path: Path,
) -> None:
    train(tmp_path, "whole", *STRICT)
    worlds = random.sample((2, 3, 4), 2)
    killed_after(tmp_path, "killed", 7, *STRICT, f"parallel.processes={worlds[0]}")
    killed_after(
        tmp_path,
        "killed",
        28,
        *STRICT,
        f"parallel.processes={worlds[1]}",
        "checkpoint.resume=auto",
        "data.workers=2",
    )
    train(tmp_path, "killed", *STRICT, "parallel.processes=2", "checkpoint.resume=auto")
    assert sha256(tmp_path, "killed") == sha256(tmp_path, "whole"), worlds
    said = (tmp_path / "runs/killed/log.txt").read_text()
    assert "resumed from" in said
    assert "may differ" not in said, "another number of processes changes nothing here"
    compared = drumline("compare", "runs/whole", "runs/killed", folder=tmp_path)
    assert compared.returncode == 0, compared.stdout + compared.stderr


def test_a_strict_run_resumes_with_a_different_setup_only_if_strict_is_turned_off(tmp_path: Path) -> None:
    short = (*STRICT, "train.steps=8", "train.eval_every=0")
    train(tmp_path, "run", *short)
    longer = ("run.name=run", "train.steps=12", "train.eval_every=0", "checkpoint.resume=auto")
    rejected = drumline("train", *TINY, *STRICT, *longer, "parallel.threads=2", folder=tmp_path)
    assert rejected.returncode == 2
    assert "run.strict" in rejected.stderr
    assert "threads: 1 -> 2" in rejected.stderr
    assert "--run.no-strict" in rejected.stderr
    plain = [word for word in (*TINY, *STRICT) if not word.startswith(("run.shards", "run.strict"))]
    accepted = drumline("train", *plain, *longer, "parallel.threads=2", "run.strict=false", folder=tmp_path)
    assert accepted.returncode == 0, accepted.stderr
    assert "run.strict: true -> false" in accepted.stderr
    assert "threads: 1 -> 2" in accepted.stderr


def test_the_opening_lines_name_the_shards_and_the_numbers_of_processes(tmp_path: Path) -> None:
    done = drumline(
        "train",
        *TINY,
        *STRICT,
        "train.steps=2",
        "train.eval_every=0",
        "parallel.processes=3",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "strict: 4 shards of 12 samples, the same bits on 1 to 4 processes" in done.stderr
    assert "3 processes share them unevenly" in done.stderr
