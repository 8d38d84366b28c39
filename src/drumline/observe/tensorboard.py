"""Scalars in TensorBoard event files.

Promises: TensorBoard is imported when the first scalar is written, on the thread of the run log; the import takes
seconds. A missing or failing TensorBoard is reported once and never stops a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.core.machine import host_name


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
