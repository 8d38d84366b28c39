"""A restart goes on in the folder of the first start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drumline.config.recipe import Checkpoint, Recipe, Run
from drumline.core.errors import UserError
from drumline.launch.workers import ClaimedFolder
from drumline.state.checkpoint import write_checkpoint
from drumline.state.folder import (
    UNSAVED,
    claimed,
    open_run,
    remember,
    restart_recipe,
    restart_resume,
    write_facts,
)
from drumline.state.manifest import Position


@pytest.fixture
def claim(monkeypatch: pytest.MonkeyPatch) -> Iterator[ClaimedFolder]:
    found = ClaimedFolder()
    for name, value in found.variable.items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()


def recipe(folder: Path, resume: str = "never") -> Recipe:
    return Recipe(run=Run(dir=str(folder)), checkpoint=Checkpoint(resume=resume))


def test_the_first_folder_is_remembered_and_those_inside_it_are_not(claim: ClaimedFolder) -> None:
    assert claimed() == claim.read() == ""
    remember("photos-1")
    remember("initial-fsp")
    assert claimed() == claim.read() == "photos-1"
    claim.write("other")
    assert claimed() == "other"


def test_without_a_launcher_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRUMLINE_CLAIMED", raising=False)
    remember("photos-1")
    assert claimed() == ""


def test_a_restart_resumes_under_the_name_that_was_claimed(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert restart_resume(recipe(tmp_path), "x") == "auto"
    again = restart_recipe(recipe(tmp_path), "x", "auto")
    assert (again.run.name, again.checkpoint.resume) == ("x", "auto")
    assert again == replace(recipe(tmp_path), run=again.run, checkpoint=again.checkpoint)


def test_a_restart_before_the_first_save_resumes_from_the_other_run_again(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert restart_resume(recipe(tmp_path, "runs/old"), "x") == "runs/old"
    (tmp_path / "x/checkpoints/step-3").mkdir(parents=True)
    assert restart_resume(recipe(tmp_path, "runs/old"), "x") == "auto"


def test_a_restart_lost_before_its_first_checkpoint_is_not_taken_for_another_run(
    tmp_path: Path, claim: ClaimedFolder
) -> None:
    groups = {"model": {"w": torch.ones(3)}, "optimizer": {}}
    (tmp_path / "old/checkpoints").mkdir(parents=True)
    saved = write_checkpoint(tmp_path / "old/checkpoints", groups, Position(3, 10), "", {})
    wanted = replace(recipe(tmp_path, str(tmp_path / "old")), run=Run(dir=str(tmp_path), name="x"))
    first = open_run(wanted, "digits")
    write_facts(first.path, "", {})
    (first.path / UNSAVED).touch()
    first.leave()
    again = open_run(wanted, "digits")
    assert again.resume_from == saved
    again.leave()
    (first.path / UNSAVED).unlink()  # it has saved one, which is gone
    with pytest.raises(UserError, match="holds a different run"):
        open_run(wanted, "digits")


def test_a_machine_that_does_not_see_the_folder_does_not_begin_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the folder of the run to continue, does not exist") as caught:
        restart_resume(recipe(tmp_path), "x")
    assert "shared disk" in caught.value.fix
