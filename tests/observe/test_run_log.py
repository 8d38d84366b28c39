"""The log is whole, complete, never in the way of the training loop, and has no line twice."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drumline.core.errors import UserError
from drumline.observe import run_log as module
from drumline.observe.metric_files import append, encode
from drumline.observe.run_log import RunLog
from drumline.observe.trackers import TensorBoard


def _lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def _events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def test_a_metric_is_one_json_line_and_its_numbers_are_scalars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 1_000_000.25))
    with RunLog(tmp_path).begin() as run_log:
        run_log.metric(
            "train", step=7, epoch=0.5, loss=2.5, images=128, name="a", done=True, shares=[0.5, 0.25]
        )
    (line,) = _lines(tmp_path)
    assert line == {
        "time": 1_000_000.25,
        "kind": "train",
        "step": 7,
        "epoch": 0.5,
        "loss": 2.5,
        "images": 128,
        "name": "a",
        "done": True,
        "shares": [0.5, 0.25],
    }
    events = _events(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["train/images", "train/loss"]
    (event,) = events.Scalars("train/loss")
    assert (event.wall_time, event.step, event.value) == (1_000_000.25, 7, 2.5)


def test_nan_and_infinity_are_null_and_named_so_that_each_line_is_valid_json() -> None:
    values: dict[str, Any] = {"loss": math.nan, "norm": -math.inf, "lr": 0.1, "each": (1.0, math.inf)}
    line = encode(1.5, "train", 3, 0.1, values)

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    record = json.loads(line, parse_constant=refuse)
    assert record == {
        "time": 1.5,
        "kind": "train",
        "step": 3,
        "epoch": 0.1,
        "loss": None,
        "norm": None,
        "lr": 0.1,
        "each": [1.0, None],
        "nonfinite": ["loss", "norm", "each"],
    }
    assert "nonfinite" not in json.loads(encode(1.5, "train", 3, 0.1, {"loss": 1.0, "text": "nan"}))


def test_a_value_that_is_no_plain_number_is_rejected_in_the_call(tmp_path: Path) -> None:
    with RunLog(tmp_path).begin() as run_log:
        with pytest.raises(TypeError, match="not JSON serializable"):
            run_log.metric("train", step=1, loss=object())  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match="reserved"):
            run_log.metric("train", step=1, time=5.0)


def test_other_ranks_write_nothing_and_start_no_thread() -> None:
    threads = threading.active_count()
    shown: list[str] = []
    with RunLog(None, shown.append).begin(3) as run_log:
        run_log.metric("train", step=1, loss=1.0)
        run_log.log("hello")
        run_log.flush()
        assert threading.active_count() == threads
    assert shown == []


def test_a_note_is_shown_at_once_and_stands_in_the_log_with_its_time(tmp_path: Path) -> None:
    shown: list[str] = []
    with RunLog(tmp_path, shown.append).begin() as run_log:
        run_log.log("grün\nsecond line")
        assert shown == ["grün\nsecond line"]
        run_log.log("another")
    text = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  grün\n    second line\n\d{4}-.{14}  another\n", text
    )


def test_flush_returns_when_lines_notes_and_scalars_are_on_disk(tmp_path: Path) -> None:
    with RunLog(tmp_path).begin() as run_log:
        for round_ in (1, 2):
            for step in range(50):
                run_log.metric("train", step=50 * round_ + step, loss=1.0)
            run_log.log(f"round {round_}")
            run_log.flush()
            assert len(_lines(tmp_path)) == 50 * round_
            assert f"round {round_}" in (tmp_path / "log.txt").read_text()
            assert len(_events(tmp_path).Scalars("train/loss")) == 50 * round_


def test_lines_reach_the_file_without_a_flush(tmp_path: Path) -> None:
    with RunLog(tmp_path).begin() as run_log:
        run_log.metric("train", step=1, loss=1.0)
        _wait_until(lambda: len(_lines(tmp_path)) == 1)


def test_close_after_close_does_nothing_and_a_closed_book_takes_no_more(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path).begin()
    run_log.close()
    run_log.close()
    with pytest.raises(AssertionError, match="after close"):
        run_log.metric("train", step=1)


class SlowTensorBoard:
    """Makes each scalar take 5 ms until released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        self.written = 0
        write = TensorBoard.write

        def slow(board: TensorBoard, time_s: float, step: int, scalars: dict[str, float]) -> None:
            for _ in scalars:
                self.released.wait(0.005)
            write(board, time_s, step, scalars)
            self.written += 1

        monkeypatch.setattr(TensorBoard, "write", slow)


