"""log.txt has what a launcher and a signal handler add, and tells a run that was killed from one that ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from drumline.observe import text_log
from drumline.observe.run_log import RunLog


def texts(folder: Path) -> list[str]:
    return [line.partition("  ")[2] for line in (folder / "log.txt").read_text().splitlines()]


def test_a_launchers_lines_are_shown_at_once_and_written_to_the_log_of_its_run(tmp_path: Path) -> None:
    said: list[str] = []
    folder: list[Path] = []
    notes = text_log.LauncherLog(said.append, lambda: folder[0] if folder else None)
    notes("before there is a run folder")
    folder.append(tmp_path)
    notes("before there is a log")
    notes("rank 1 was killed during start-up", text_log.FAILED)
    time.sleep(0.1)  # until the thread that writes has looked for it
    assert not (tmp_path / "log.txt").exists()
    with RunLog(tmp_path).begin() as run_log:
        run_log.log("started: drumline train")
    deadline = time.monotonic() + 20
    while len(texts(tmp_path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    notes("rank 1: killed by SIGKILL; restart 1 of 3", text_log.FAILED)
    notes("training again")
    notes.start = ("abc", 1)
    (tmp_path / ".lock").write_text(
        '{"launch": "abc", "generation": 2, "host": "b", "pid": 1, "token": "0123abcd"}'
    )
    notes("thawed, when a later start has taken over")
    notes.writes = False
    notes("of another machine")
    assert len(said) == 7
    notes.close()
    assert texts(tmp_path) == [
        "started: drumline train",
        "launcher: before there is a run folder",
        "launcher: before there is a log",
        "launcher: rank 1 was killed during start-up",
        "failed: rank 1: killed by SIGKILL; restart 1 of 3",
        "launcher: training again",
    ]


def test_lines_during_an_initial_stage_go_to_the_log_of_the_stage(tmp_path: Path) -> None:
    for name, age in (("initial-fsp", 100), ("initial-abound", 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").touch()
        os.utime(tmp_path / name / "log.txt", (age, age))
    text_log.append_entry(tmp_path, "a line")
    assert texts(tmp_path / "initial-abound") == ["a line"]
    (tmp_path / "log.txt").touch()
    text_log.append_entry(tmp_path, "another")
    assert texts(tmp_path) == ["another"]


def test_a_log_is_not_followed_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    (tmp_path / "log.txt").symlink_to(tmp_path / "mine")
    text_log.append_entry(tmp_path, "a line")
    assert (tmp_path / "mine").read_text() == ""


@pytest.mark.parametrize(
    ("lines", "killed"),
    [
        ((), False),
        (("a line of an older version",), False),
        (("started: x", "epoch 1"), True),
        (("started: x", "finished: top-1 5%"), False),
        (("started: x", "stopped: SIGINT after step 5"), False),
        (("started: x", "failed: rank 1 was killed", "started: x", "launcher: training again"), True),
        (("started: x", "failed: after step 3: ValueError\n  finished: not a closing line"), False),
        (("started: x", "a note\nfinished: inside a note"), True),
    ],
)
def test_a_process_that_was_killed_is_known_by_its_missing_closing_line(
    tmp_path: Path, lines: tuple[str, ...], killed: bool
) -> None:
    (tmp_path / "log.txt").write_text("".join(map(text_log.stamped, lines)))
    assert text_log.ended_unrecorded(tmp_path) is killed
    with RunLog(tmp_path).begin():
        pass
    assert ("process was killed" in (tmp_path / "log.txt").read_text()) is killed


def test_a_line_of_another_process_replaces_the_bar_on_a_terminal_only(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text_log.say("plain")
    text_log.leave_bar()
    assert capfd.readouterr().err == "plain\n"
    monkeypatch.setattr(text_log.os, "isatty", lambda handle: True)
    monkeypatch.setattr(text_log.os, "get_terminal_size", lambda handle: os.terminal_size((20, 5)))
    text_log.say("drawn over")
    assert capfd.readouterr().err == "\r\x1b[Kdrawn over\n"
    text_log.say("wider than the terminal is")
    assert capfd.readouterr().err == "\r\x1b[Kwider than the\n  terminal is\n"
