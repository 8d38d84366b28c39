"""`drumline verify` reads every byte and says which file is bad."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from drumline.core.errors import UserError
from drumline.state.chain import FILE, HEADER, record_text
from drumline.state.checkpoint import newest_valid, write_checkpoint, write_checksums
from drumline.state.fingerprint import state_sha256
from drumline.state.manifest import Position
from drumline.state.verify import verify_run

WHOLE = (HEADER + record_text(1, {"ids": {"batch": 7}}, True, "")[0]).encode()
"""Fingerprints of one step."""


def groups(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((3,), float(step))}, "optimizer": {"m/w": torch.zeros(3)}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (9, 10, 11):
        write_checkpoint(tmp_path / "checkpoints", groups(step), Position(step, 5), "", {})
    return tmp_path


def test_a_valid_run_shows_the_hash_of_its_newest_state(run: Path) -> None:
    found = verify_run(run)
    assert (found.sound, found.checkpoints, found.unsound, found.step) == (True, 3, (), 11)
    assert found.state_sha256 == state_sha256(groups(11))
    assert f"state sha256: {state_sha256(groups(11))}" in found.lines
    assert [line[:12] for line in found.lines[:3]] == ["ok   step-9:", "ok   step-10", "ok   step-11"]
    inside = verify_run(run / "checkpoints")
    assert (inside.checkpoints, inside.step, inside.state_sha256) == (3, 11, found.state_sha256)


def test_a_bad_checkpoint_is_named_with_its_file_and_the_newest_valid_one_counts(run: Path) -> None:
    (run / "checkpoints" / "step-11" / "optimizer.safetensors").write_bytes(b"rot")
    found = verify_run(run)
    assert not found.sound
    assert (found.step, found.state_sha256) == (10, state_sha256(groups(10)))
    assert "step-11/optimizer.safetensors: has 3 bytes" in found.unsound[0]
    assert any(line.startswith("BAD  step-11") for line in found.lines)
    assert found.lines[-1].startswith("fix: ")


def test_without_a_valid_checkpoint_there_is_no_hash(run: Path) -> None:
    for step in (9, 10, 11):
        (run / "checkpoints" / f"step-{step}" / "manifest.json").unlink()
    found = verify_run(run)
    assert (found.sound, len(found.unsound), found.step, found.state_sha256) == (False, 3, -1, "")
    assert not any("state sha256" in line for line in found.lines)


@pytest.mark.parametrize("broken", [False, True])
def test_a_single_checkpoint_can_be_looked_at(run: Path, broken: bool) -> None:
    path = run / "checkpoints" / "step-10"
    if broken:
        (path / "manifest.json").unlink()
    found = verify_run(path)
    assert (found.sound, found.checkpoints) == (not broken, 1)


def test_a_folder_without_checkpoints_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        verify_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="holds no checkpoint"):
        verify_run(tmp_path / "file")
    with pytest.raises(UserError, match="does not exist"):
        verify_run(tmp_path / "nowhere")


def test_leftovers_and_missing_records_are_reported_but_are_not_damage(run: Path) -> None:
    (run / "checkpoints" / "step-12.tmp").mkdir()
    (run / "checkpoints" / "step-8.aside").mkdir()
    (run / "recipe.toml").write_text("= =")
    (run / "environment.json").write_text("[" * 100_000)
    found = verify_run(run)
    assert found.sound
    told = [note.split(":")[0] for note in found.notes]
    assert told == [
        "step-12.tmp",
        "step-8.aside",
        "cannot read recipe.toml",
        "cannot read environment.json",
        f"{FILE} is missing",
    ]
    assert all(f"note {note}" in found.lines for note in found.notes)
    (run / "recipe.toml").write_text("[run]\n")
    (run / "environment.json").write_text("{}")
    (run / FILE).write_bytes(WHOLE)
    assert len(verify_run(run).notes) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"# none\n", "not a fingerprint file"),
        (WHOLE.replace(b"1 ids batch", b"1 ids botch"), "changed since they were written"),
        (WHOLE[:-1], "the last record is incomplete"),
    ],
)
def test_changed_fingerprints_are_reported(run: Path, content: bytes, said: str) -> None:
    (run / FILE).write_bytes(content)
    found = verify_run(run)
    assert found.sound
    assert any(note.startswith(FILE) and said in note for note in found.notes)


def test_weights_are_checked_and_an_unlisted_file_is_damage(run: Path) -> None:
    (run / "weights").mkdir()
    shutil.copyfile(run / "checkpoints/step-9/model.safetensors", run / "weights" / "best.safetensors")
    write_checksums(run / "weights")
    assert "ok   weights: 1 file" in verify_run(run).lines
    shutil.copyfile(run / "checkpoints/step-9/model.safetensors", run / "weights" / "last.safetensors")
    assert "last.safetensors: sha256.txt does not list it" in verify_run(run).unsound[0]
    (run / "weights" / "last.safetensors").unlink()
    listed = (run / "weights" / "sha256.txt").read_text()
    for place in range(len(listed)):
        (run / "weights" / "sha256.txt").write_text(listed[:place] + "~" + listed[place + 1 :])
        assert not verify_run(run / "weights" / "..").sound, place
    (run / "weights" / "sha256.txt").write_text(listed.replace("best", "../../best"))
    assert "is not a checksum and a file name" in verify_run(run).unsound[0]
    (run / "weights" / "sha256.txt").unlink()
    assert any("sha256.txt is missing" in note for note in verify_run(run).notes)


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_called_bad(run: Path) -> None:
    """As a run does that goes on: it deletes the oldest, and writes a newer one."""

    def meddle(items: Iterable[Path], total: int) -> Iterable[Path]:
        assert total == 3
        for item in items:
            if item.name == "step-10":
                item.rename(item.with_name("step-10.tmp"))
                write_checkpoint(item.parent, groups(12), Position(12, 5), "", {})
            yield item

    found = verify_run(run, meddle)
    assert (found.sound, found.checkpoints, found.step) == (True, 3, 12)
    assert "gone step-10: deleted by its run meanwhile" in found.lines


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_what_changes_between_two_reads_is_looked_at_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The manifest is of the one before: its files are not there, or are another's."""
    from drumline.state import checkpoint

    verify, meddled = checkpoint.verify_file, []

    def meddle(path: Path, *expected: object) -> None:
        if path.parent.name == "step-11" and not meddled:
            meddled.append(path)
            path.parent.rename(run / "checkpoints" / "step-11.tmp")
            if how == "replaced":
                write_checkpoint(run / "checkpoints", groups(99), Position(11, 5), "", {})
        verify(path, *expected)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "verify_file", meddle)
    found, complaints = newest_valid(run / "checkpoints")
    assert meddled
    assert complaints == []
    assert found is not None
    assert found.name == ("step-10" if how == "deleted" else "step-11")


def test_initial_stages_are_checked_too(run: Path) -> None:
    stage = run / "initial-factor" / "checkpoints"
    write_checkpoint(stage, groups(50), Position(50, 5), "", {})
    found = verify_run(run)
    assert (found.checkpoints, found.step) == (4, 11)
    assert found.lines[0].startswith("ok   initial-factor/step-50: ")
    (stage / "step-50" / "model.safetensors").write_bytes(b"rot")
    assert not verify_run(run).sound
