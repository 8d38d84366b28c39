"""One writer per run folder, no run started over by accident, resuming where it is safe."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drumline.config.recipe import Checkpoint, Data, Model, Optim, Parallel, Recipe, Run, Train
from drumline.config.toml import dump_recipe
from drumline.core import lock
from drumline.core.errors import UserError
from drumline.state.checkpoint import write_checkpoint
from drumline.state.folder import (
    auto_stem,
    find_checkpoint,
    open_run,
    repeatable,
    run_of,
    write_facts,
)
from drumline.state.manifest import Position
from drumline.state.provenance import changed_environment, changed_settings


def recipe(folder: Path, name: str = "auto", resume: str = "never", model: str = "resnet8") -> Recipe:
    return Recipe(
        run=Run(dir=str(folder), name=name), model=Model(name=model), checkpoint=Checkpoint(resume=resume)
    )


def save(run: Path, step: int) -> Path:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    groups = {"model": {"w": torch.ones(3)}, "optimizer": {}}
    return write_checkpoint(run / "checkpoints", groups, Position(step, 10), "", {"threads": 1})


def rot(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"rot")


def test_auto_names_count_up_from_the_next_free_number(tmp_path: Path) -> None:
    opened = [open_run(recipe(tmp_path / "runs"), "digits") for _ in range(3)]
    assert [one.path.name for one in opened] == [f"digits-resnet8-{n}" for n in (1, 2, 3)]
    assert opened[0].checkpoints == tmp_path / "runs" / "digits-resnet8-1" / "checkpoints"


def test_auto_names_are_names_of_one_folder(tmp_path: Path) -> None:
    one = open_run(recipe(tmp_path, model="timm/vit:tiny"), "my.data:factory")
    assert one.path == tmp_path / "my.data-timm-vit-tiny-1"


@pytest.mark.parametrize(
    ("path", "stem"),
    [
        ("", "folder"),
        ("photos", "photos"),
        ("/data/my photos/", "my-photos"),
        ("sets/photos.packed", "photos"),
        ("photos.tar", "photos"),
        ("photos.CSV", "photos"),
        ("photos.v2", "photos.v2"),
        (".hidden", "hidden"),
        ("/", "folder"),
        ("a\x1b[2Jb", "a-[2Jb"),
        ("x" * 300, "x" * 40),
    ],
)
def test_auto_names_begin_with_the_name_of_the_data(path: str, stem: str) -> None:
    assert auto_stem("folder", path, "resnet8") == f"{stem}-resnet8"


def test_an_auto_name_without_a_folder_of_its_own_is_that_of_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path / "photos")
    assert auto_stem("folder", ".", "resnet8") == "photos-resnet8"


def test_a_folder_that_holds_a_run_is_not_started_over(tmp_path: Path) -> None:
    open_run(recipe(tmp_path, "a"), "digits").lock.close()
    again = open_run(recipe(tmp_path, "a"), "digits")
    assert again.resume_from is None
    again.lock.close()
    write_facts(tmp_path / "a", "x = 1\n", {"threads": 1})
    with pytest.raises(UserError, match=r"run.name = a: .* already holds a run") as caught:
        open_run(recipe(tmp_path, "a"), "digits")
    assert "--checkpoint.resume auto" in caught.value.fix


def test_checkpoints_alone_make_a_run_too(tmp_path: Path) -> None:
    save(tmp_path / "a", 3)
    with pytest.raises(UserError, match="already holds a run"):
        open_run(recipe(tmp_path, "a"), "digits")


def test_resume_auto_starts_an_empty_folder_and_continues_a_run(tmp_path: Path) -> None:
    first = open_run(recipe(tmp_path, "a", "auto"), "digits")
    assert first.resume_from is None
    assert first.notes == (f"nothing to resume in {tmp_path / 'a'}: starting at step 0",)
    first.lock.close()
    save(first.path, 3)
    newest = save(first.path, 12)
    again = open_run(recipe(tmp_path, "a", "auto"), "digits")
    assert (again.resume_from, again.notes) == (newest, ())


def test_a_named_run_goes_back_to_its_own_checkpoint_by_the_command_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, _ = save(tmp_path / "runs" / "photos", 3), save(tmp_path / "runs" / "photos", 12)
    (tmp_path / "runs" / "photos" / "recipe.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    words = ["runs/photos/recipe.toml", f"checkpoint.resume={earlier}"]
    back = open_run(Recipe.from_args([*words, "run.name=photos"]), "digits")
    assert (back.path.resolve(), back.resume_from, back.branched) == (
        tmp_path / "runs" / "photos",
        earlier,
        False,
    )
    back.lock.close()
    new = open_run(Recipe.from_args(words), "digits")
    assert new.path.name != "photos"
    assert new.branched
    new.lock.close()


def test_resume_auto_passes_over_a_bad_checkpoint_loudly(tmp_path: Path) -> None:
    good, bad = save(tmp_path / "a", 3), save(tmp_path / "a", 12)
    rot(bad)
    opened = open_run(recipe(tmp_path, "a", "auto"), "digits")
    assert opened.resume_from == good
    assert len(opened.notes) == 1
    assert opened.notes[0].startswith("WARNING: ")
    assert "step-12/model.safetensors: has 3 bytes" in opened.notes[0]
    assert opened.notes[0].endswith("using step-3")


def test_resume_auto_without_a_valid_checkpoint_does_not_start_over(tmp_path: Path) -> None:
    rot(save(tmp_path / "a", 3))
    with pytest.raises(UserError, match=r"no checkpoint verifies\..*step-3/model.safetensors"):
        open_run(recipe(tmp_path, "a", "auto"), "digits")


def test_resume_takes_a_run_or_one_of_its_checkpoints(tmp_path: Path) -> None:
    old, new = save(tmp_path / "a", 3), save(tmp_path / "a", 12)
    assert open_run(recipe(tmp_path, "b", str(tmp_path / "a")), "digits").resume_from == new
    assert open_run(recipe(tmp_path, "c", str(old)), "digits").resume_from == old
    assert open_run(recipe(tmp_path, "a", str(old)), "digits").resume_from == old


def test_resuming_one_run_does_not_write_over_another(tmp_path: Path) -> None:
    save(tmp_path / "a", 3)
    save(tmp_path / "b", 5)
    with pytest.raises(UserError, match=f"run.name = b: {tmp_path / 'b'} holds a different run"):
        open_run(recipe(tmp_path, "b", str(tmp_path / "a")), "digits")


def test_a_run_is_recognised_under_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", 3)
    monkeypatch.chdir(tmp_path)
    assert open_run(recipe(tmp_path, "a", "./a/checkpoints/step-3"), "digits").resume_from is not None


@pytest.mark.parametrize("wanted", ["nowhere", "empty"])
def test_resuming_from_a_missing_path_is_rejected(tmp_path: Path, wanted: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=wanted):
        open_run(recipe(tmp_path, "a", str(tmp_path / wanted)), "digits")


def test_finding_a_checkpoint_falls_back_and_says_why(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 3), save(tmp_path, 12)
    rot(bad)
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "checkpoints")
    found, complaints = find_checkpoint(tmp_path)
    assert found == good
    assert "step-12" in complaints[0]
    rot(good)
    with pytest.raises(UserError, match=r"no checkpoint to use: .*step-12.*; .*step-3"):
        find_checkpoint(tmp_path)


def test_a_second_opener_is_rejected_until_the_first_is_done(tmp_path: Path) -> None:
    first = open_run(recipe(tmp_path, "a"), "digits")
    with pytest.raises(UserError, match="is being written by another run"):
        open_run(recipe(tmp_path, "a", "auto"), "digits")
    first.lock.close()
    open_run(recipe(tmp_path, "a"), "digits")


@pytest.mark.slow
def test_another_process_is_rejected_and_a_killed_one_holds_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from drumline.config.recipe import Recipe, Run\n"
        "from drumline.state.folder import open_run\n"
        f"opened = open_run(Recipe(run=Run(dir={str(tmp_path)!r}, name='a')), 'digits')\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(UserError, match="is being written by another run"):
            open_run(recipe(tmp_path, "a"), "digits")
    finally:
        other.kill()
        other.communicate()
    open_run(recipe(tmp_path, "a"), "digits")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=f"cannot lock .*a .{os.strerror(code)}") as caught:
        open_run(recipe(tmp_path, "a"), "digits")
    assert "--run.dir on a local disk" in caught.value.fix


def test_a_lock_file_removed_before_it_was_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened just before a run that never used the folder removed it: somebody else may make it anew."""
    first = open_run(recipe(tmp_path, "a"), "digits")
    flock, calls = fcntl.flock, []

    def just_before(descriptor: int, how: int) -> None:
        if not calls:
            calls.append(how)
            first.leave()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", just_before)
    second = open_run(recipe(tmp_path, "a"), "digits")
    assert (tmp_path / "a" / ".lock").stat().st_ino == os.fstat(second.lock.fileno()).st_ino
    monkeypatch.undo()
    with pytest.raises(UserError, match="is being written by another run"):
        open_run(recipe(tmp_path, "a"), "digits")


