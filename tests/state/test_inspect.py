"""`drumline verify` reads every byte and says which file is bad."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.errors import UserError
from drumline.state.checkpoint import Position, write_checkpoint
from drumline.state.fingerprint import state_sha256
from drumline.state.inspect import inspect


def groups(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((3,), float(step))}, "optimizer": {"m/w": torch.zeros(3)}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (9, 10, 11):
        write_checkpoint(tmp_path / "checkpoints", groups(step), Position(step, 5), "", {})
    return tmp_path


def test_a_sound_run_shows_the_hash_of_its_newest_state(run: Path) -> None:
    found = inspect(run)
    assert (found.sound, found.checkpoints, found.unsound, found.step) == (True, 3, (), 11)
    assert found.state_sha256 == state_sha256(groups(11))
    assert f"state sha256: {state_sha256(groups(11))}" in found.lines
    assert [line[:12] for line in found.lines[:3]] == ["ok   step-9:", "ok   step-10", "ok   step-11"]
    assert inspect(run / "checkpoints") == inspect(run).__class__(
        **{**vars(found), "path": str(run / "checkpoints")}
    )


def test_a_bad_checkpoint_is_named_with_its_file_and_the_newest_sound_one_counts(run: Path) -> None:
    (run / "checkpoints" / "step-11" / "optimizer.safetensors").write_bytes(b"rot")
    found = inspect(run)
    assert not found.sound
    assert (found.step, found.state_sha256) == (10, state_sha256(groups(10)))
    assert "step-11/optimizer.safetensors: 3 bytes" in found.unsound[0]
    assert any(line.startswith("BAD  step-11") for line in found.lines)
    assert found.lines[-1].startswith("fix: ")


def test_nothing_sound_has_no_hash(run: Path) -> None:
    for step in (9, 10, 11):
        (run / "checkpoints" / f"step-{step}" / "manifest.json").unlink()
    found = inspect(run)
    assert (found.sound, len(found.unsound), found.step, found.state_sha256) == (False, 3, -1, "")
    assert not any("state sha256" in line for line in found.lines)


@pytest.mark.parametrize("broken", [False, True])
def test_a_single_checkpoint_can_be_looked_at(run: Path, broken: bool) -> None:
    path = run / "checkpoints" / "step-10"
    if broken:
        (path / "manifest.json").unlink()
    found = inspect(path)
    assert (found.sound, found.checkpoints) == (not broken, 1)


def test_what_holds_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        inspect(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="holds no checkpoint"):
        inspect(tmp_path / "file")
    with pytest.raises(UserError, match="does not exist"):
        inspect(tmp_path / "nowhere")
