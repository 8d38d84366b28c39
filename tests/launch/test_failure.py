"""From a worker's error to the one message that the user sees."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from drumline.core.errors import PEER_LOST, LostError, UserError
from drumline.launch.failure import (
    FILE,
    Failure,
    failure_from_exit,
    first_cause,
    from_fields,
    on_host,
    read_failure,
    record_failure,
    render_failure,
    summary,
)


def _error(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_error_is_carried_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "error.json"))
    monkeypatch.setenv("DRUMLINE_LAUNCHER", "1")
    assert record_failure(_error(RuntimeError("boom")), rank=3)
    failure = read_failure(tmp_path / "error.json")
    assert failure is not None
    assert (failure.rank, failure.user, failure.follows, failure.exit_code) == (3, False, False, 1)
    text = render_failure(failure)
    assert text.startswith("rank 3 failed:\nTraceback")
    assert text.endswith("RuntimeError: boom")


def test_a_users_mistake_has_no_traceback_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "error.json"))
    record_failure(_error(UserError("data.batch = 0 is too small", "give 1")), rank=0)
    failure = read_failure(tmp_path / "error.json")
    assert failure is not None
    assert failure.exit_code == 2
    assert render_failure(failure) == "rank 0: data.batch = 0 is too small\n  fix: give 1"


def test_the_error_file_has_torchruns_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv(FILE, str(path))
    monkeypatch.delenv("DRUMLINE_LAUNCHER", raising=False)
    assert not record_failure(_error(RuntimeError("boom")), rank=3), "torchrun does not show it as we would"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert abs(failure.timestamp - time.time()) < 60
    assert "RuntimeError: boom" in str(failure.message)


def test_without_a_launcher_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE, raising=False)
    assert not record_failure(RuntimeError("boom"), rank=0)


def test_a_missing_file_and_a_foreign_one_are_no_failure(tmp_path: Path) -> None:
    assert read_failure(tmp_path / "none.json") is None
    (tmp_path / "foreign.json").write_text('{"message": "x", "timestamp": 1}')
    assert read_failure(tmp_path / "foreign.json") is None


@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.1]:2222",
        "Connection reset by peer",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exited prematurely",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",
        "failed to recv, got 0 bytes. Connection was likely closed.",
    ],
)
def test_the_loss_of_a_peer_is_not_taken_for_the_cause(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "error.json"))
    record_failure(_error(RuntimeError(message)), rank=1)
    follower = read_failure(tmp_path / "error.json")
    assert follower is not None
    cause = Failure(2, "killed by SIGKILL", time=follower.time + 0.1)
    assert first_cause([follower, cause]) == cause
    assert first_cause([follower]) == follower


def test_of_two_causes_the_earlier_counts() -> None:
    early, late = Failure(4, "a", time=1.0), Failure(0, "b", time=2.0)
    assert first_cause([late, early]) == early


def test_a_signal_is_reported_with_its_usual_reason() -> None:
    killed = failure_from_exit(2, -signal.SIGKILL, 1.0)
    assert render_failure(killed).startswith("rank 2: killed by SIGKILL (out of memory?")
    assert "--shm-size" in render_failure(failure_from_exit(2, -signal.SIGBUS, 1.0))
    assert failure_from_exit(2, -signal.SIGABRT, 1.0).follows
    assert render_failure(failure_from_exit(2, -64 - 1, 1.0)) == "rank 2: killed by signal 65"
    assert failure_from_exit(2, 7, 1.0).exit_code == 7


def test_a_failure_travels_between_machines_with_its_host() -> None:
    failure = on_host(Failure(3, "boom", time=1.5, user=True), "gpu5 (10.0.0.2)")
    assert from_fields(asdict(failure)) == failure
    assert render_failure(failure) == "rank 3 on gpu5 (10.0.0.2): boom"


def test_a_loss_is_shown_like_a_mistake_and_marked_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "error.json"))
    record_failure(_error(LostError("a loader process was killed (pid 7)", "fewer data.workers")), rank=2)
    failure = read_failure(tmp_path / "error.json")
    assert failure is not None
    assert (failure.user, failure.lost, failure.follows) == (True, True, False)
    assert "Traceback" not in render_failure(failure)
    record_failure(_error(LostError("timed out", code=PEER_LOST)), rank=2)
    failure = read_failure(tmp_path / "error.json")
    assert failure is not None
    assert failure.follows


def test_a_summary_is_one_line_without_advice() -> None:
    killed = summary(failure_from_exit(2, -signal.SIGKILL, 1.0))
    assert killed.startswith("rank 2: killed by SIGKILL (out of memory? ")
    assert "\n" not in killed
    assert (
        summary(Failure(1, "ValueError: no\nreally", 1.0, traceback="T")) == "rank 1 failed (ValueError: no)"
    )
    assert (
        summary(Failure(1, "x", 1.0, traceback="T", follows=True))
        == "rank 1 lost contact with another process"
    )
    assert summary(Failure(-1, "lost", 1.0, host="machine 1")) == "machine 1: lost"


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "3"},
        {"time": True},
        {"time": math.nan},
        {"user": 1},
        {"message": None},
        {"host": ["gpu5"]},
        {"surprise": 1},
        {"rank": None},
    ],
)
def test_a_notice_of_another_shape_is_not_believed(change: dict[str, object]) -> None:
    content = asdict(Failure(3, "boom", time=1.5))
    with pytest.raises(ValueError, match="failure"):
        from_fields(content | change)
    del content["rank"]
    others: list[object] = [content, [], 3, "x", {}, None]
    for other in others:
        with pytest.raises(ValueError, match="failure"):
            from_fields(other)


def test_a_notice_cannot_drive_the_terminal_or_flood_it() -> None:
    hostile = Failure(3, "a\x1b[2Jb\x07\r\n\u202ec" + "x" * 100_000, time=1.5, host="\x1b]0;title")
    read = from_fields(asdict(hostile))
    assert read.message.startswith("a\\x1b[2Jb\\x07\\r\n\\u202ecx")
    assert len(read.message) <= 20_000
    assert read.host == r"\x1b]0;title"
