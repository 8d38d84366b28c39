"""The files that metrics are written to: metrics.jsonl and TensorBoard event files.

Promises: metrics.jsonl is strict JSON, without NaN. It has complete lines only, even when its disk fills up while one
is written, and a resumed run finds no line that it will write again. TensorBoard is imported when the first scalar is
written, on the thread of the run log; the import takes seconds. A missing or failing TensorBoard is reported once and
never stops a run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from drumline.core import files as atomic
from drumline.core.errors import UserError
from drumline.core.machine import host_name

Scalar = float | int | str | bool | None
Value = Scalar | Sequence[Scalar]


def encode(
    time_s: float, kind: str, step: int | None, epoch: float | None, values: Mapping[str, Value]
) -> str:
    """A line of metrics.jsonl. JSON has no NaN or infinity: such a value is null, and named in `nonfinite`."""
    record: dict[str, Value] = {"time": round(time_s, 3), "kind": kind, "step": step, "epoch": epoch}
    assert not record.keys() & values.keys(), f"reserved names among {sorted(values)}"
    record.update(values)
    try:
        return _ENCODE(record) + "\n"
    except ValueError:
        assert "nonfinite" not in values, "reserved name"
        bad = [name for name, value in record.items() if _finite(value) is not value]
        record = {name: _finite(value) for name, value in record.items()}
        return _ENCODE(record | {"nonfinite": bad}) + "\n"


@dataclass(frozen=True)
class Repaired:
    """How many lines were removed."""

    beyond: int
    """After the last step to keep."""
    torn: int
    """Incomplete."""


def repair(path: Path, keep_until_step: int | None) -> Repaired:
    """Removes incomplete lines, and those that a resumed run will write again. Else leaves the file untouched."""
    if not path.exists():
        return Repaired(0, 0)
    content = path.read_bytes()
    kept, repaired = _kept_lines(content, keep_until_step)
    if kept != content:
        try:
            atomic.write_bytes(path, kept)
        except OSError as error:
            raise cannot_write(path, error) from error
    return repaired


def append_to(path: Path) -> FileIO:
    """Opens a file for appending. Raises a `UserError`."""
    try:
        return atomic.append_to(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def append(file: FileIO, lines: list[str]) -> None:
    """Appends complete lines. If the disk fills up, truncates the file to its former end and raises OSError."""
    content = memoryview("".join(lines).encode("utf-8"))
    if not content:
        return
    before = os.fstat(file.fileno()).st_size
    try:
        while content:
            content = content[file.write(content) :]
    except OSError:
        os.ftruncate(file.fileno(), before)
        raise


def cannot_write(path: Path, error: OSError) -> UserError:
    """The error for a log that cannot be written."""
    return UserError(
        f"cannot write the log {path}: {error.strerror}",
        fix="make that folder writable and free space on its disk, then run the command again",
    )


_ENCODE = json.JSONEncoder(allow_nan=False).encode


def _finite(value: Value) -> Value:
    """The same object if all of it is finite, else a copy with None for what is not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple) and not all(_is_finite(item) for item in value):
        return [item if _is_finite(item) else None for item in value]
    return value


def _is_finite(value: Scalar) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _kept_lines(content: bytes, keep_until_step: int | None) -> tuple[bytes, Repaired]:
    """A line without a step is kept or removed with the line before it. Pure."""
    kept: list[bytes] = []
    beyond = torn = 0
    is_beyond = False
    for line in content.splitlines():
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, KeyError, TypeError):
            torn += 1
            continue
        if step is not None and keep_until_step is not None:
            is_beyond = step > keep_until_step
        if is_beyond:
            beyond += 1
        else:
            kept.append(line + b"\n")
    return b"".join(kept), Repaired(beyond, torn)


class TensorBoard:
    """One event file in `folder`."""

    purge_step: int | None = None
    """Hides the events of earlier files from this step on."""

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self._folder, self._report = folder, report
        self._writer: Any = None
        self.failed = False

    def write(self, time_s: float, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one event with all scalars: 8 of them take 88 us, and 596 us through SummaryWriter.add_scalar, with
        the interpreter lock held and the training loop waiting for it."""
        if self.failed:
            return
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary

            if self._writer is None:
                self._writer = self._open()
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
            event = Event(wall_time=time_s, step=step, summary=Summary(value=values))
            self._writer.write(event.SerializeToString())
        except Exception as error:  # a version clash raises more than ImportError
            self._fail(error)

    def flush(self) -> None:
        try:
            if self._writer is not None:
                self._writer.flush()
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        with suppress(Exception):  # the last events; metrics.jsonl has them
            if self._writer is not None:
                self._writer.close()

    def _open(self) -> Any:
        """Opens an event file without TensorBoard's own thread and without a buffer: nothing may be written after
        another process has taken over the run folder."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{host_name()}.{os.getpid()}.0"
        writer = RecordWriter((self._folder / name).open("ab", buffering=0))
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        if self.purge_step is not None:
            # What SummaryWriter writes for its purge_step.
            start = SessionLog(status=SessionLog.START)
            writer.write(Event(wall_time=now, step=self.purge_step, session_log=start).SerializeToString())
        return writer

    def _fail(self, error: Exception) -> None:
        what = "TensorBoard events end here" if self._writer is not None else "no TensorBoard events"
        self.failed, self._writer = True, None
        self._report(f"WARNING: {what} ({type(error).__name__}: {error}); metrics.jsonl has all metrics")