def test_the_loop_and_the_lines_never_wait_for_a_slow_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowTensorBoard(monkeypatch)
    run_log = RunLog(tmp_path).begin()
    costs = []
    began = time.perf_counter()
    for step in range(2000):
        at = time.perf_counter()
        run_log.metric("train", step=step, epoch=step / 100, loss=1.0, lr=0.1)
        costs.append(time.perf_counter() - at)
    in_loop = time.perf_counter() - began
    _wait_until(lambda: len(_lines(tmp_path)) == 2000)
    assert in_loop < 1.0, "writing the scalars takes 20 s"
    assert statistics.median(costs) < 100e-6, "measured: 7 us"
    assert slow.written < 500
    slow.released.set()
    run_log.close()
    assert [line["step"] for line in _lines(tmp_path)] == list(range(2000))
    assert slow.written == 2000


def test_beyond_the_limit_scalars_are_left_out_and_counted_but_no_line_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCALARS_KEPT", 5)
    monkeypatch.setattr(module, "_POLL_S", 60)
    shown: list[str] = []
    with RunLog(tmp_path, shown.append).begin() as run_log:
        for step in range(20):
            run_log.metric("train", step=step, loss=1.0)
    assert len(_lines(tmp_path)) == 20
    assert len(_events(tmp_path).Scalars("train/loss")) == 5
    assert shown == ["the trackers fell behind: 15 entries are in metrics.jsonl alone"]


def test_a_disk_that_hangs_makes_the_loop_wait_rather_than_lose_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINES_KEPT", 10)
    works_again = threading.Event()

    def hang(*arguments: Any) -> None:
        works_again.wait(10)
        append(*arguments)

    monkeypatch.setattr(module, "append", hang)
    written: list[int] = []

    def loop() -> None:
        for step in range(50):
            run_log.metric("train", step=step, loss=1.0)
            written.append(step)

    with RunLog(tmp_path).begin() as run_log:
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join(0.3)
        held = len(written)
        works_again.set()
        thread.join(5)
    assert held <= 20, "ten in the hanging write, ten waiting"
    assert written == list(range(50))
    assert len(_lines(tmp_path)) == 50


def _fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "append", fail)


@pytest.mark.parametrize("call", ["flush", "metric", "close"])
def test_a_disk_that_stays_full_is_reported_with_the_folder_and_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    _fill_the_disk(monkeypatch)
    monkeypatch.setattr(module, "LINES_KEPT", 1)
    run_log = RunLog(tmp_path).begin()
    run_log.metric("train", step=1, loss=1.0)
    if call == "metric":
        _wait_until(lambda: run_log._stuck is not None)
    with pytest.raises(UserError, match=f"{tmp_path.name}.*No space left") as caught:
        {"flush": run_log.flush, "close": run_log.close, "metric": lambda: run_log.metric("train", step=2)}[
            call
        ]()
    assert "free space on its disk" in caught.value.fix
    run_log.close()  # already told: does not hide what the caller is dealing with


def test_while_the_disk_is_full_lines_wait_and_none_is_lost_or_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    full = threading.Event()

    def sometimes(file: Any, lines: list[str]) -> None:
        if full.is_set() and lines:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(file, lines)

    monkeypatch.setattr(module, "append", sometimes)
    with RunLog(tmp_path, shown.append).begin() as run_log:
        run_log.metric("train", step=1, loss=1.0)
        run_log.flush()
        for room in range(2):
            full.set()
            for step in (2, 3):
                run_log.metric("train", step=10 * room + step, loss=1.0)
            run_log.log(f"note {room}")
            for _ in range(2):
                with pytest.raises(UserError, match="No space left"):
                    run_log.flush()
            full.clear()
            run_log.flush()
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2, 3, 12, 13]
    assert (tmp_path / "log.txt").read_text().count("note") == 2
    warnings = [text for text in shown if text.startswith("WARNING: cannot write the log")]
    assert len(warnings) == 2, "once each time"


