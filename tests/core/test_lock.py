"""One owner of a run folder: only a later start of the same launch takes over from one that is frozen."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drumline.config.recipe import Checkpoint, Recipe, Run
from drumline.core import files as atomic
from drumline.core import lock
from drumline.core.environment import GENERATION, LAUNCH_ID
from drumline.core.errors import UserError
from drumline.core.lock import FILE, Superseded, acquire, is_held
from drumline.state.folder import open_run


def start(monkeypatch: pytest.MonkeyPatch, launch: str, generation: int) -> None:
    """What follows is of this start of this launch."""
    monkeypatch.setenv(LAUNCH_ID, launch)
    monkeypatch.setenv(GENERATION, str(generation))


def test_only_a_later_start_of_the_launch_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, "abc", 1)
    first = acquire(tmp_path)
    first.check()
    for launch, generation in (("other", 2), ("", 2), ("abc", 1)):
        start(monkeypatch, launch, generation)
        with pytest.raises(UserError, match=rf"is being written by another run \(process {os.getpid()} on "):
            acquire(tmp_path)
    start(monkeypatch, "abc", 0)
    with pytest.raises(Superseded, match="taken over by restart 1 on"):
        acquire(tmp_path)
    start(monkeypatch, "abc", 3)
    third = acquire(tmp_path)
    assert third.replaced == first.owner
    with pytest.raises(Superseded, match=r"taken over by restart 3 on .* has changed nothing since"):
        first.check()
    third.check()
    first.close()
    third.close()
    start(monkeypatch, "abc", 2)  # thawed only now, when the third has ended
    with pytest.raises(Superseded, match="taken over by restart 3"):
        acquire(tmp_path)
    start(monkeypatch, "another launch", 0)
    last = acquire(tmp_path)
    assert last.replaced is None
    last.close()


def test_a_start_without_a_launch_is_never_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, "", 0)
    first = acquire(tmp_path)
    start(monkeypatch, "", 1)
    with pytest.raises(UserError, match="is being written by another run"):
        acquire(tmp_path)
    first.close()


def test_one_that_was_frozen_while_it_took_over_does_not_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had read the name of the first, and puts its own over that of the third."""
    start(monkeypatch, "abc", 0)
    first = acquire(tmp_path)
    start(monkeypatch, "abc", 2)
    third, read = acquire(tmp_path), (tmp_path / ".lock").read_bytes()
    start(monkeypatch, "abc", 1)
    (tmp_path / ".lock").write_text(json.dumps(vars(first.owner)))
    second = acquire(tmp_path)
    third.check()
    assert (tmp_path / ".lock").read_bytes() == read
    with pytest.raises(Superseded):
        second.check()
    for each in (first, second, third):
        each.close()


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b'{"launch": "abc"}', b'{"launch": 1, "generation": "x"}']
)
def test_a_lock_file_without_an_owner_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    start(monkeypatch, "abc", 0)
    first = acquire(tmp_path)
    (tmp_path / ".lock").write_bytes(content)
    start(monkeypatch, "abc", 1)
    with pytest.raises(UserError, match=r"is being written by another run$"):
        raise_first_line(tmp_path)
    first.close()
    acquire(tmp_path).close()


def raise_first_line(folder: Path) -> None:
    try:
        acquire(folder)
    except UserError as error:
        raise UserError(error.what) from None


def test_a_folder_that_was_moved_or_deleted_is_not_written_elsewhere(tmp_path: Path) -> None:
    for name, done in (("a", "moved to"), ("b", "deleted"), ("c", ".lock was deleted")):
        held = acquire(tmp_path / name)
        if name == "a":
            held.folder.rename(tmp_path / "moved")
        else:
            (held.folder / ".lock").unlink()
        if name == "b":
            held.folder.rmdir()
        with pytest.raises(Superseded, match=done) as caught:
            atomic.write_text(held.folder / "recipe.toml", "")
        assert name != "a" or f"drumline resume {tmp_path}/moved`" in caught.value.fix
        held.close()
    assert not any(path.name == "recipe.toml" for path in tmp_path.rglob("*"))


def test_paths_outside_of_run_folders_have_no_owner(tmp_path: Path) -> None:
    held = acquire(tmp_path / "a")
    (tmp_path / "a" / ".lock").unlink()
    lock.check(tmp_path / "ab" / "x")
    with pytest.raises(Superseded):
        lock.check(tmp_path / "a" / "b" / "x")
    held.close()
    lock.check(tmp_path / "a" / "b" / "x")


WORDS = ("data.source=digits", "model.name=resnet8", "data.batch=48", "parallel.threads=1", "run.device=cpu")
LONG = (
    "train.steps=100000",
    "train.log_every=1",
    "checkpoint.every_steps=5",
    "train.eval_every=0",
    "run.name=x",
)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_a_frozen_run_whose_folder_was_taken_over_changes_nothing_when_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen wherever it just is: in a step, in the log, in a save. Twice, since that differs."""
    for generation in (1, 3):
        frozen = subprocess.Popen(
            [sys.executable, "-m", "drumline", "train", *WORDS, *LONG, "checkpoint.resume=auto"],
            cwd=tmp_path,
            env={**os.environ, LAUNCH_ID: "abc", GENERATION: str(generation)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_for_steps(tmp_path / "runs/x", frozen)
            frozen.send_signal(signal.SIGSTOP)
            while not is_stopped(frozen.pid):
                time.sleep(0.001)
            start(monkeypatch, "other", 9)
            wanted = Recipe(
                run=Run(dir=str(tmp_path / "runs"), name="x"), checkpoint=Checkpoint(resume="auto")
            )
            with pytest.raises(UserError, match="is being written by another run"):
                open_run(wanted, "digits")
            start(monkeypatch, "abc", generation + 1)
            opened = open_run(wanted, "digits")
            assert opened.resume_from is not None
            before = contents(opened.path)
            frozen.send_signal(signal.SIGCONT)
            _, said = frozen.communicate(timeout=60)
        finally:
            frozen.kill()
        assert frozen.returncode == 1, said
        assert f"runs/x was taken over by restart {generation + 1} on " in said
        assert "Traceback" not in said
        after = contents(opened.path)
        assert after == before, set(after.items()) ^ set(before.items())
        opened.leave()


def wait_for_steps(folder: Path, run: subprocess.Popen[str]) -> None:
    """Until it has saved once more and logged some steps since."""
    deadline = time.monotonic() + 120
    lines = len(metrics(folder))
    while len(metrics(folder)) < lines + 8 or not any((folder / "checkpoints").glob("step-*[05]")):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def metrics(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def is_stopped(pid: int) -> bool:
    return re.search(r"\) T ", Path(f"/proc/{pid}/stat").read_text()) is not None


def test_a_start_is_not_rejected_because_another_process_looks_whether_a_run_is_under_way(
    tmp_path: Path,
) -> None:
    acquire(tmp_path).close()
    looks = os.open(tmp_path / FILE, os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_SH)
    timer = threading.Timer(0.02, os.close, [looks])
    timer.start()
    held = acquire(tmp_path)
    timer.join()
    assert is_held(tmp_path)
    held.close()
    assert not is_held(tmp_path)
