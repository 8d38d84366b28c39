"""Evidence is read from what a run leaves behind, whole or torn, of this version or an older one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drumline.diagnosis.evidence import read_evidence


def _line(step: int, **values: Any) -> dict[str, Any]:
    numbers = {"step_ms": [10.0], "data_ms": [1.0], "compute_ms": [9.0], **values}
    return {
        "time": 1.0,
        "kind": "times",
        "step": step,
        "epoch": step / 10,
        "steps": 10,
        **numbers,
        "images_per_s": 9.0,
    }


def _run(folder: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    return folder


def test_numbers_of_ranks_are_values_and_everything_else_is_a_fact(tmp_path: Path) -> None:
    line = _line(10, workers=2, own_code=["own.py:3 in loss"], gpu="H200")
    (only,) = read_evidence(_run(tmp_path, {"kind": "train", "step": 5}, line)).intervals
    assert only.values == {"step_ms": (10.0,), "data_ms": (1.0,), "compute_ms": (9.0,)}
    assert only.facts == {"workers": 2, "own_code": ["own.py:3 in loss"], "gpu": "H200"}
    assert (only.get("copy_ms"), only.ranks, only.seconds) == ((0.0,), 1, 0.1)


def test_a_number_that_is_not_known_is_missing_and_not_zero(tmp_path: Path) -> None:
    line = _line(10, compute_ms=[None], nonfinite=["compute_ms"])
    (only,) = read_evidence(_run(tmp_path, line)).intervals
    assert "compute_ms" not in only.values
    assert "compute_ms" not in only.facts


def test_a_torn_line_a_missing_recipe_and_an_empty_folder_are_no_errors(tmp_path: Path) -> None:
    assert read_evidence(tmp_path).intervals == []
    found = read_evidence(_run(tmp_path, _line(10), '{"kind": "times", "step": 2'))
    assert [each.step for each in found.intervals] == [10]
    assert (found.recipe, found.environment) == ({}, {})


def test_a_run_that_was_resumed_on_more_processes_is_judged_as_it_is_now(tmp_path: Path) -> None:
    both = {"step_ms": [5.0, 5.0], "data_ms": [1.0, 1.0], "compute_ms": [4.0, 4.0]}
    found = read_evidence(_run(tmp_path, _line(10), _line(20), _line(30, **both)))
    assert [each.step for each in found.intervals] == [30]


def test_a_damaged_line_is_left_out_and_a_damaged_environment_is_empty(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("[]")
    no_steps = {name: value for name, value in _line(20).items() if name != "steps"}
    damaged = (no_steps, _line(30, step_ms="x"), _line(40, steps=0), _line(50, data_ms=[1.0, 2.0]))
    found = read_evidence(_run(tmp_path, _line(10), *damaged))
    assert [each.step for each in found.intervals] == [10]
    assert found.environment == {}