def test_a_failing_tensorboard_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened: list[Event] = []
    write = RecordWriter.write

    def once(self: RecordWriter, data: bytes) -> None:
        if opened:
            fail()
        opened.append(Event.FromString(data))
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", once)
    shown: list[str] = []
    with RunLog(tmp_path, shown.append).begin() as run_log:
        for step in range(5):
            run_log.metric("train", step=step, loss=1.0)
            run_log.flush()
    assert len(_lines(tmp_path)) == 5
    assert shown == [
        "WARNING: tensorboard is off: OSError: [Errno 28] No space left on device; metrics.jsonl has all metrics"
    ]


def test_a_disk_that_fills_up_within_a_line_leaves_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with path.open("ab", buffering=0) as file:
        append(file, ['{"step": 1}\n'])
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                append(file, ['{"step": 2}\n', '{"step": 3}\n', '{"step": 4}\n'])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == '{"step": 1}\n'


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl.*Is a directory"):
        RunLog(tmp_path).check()


def test_a_run_continues_without_tensorboard_and_reports_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.summary_pb2", None)
    shown: list[str] = []
    with RunLog(tmp_path, shown.append).begin() as run_log:
        for step in range(5):
            run_log.metric("train", step=step, loss=1.0)
        run_log.flush()
        run_log.metric("train", step=5, loss=1.0)
    assert len(_lines(tmp_path)) == 6
    assert len(shown) == 1
    assert shown[0].startswith("WARNING: tensorboard is off: ModuleNotFoundError: ")
    assert shown[0] in (tmp_path / "log.txt").read_text()
    assert not list(tmp_path.glob("*tfevents*"))


def test_the_import_of_tensorboard_does_not_hold_up_its_user() -> None:
    program = "import sys, drumline.observe.run_log; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    with RunLog(tmp_path).begin() as run_log:
        for step in range(1, 9):
            run_log.metric("train", step=step, loss=float(step))
            if step % 4 == 0:
                run_log.metric("eval", step=step, accuracy=0.5)
                run_log.metric("memory", bytes=1)
    shown: list[str] = []
    time.sleep(1.01)  # TensorBoard puts files in order by their second, and within one, 10 before 9
    with RunLog(tmp_path, shown.append).begin(4) as run_log:
        for step in range(5, 11):
            run_log.metric("train", step=step, loss=100.0 + step)
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 11))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [4]
    assert len([line for line in lines if line["kind"] == "memory"]) == 1, "it follows the line before it"
    assert shown == ["metrics.jsonl: removed 6 lines after step 4"]
    scalars = _events(tmp_path).Scalars("train/loss")
    assert [event.step for event in scalars] == list(range(1, 11))
    assert [event.value for event in scalars][3:5] == [4.0, 105.0]


@pytest.mark.parametrize("torn", [b'{"time": 1.0, "kind": "tr', b"\0\0\0\0\0\0", b'{"step": 5}'[:-1], b"5"])
def test_a_line_torn_by_a_crash_goes_away(tmp_path: Path, torn: bytes) -> None:
    good = encode(1.0, "train", 5, 0.1, {"loss": 1.0}).encode()
    (tmp_path / "metrics.jsonl").write_bytes(good + torn)
    shown: list[str] = []
    with RunLog(tmp_path, shown.append).begin() as run_log:
        run_log.metric("train", step=6)
    assert [line["step"] for line in _lines(tmp_path)] == [5, 6]
    assert shown == ["metrics.jsonl: removed 1 incomplete line"]


def test_a_last_line_that_lacks_only_its_line_end_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(encode(1.0, "train", 5, 0.1, {}).encode().rstrip())
    with RunLog(tmp_path).begin() as run_log:
        run_log.metric("train", step=6)
    assert [line["step"] for line in _lines(tmp_path)] == [5, 6]


def test_a_good_log_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(encode(1.0, "train", 5, 0.1, {}))
    before = path.stat().st_ino
    shown: list[str] = []
    RunLog(tmp_path, shown.append).begin(5).close()
    assert path.stat().st_ino == before
    assert shown == []


def _wait_until(condition: Any, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def test_the_trace_has_complete_lines_and_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.observe.run_log.TRACE_BYTES", 100)
    line = '{"kind":"window","step":5,"rank":0}\n'
    with RunLog(tmp_path).begin() as run_log:
        run_log.trace([line])
    with (tmp_path / "trace.jsonl").open("a") as file:
        file.write('{"kind":"wind')  # killed while it was written
    with RunLog(tmp_path).begin(keep_until_step=2) as run_log:
        run_log.trace([line])
        run_log.trace([line])
    assert (tmp_path / "trace.jsonl").read_text() == 2 * line, "what happened stays; the third has no room"
