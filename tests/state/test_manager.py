"""Saving in the background: nothing torn, nothing lost in silence, the right ones kept."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.core.errors import UserError
from drumline.state import checkpoint, manager
from drumline.state.checkpoint import checkpoints, read_checkpoint, step_of, verify_checkpoint
from drumline.state.manager import CheckpointManager, superseded
from drumline.state.manifest import Position

Make = Callable[..., CheckpointManager]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Builds managers of one folder and ends their threads."""
    made: list[CheckpointManager] = []

    def build(
        keep: int = 3,
        flush: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> CheckpointManager:
        made.append(CheckpointManager(tmp_path, keep, "", {}, flush, warn))
        made[-1].begin()
        return made[-1]

    yield build
    for one in made:
        one._thread.shutdown()


def state(value: float = 0.0, size: int = 10) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((size,), value)}, "optimizer": {}}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_save_is_on_disk_after_waiting(make: Make, tmp_path: Path) -> None:
    one = make()
    one.save(state(1.5), Position(7, 10))
    one.wait()
    manifest, groups = read_checkpoint(tmp_path / "step-7")
    assert manifest.position.step == 7
    assert groups["model"]["w"].tolist() == [1.5] * 10


def test_what_is_saved_is_the_state_at_the_call(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while the thread writes."""
    go = threading.Event()
    write = manager.write_checkpoint
    monkeypatch.setattr(manager, "write_checkpoint", lambda *a: go.wait(10) and write(*a))
    one, live = make(), state(1.0)
    one.save(live, Position(1, 10))
    live["model"]["w"].fill_(2.0)
    go.set()
    one.wait()
    assert read_checkpoint(tmp_path / "step-1")[1]["model"]["w"].tolist() == [1.0] * 10


def test_tied_weights_are_saved_under_both_names(make: Make, tmp_path: Path) -> None:
    one, shared = make(), torch.rand(4)
    one.save({"model": {"a": shared, "b": shared}, "optimizer": {}}, Position(1, 10))
    one.wait()
    groups = read_checkpoint(tmp_path / "step-1")[1]
    assert torch.equal(groups["model"]["a"], groups["model"]["b"])


def test_the_log_is_flushed_before_a_checkpoint_stands(make: Make, tmp_path: Path) -> None:
    seen: list[list[str]] = []
    one = make(flush=lambda: seen.append(names(tmp_path)))
    one.save(state(), Position(1, 10))
    one.wait()
    assert seen == [[]]


def test_the_newest_and_the_best_are_kept(make: Make, tmp_path: Path) -> None:
    one = make(keep=2)
    for step in range(1, 8):
        one.save(state(), Position(step, 10, best_step=2 if step >= 2 else -1), must=True)
    one.close()
    assert names(tmp_path) == ["step-2", "step-6", "step-7"]


def test_a_new_best_lets_the_old_one_go(make: Make, tmp_path: Path) -> None:
    one = make(keep=1)
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 5)):
        one.save(state(), Position(step, 10, best_step=best), must=True)
    one.close()
    assert names(tmp_path) == ["step-5"]


def test_what_is_superseded_is_older_than_enough_valid_ones() -> None:
    found = [Path(f"step-{step}") for step in (1, 5, 9, 12)]

    def old(keep: int, best: int, *damaged: int) -> list[int]:
        gone = superseded(found, keep, best, lambda path: step_of(path) not in damaged)
        return [step_of(path) for path in gone]

    assert old(4, -1) == []
    assert old(1, -1) == [1, 5, 9]
    assert old(1, 5) == [1, 9]
    assert old(3, -1) == [1]
    assert superseded(found[:1], 3, -1, lambda path: True) == []
    # Damaged ones do not count, and go only with those as old as they are.
    assert old(1, -1, 12) == [1, 5]
    assert old(1, -1, 12, 9, 5) == []
    assert old(2, -1, 9) == [1]
    assert old(1, 1, 9) == [5, 9]
    assert old(1, -1, 1, 5, 9, 12) == []


def test_damaged_newer_ones_do_not_push_out_the_last_good_one(make: Make, tmp_path: Path) -> None:
    one = make(keep=3)
    for step in (1, 2, 3, 4):
        one.save(state(), Position(step, 10), must=True)
    one.close()
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]
    for step in (3, 4):
        flip(tmp_path / f"step-{step}" / "model.safetensors")
    again = make(keep=3)
    for step, left in ((5, "2345"), (6, "23456"), (7, "567")):
        again.save(state(), Position(step, 10), must=True)
        again.wait()
        assert names(tmp_path) == [f"step-{digit}" for digit in left]


def test_one_that_is_damaged_while_the_run_continues_does_not_count(make: Make, tmp_path: Path) -> None:
    """It was verified when it was written; a changed file is looked at again."""
    one = make(keep=2)
    for step in (1, 2):
        one.save(state(), Position(step, 10), must=True)
    one.wait()
    flip(tmp_path / "step-2" / "optimizer.safetensors")
    one.save(state(), Position(3, 10), must=True)
    one.wait()
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


def test_valid_ones_are_read_once_and_not_at_each_save(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    verify = manager.verify_checkpoint
    monkeypatch.setattr(manager, "verify_checkpoint", lambda path: looked.append(path.name) or verify(path))
    one = make(keep=3)
    for step in range(1, 7):
        one.save(state(), Position(step, 10), must=True)
    one.close()
    assert looked == [f"step-{step}" for step in range(1, 7)]


def test_a_best_one_whose_save_failed_does_not_cost_the_best_before(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(keep=1)
    for step, best in ((1, 1), (2, 1)):
        one.save(state(), Position(step, 10, best_step=best), must=True)
    one.wait()
    with monkeypatch.context() as patch:
        patch.setattr(manager, "write_checkpoint", _raise_full)
        one.save(state(), Position(3, 10, best_step=3), must=True)
        with pytest.raises(UserError, match="No space left"):
            one.wait()
    one.save(state(), Position(4, 10, best_step=3), must=True)
    one.wait()
    assert names(tmp_path) == ["step-1", "step-4"]
    one.save(state(), Position(5, 10, best_step=5), must=True)
    one.wait()
    assert names(tmp_path) == ["step-5"]


def test_an_old_one_is_deleted_only_after_the_new_one_verifies(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(keep=1)
    one.save(state(), Position(1, 10))
    one.wait()

    def bad(folder: Path) -> None:
        raise checkpoint.CorruptError(f"{folder}: bad disk")

    monkeypatch.setattr(manager, "verify_checkpoint", bad)
    one.save(state(), Position(2, 10))
    with pytest.raises(UserError, match="bad disk"):
        one.wait()
    verify_checkpoint(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1", "step-2.aside"]
    monkeypatch.undo()
    one.save(state(), Position(2, 10))
    one.wait()
    assert names(tmp_path) == ["step-2", "step-2.aside"]


def test_a_deletion_cut_short_leaves_no_half_checkpoint_under_its_name(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kill -9 would: after the first file is gone."""

    def cut_short(folder: Path, ignore_errors: bool = False) -> None:
        first = min(folder.iterdir(), default=None) if folder.is_dir() else None
        if first is not None:
            first.unlink()

    one = make(keep=1)
    one.save(state(), Position(1, 10))
    one.wait()
    monkeypatch.setattr(manager.shutil, "rmtree", cut_short)
    one.save(state(), Position(2, 10))
    one.wait()
    monkeypatch.undo()
    for path in checkpoints(tmp_path):
        verify_checkpoint(path)
    assert checkpoints(tmp_path)[-1].name == "step-2"
    make()
    assert names(tmp_path) == ["step-2"]


def test_what_a_killed_run_left_half_written_is_removed(make: Make, tmp_path: Path) -> None:
    for name in ("step-9.tmp", "step-9.0123abcd.tmp"):  # the first as earlier versions called it
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
        (tmp_path / name / "receipt-1.json.89abcdef.tmp").write_text("half")
    make()
    assert names(tmp_path) == []


def test_a_step_that_is_saved_already_is_left_alone(make: Make, tmp_path: Path) -> None:
    one = make()
    one.save(state(1.0), Position(1, 10))
    one.wait()
    before = (tmp_path / "step-1" / "manifest.json").stat()
    one.save(state(2.0), Position(1, 10))
    one.wait()
    assert (tmp_path / "step-1" / "manifest.json").stat() == before


def test_checkpoints_beyond_where_a_run_continues_are_set_aside(make: Make, tmp_path: Path) -> None:
    """CorruptError ones, and those of a past that is being rewritten: they must not stand in the way of the new
    ones, nor count as newer than them."""
    one = make(keep=2)
    for step in (10, 20, 30):
        one.save(state(1.0), Position(step, 10, best_step=10), must=True)
    one.close()
    (tmp_path / "step-30" / "model.safetensors").write_bytes(b"rot")
    again = make(keep=2)
    assert again.set_aside_after(10) == ["step-20", "step-30"]
    for step in (15, 20):
        again.save(state(2.0), Position(step, 10, best_step=10), must=True)
    again.wait()
    assert names(tmp_path) == ["step-10", "step-15", "step-20", "step-20.aside", "step-30.aside"]
    assert read_checkpoint(tmp_path / "step-20")[1]["model"]["w"][0] == 2.0
    assert again.set_aside_after(10) == ["step-15", "step-20"]
    assert names(tmp_path) == [
        "step-10",
        "step-15.aside",
        "step-20.2.aside",
        "step-20.aside",
        "step-30.aside",
    ]
    assert again.set_aside_after(10) == []


def test_a_full_disk_leaves_nothing_and_raises_at_the_next_wait(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensors: object, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    one = make()
    monkeypatch.setattr(checkpoint, "write_tensors", full)
    one.save(state(), Position(1, 10))
    with pytest.raises(
        UserError, match=f"could not write a checkpoint in {tmp_path}.*No space left"
    ) as caught:
        one.wait()
    assert "--checkpoint.resume auto" in caught.value.fix
    assert names(tmp_path) == []
    monkeypatch.undo()
    one.save(state(), Position(2, 10))
    one.close()
    assert names(tmp_path) == ["step-2"]


def test_the_last_failed_write_is_never_silent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make()
    monkeypatch.setattr(manager, "write_checkpoint", _raise_full)
    one.save(state(), Position(1, 10))
    with pytest.raises(UserError, match="No space left"):
        one.close()


def test_training_continues_after_a_failed_save_and_the_next_one_tries_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    one = make(warn=said.append)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "write_checkpoint", _raise_full)
        patch.setattr(manager.shutil, "disk_usage", lambda path: Free(7 << 20))
        for step in (1, 2):
            one.save(state(size=3 << 20), Position(step, 10), must=True)
        _until_written(one)
    one.save(state(), Position(3, 10), must=True)
    one.close()
    assert names(tmp_path) == ["step-3"]
    assert [line.split(":")[:2] for line in said] == [["WARNING", " step-1"], ["WARNING", " step-2"]]
    assert "No space left on device (needs 12.0 MiB, 7.0 MiB free)" in said[0]
    assert said[0].endswith("training continues, and the next save tries again (failed saves in a row: 1)")
    assert one.failures == 0


def test_three_failed_saves_in_a_row_end_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    one = make(warn=said.append)
    monkeypatch.setattr(manager, "write_checkpoint", _raise_full)
    for step in (1, 2, 3):
        one.save(state(), Position(step, 10), must=True)
    with pytest.raises(UserError, match="step-3: could not write a checkpoint"):
        one.save(state(), Position(4, 10), must=True)
    assert len(said) == 3
    assert "giving up" in said[-1]
    one.close()  # already told


def test_a_log_that_cannot_be_written_is_a_failed_save(make: Make, tmp_path: Path) -> None:
    def flush() -> None:
        raise UserError("cannot write the log", "make room")

    one = make(flush=flush)
    one.save(state(), Position(1, 10))
    with pytest.raises(UserError, match=r"could not write a checkpoint .*: cannot write the log"):
        one.wait()
    assert names(tmp_path) == []


def test_a_slow_disk_never_holds_up_a_step_and_holds_one_snapshot(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    write = manager.write_checkpoint
    monkeypatch.setattr(manager, "write_checkpoint", lambda *a: go.wait(20) and write(*a))
    monkeypatch.setattr(manager, "PATIENCE_S", 0.1)
    snapshots: list[object] = []
    take = manager.snapshot_to_host
    monkeypatch.setattr(manager, "snapshot_to_host", lambda groups: snapshots.append(1) or take(groups))
    said: list[str] = []
    one = make(warn=said.append)
    began = time.monotonic()
    for step in (1, 2, 3):
        one.save(state(step), Position(step, 10))
    assert time.monotonic() - began < 5
    assert (one.skipped, len(snapshots), len(said)) == (2, 1, 2)
    assert said[1].startswith("step-3 is not saved: step-1 is still being written after 0.")
    assert "(saves skipped so far: 2)" in said[1]
    threading.Timer(0.2, go.set).start()
    one.save(state(4), Position(4, 10), must=True)  # the last one of a run is waited for
    one.close()
    assert names(tmp_path) == ["step-1", "step-4"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_reported_without_harm(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    one = make(keep=1, warn=said.append)
    one.save(state(), Position(1, 10))
    one.wait()
    rename = Path.rename

    def stuck(path: Path, target: Path) -> Path:
        if path.name == "step-1":
            raise OSError(errno.EROFS, "Read-only file system")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stuck)
    one.save(state(), Position(2, 10))
    one.wait()
    assert names(tmp_path) == ["step-1", "step-2"]
    assert len(said) == 1
    assert "cannot delete an old checkpoint" in said[0]


def test_what_is_not_a_half_written_checkpoint_of_ours_stays(make: Make, tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    for name in ("notes.tmp", "step-9-copy.tmp", "step-11.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-11.tmp" / "notes.txt").touch()
    (tmp_path / "step-12.tmp").touch()
    (tmp_path / "step-13.tmp").symlink_to(tmp_path / "step-5")
    before = names(tmp_path)
    make()
    assert names(tmp_path) == before


def test_a_disk_that_is_really_full_gives_the_same_message(make: Make, tmp_path: Path) -> None:
    """The writer of the weights has an error type of its own. The limit on a file's size stands for the disk."""
    one = make()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        one.save(state(size=1 << 20), Position(1, 10))
        with pytest.raises(UserError, match="could not write a checkpoint"):
            one.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []


def test_a_folder_that_is_gone_is_a_user_error(make: Make, tmp_path: Path) -> None:
    one = make()
    shutil.rmtree(tmp_path)
    tmp_path.write_text("a file now")
    one.save(state(), Position(1, 10))
    with pytest.raises(UserError, match="could not write a checkpoint"):
        one.wait()
    tmp_path.unlink()


@pytest.mark.slow
def test_what_kill_9_leaves_always_verifies(tmp_path: Path) -> None:
    """Twelve savers, each killed at a random moment of saving, verifying or deleting."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 12
    assert [round_["unsound"] for round_ in found] == [[]] * 12
    newest = [round_["step"] for round_ in found]
    assert newest == sorted(newest)
    assert newest[-1] > 12


@dataclass(frozen=True)
class Free:
    """What `disk_usage` gives."""

    free: int


def flip(path: Path) -> None:
    """One bit of the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _until_written(one: CheckpointManager) -> None:
    assert one._pending is not None
    one._pending.future.exception(10)


def _raise_full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _saver(folder: Path) -> None:
    """Saves for ever; `keep` is 2, so that it deletes too."""
    torch.set_num_threads(1)
    one = CheckpointManager(folder, 2, "", {}, lambda: None)
    found = checkpoints(folder)
    step = step_of(found[-1]) if found else 0
    while True:
        step += 1
        one.save(state(step, size=100_000), Position(step, 10, best_step=1), must=True)


def _kill_savers(folder: Path) -> None:
    """Forks savers from a process that has torch loaded, kills each, and says what is left."""
    import os
    import random
    import signal

    from drumline.state.verify import verify_run

    draw = random.Random(0)
    for number in range(12):
        before = len(checkpoints(folder)) and step_of(checkpoints(folder)[-1])
        child = os.fork()
        if child == 0:
            _saver(folder)
        deadline = time.monotonic() + 20
        while not (folder / f"step-{before + 1}").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = verify_run(folder)
        print(json.dumps({"round": number, "step": found.step, "unsound": found.unsound}))


if __name__ == "__main__":
    _kill_savers(Path(sys.argv[1]))