def test_a_lock_file_that_never_stays_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that gives a file another number each time it is asked."""
    monkeypatch.setattr(lock, "_is_linked", lambda lock, path: False)
    with pytest.raises(UserError, match=r"cannot lock .* .the lock file keeps changing"):
        open_run(recipe(tmp_path, "a"), "digits")


def test_of_many_that_start_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    def start(_: int) -> object:
        try:
            return open_run(recipe(tmp_path, "a"), "digits")
        except UserError as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        opened = list(pool.map(start, range(64)))
    refused = [one for one in opened if isinstance(one, UserError)]
    assert len(refused) == 63
    assert all("is being written by another run" in one.what for one in refused)  # type: ignore[attr-defined]


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot write the run folder"):
        open_run(recipe(tmp_path, "a"), "digits")
    assert not (tmp_path / "elsewhere").exists()


def test_an_untrusted_environment_cannot_control_the_terminal() -> None:
    packages = {"torch": "2", "pillow": "1"}
    here = {"device": "cpu", "packages": packages}
    there = {"device": "\x1b[2J\udc80" + "x" * 10_000, "packages": packages}
    (line,) = changed_environment(there, here)
    assert line.isprintable()
    assert len(line) < 200
    assert changed_environment({}, here) == ["device: None -> cpu", "torch: None -> 2", "pillow: None -> 1"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot write the run folder in {tmp_path / 'file'}"):
        open_run(recipe(tmp_path / "file"), "digits")


def test_changed_settings_name_what_can_change_the_result(tmp_path: Path) -> None:
    base = Recipe()
    other = replace(
        base,
        run=Run(dir="elsewhere", name="b", seed=1),
        data=Data(workers=7),
        optim=Optim(lr=0.2),
        train=Train(log_every=1),
        parallel=Parallel(timeout=5.0, processes=2),
        checkpoint=Checkpoint(every_steps=9, keep=1, resume="auto"),
    )
    assert changed_settings(dump_recipe(base), dump_recipe(base)) == []
    changes = changed_settings(dump_recipe(base), dump_recipe(other))
    assert [change.split(":")[0] for change in changes] == ["optim.lr", "parallel.processes", "run.seed"]
    assert changes[0] == 'optim.lr: "auto" -> 0.2'


def test_a_field_that_only_one_version_has_is_a_change() -> None:
    assert changed_settings("[a]\nx = 1\n", "[a]\ny = 2\n") == ["a.x: 1 -> not set", "a.y: not set -> 2"]


def test_the_run_of_a_checkpoint_and_of_weights_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, checkpoint = tmp_path / "a", save(tmp_path / "a", 3)
    write_facts(run, "", {})
    best = run / "weights" / "best.safetensors"
    best.parent.mkdir()
    best.touch()
    link = tmp_path / "link.safetensors"
    link.symlink_to(best)
    for path in (run, checkpoint, checkpoint / "model.safetensors", best, best.parent, link):
        assert run_of(path) == run
    monkeypatch.chdir(best.parent)
    assert run_of(Path("best.safetensors")) == run
    monkeypatch.chdir(checkpoint)
    assert run_of(Path()) == run
    (tmp_path / "moved.safetensors").touch()
    assert run_of(tmp_path / "moved.safetensors") is None


def test_resuming_from_another_folder_is_detected(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "a", 3)
    assert open_run(recipe(tmp_path, "b", str(checkpoint)), "digits").branched
    assert not open_run(recipe(tmp_path, "a", str(checkpoint)), "digits").branched
    assert not open_run(recipe(tmp_path, "c"), "digits").branched


def test_a_folder_that_was_never_used_goes_away_again(tmp_path: Path) -> None:
    unused, used, others = (open_run(recipe(tmp_path, name), "digits") for name in "abc")
    write_facts(used.path, "", {})
    (others.path / "notes.txt").touch()
    for opened in (unused, used, others):
        opened.leave()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]
    assert [path.name for path in others.path.iterdir()] == ["notes.txt"]


def test_a_folder_is_taken_away_while_it_is_still_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlocked first, another run could lock the file in between and lose it."""
    opened = open_run(recipe(tmp_path, "a"), "digits")
    unlink, locked = Path.unlink, []

    def watched(path: Path, missing_ok: bool = False) -> None:
        locked.append(not opened.lock.closed)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    opened.leave()
    assert locked == [True]
    assert opened.lock.closed


