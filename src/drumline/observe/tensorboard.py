"""Scalars in TensorBoard event files.

Promises: TensorBoard is imported when the first scalar is written, on the thread of the run log; the import takes
seconds. A missing or failing TensorBoard is reported once and never stops a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


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
            from tensorboard.compat.proto.summary_pb2 import Summary

            if self._writer is None:
                self._writer = self._open()
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
            self._writer.add_summary(Summary(value=values), step, time_s)
        except (
            Exception
        ) as error:  # a version clash raises more than ImportError; the writer's thread, anything
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
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import FileWriter

        writer = FileWriter(str(self._folder), flush_secs=20)
        if self.purge_step is not None:
            # What SummaryWriter writes for its purge_step.
            start = Event(session_log=SessionLog(status=SessionLog.START))
            writer.add_event(start, step=self.purge_step)
        return writer

    def _fail(self, error: Exception) -> None:
        what = "TensorBoard events end here" if self._writer is not None else "no TensorBoard events"
        self.failed, self._writer = True, None
        self._report(f"WARNING: {what} ({type(error).__name__}: {error}); metrics.jsonl has all metrics")
