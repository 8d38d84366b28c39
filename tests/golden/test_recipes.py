"""Golden recipes: each ends with the stored bits, and goes through them at every recorded step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.check import check
from tests.golden.recipes import ALSO, COMMANDS, EQUAL_STATES, Golden, drumline, lay_out, observed, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    lay_out(folder)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_recipe_gives_the_golden_bits(name: str, folder: Path) -> None:
    check(observed(run(folder, name, COMMANDS[name])), name)


@pytest.mark.parametrize("name", ALSO)
def test_other_processes_and_workers_give_the_golden_bits(name: str, folder: Path) -> None:
    golden, command = ALSO[name]
    check(observed(run(folder, name, command)), golden)


def test_pipelines_hold_the_golden_state_of_plain_accumulation() -> None:
    runs = Golden.read().runs
    assert len({runs[name]["state"] for name in EQUAL_STATES}) == 1


def test_every_golden_run_has_its_recipe() -> None:
    assert set(Golden.read().runs) == set(COMMANDS)


def test_eval_scores_a_run_as_its_last_evaluation_did(folder: Path) -> None:
    name = "custom-files"
    made = folder / "runs" / name
    if not made.exists():
        run(folder, name, COMMANDS[name])
    line = observed(made)["eval"][-1]
    found = drumline(["eval", f"runs/{name}", "--trust", "parallel.threads=1"], folder)
    assert {key: found[key] for key in ("top1", "loss", "correct", "samples")} == {
        key: line[key] for key in ("top1", "loss", "correct", "samples")
    }