def test_a_saved_recipe_runs_again_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    asked = replace(
        recipe(Path(), "a", "auto"),
        data=Data(path="images"),
        model=Model(weights="classes=3"),
        optim=Optim(lr=0.3),
    )
    saved = repeatable(asked)
    assert saved.data.path == str(tmp_path / "images")
    assert saved.run == replace(asked.run, dir=str(tmp_path))
    assert saved.model.weights == "classes=3"
    assert saved.checkpoint.resume == "never"
    assert saved.optim == asked.optim


def test_another_set_up_is_named_where_it_can_change_bits() -> None:
    packages = {"torch": "2.13", "pillow": "12", "numpy": "2"}
    here = {"threads": 2, "device": "cpu", "host": "a", "packages": packages}
    there = {
        "threads": 4,
        "device": "cpu",
        "host": "b",
        "packages": {**packages, "torch": "2.14", "numpy": "3"},
    }
    assert changed_environment(here, here) == []
    assert changed_environment(here, there) == ["threads: 2 -> 4", "torch: 2.13 -> 2.14"]
    limited = {**here, "arithmetic": {"ONEDNN_MAX_CPU_ISA": "AVX2", "libc": "glibc 2.36"}}
    free = {**here, "arithmetic": {"libc": "glibc 2.36"}}
    assert changed_environment(limited, free, strict=True) == ["ONEDNN_MAX_CPU_ISA: AVX2 -> not set"]
    assert changed_environment(here, free, strict=True) == []  # saved by a version that did not record it
    newer = {**here, "packages": {**packages, "drumline": "0.2"}}
    assert changed_environment(here, newer) == []
    assert changed_environment(here, newer, strict=True) == ["drumline: None -> 0.2"]
