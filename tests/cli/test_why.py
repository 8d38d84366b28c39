"""`drumline why`: of a run that is finished, running or killed; what it prints, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from drumline.cli import main
from tests.runs.command import TINY, begin, metrics, train, wait_until


def _why(capsys: pytest.CaptureFixture[str], run: Path) -> tuple[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["why", str(run)]) == 0
    *lines, result = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(result)


@pytest.mark.slow
def test_a_finished_run_has_a_table_a_verdict_and_a_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "slow", "train.eval_every=0.04", "checkpoint.every_steps=0")
    text, result = _why(capsys, tmp_path / "runs/slow")
    assert "  computing  " in text
    found = {each["code"]: each for each in result["findings"]}
    assert found["evaluation"]["flag"].startswith("train.eval_every=")
    assert 0 < found["evaluation"]["saving"] < 1
    assert "Evaluations take " in text
    assert "Predicted: " in text


@pytest.mark.slow
def test_a_run_under_way_and_one_that_was_killed_have_a_verdict_within_an_endless_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No evaluation is ever reached: the times come by themselves."""
    words = ("train", *TINY, "run.name=long", "data.source=synthetic", "data.size=8", "train.epochs=1000")
    words = (*words, "train.eval_every=0", "checkpoint.every_steps=0", "checkpoint.every_epochs=0")
    run = begin(*words, folder=tmp_path)

    def recorded() -> bool:
        file = tmp_path / "runs/long/metrics.jsonl"
        return file.exists() and bool(metrics(tmp_path, "long", "times"))

    try:
        wait_until(recorded, run)
        text, result = _why(capsys, tmp_path / "runs/long")
        assert re.search(r"[\d,]+ img/s at [\d.]+ m?s per step", text.replace("\n ", ""))
        assert isinstance(result["findings"], list)
    finally:
        run.kill()
        run.communicate()
    assert _why(capsys, tmp_path / "runs/long")[0] == text


def test_a_missing_run_and_a_run_without_times_are_errors_with_a_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(tmp_path / "nothing")]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert main(["why", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err
    (tmp_path / "log.txt").write_text("2026-01-01 00:00:00  started: drumline train\n")
    assert main(["why", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "has no times yet (it is killed)" in error
    assert "fix: train it for longer" in error
