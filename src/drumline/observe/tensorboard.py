"""Scalars into TensorBoard event files.

Imported by the run_log's own thread only: the import below is slow, and may fail without harm to a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter


class TensorBoard:
    """One event file in `folder`. `purge_step` hides what earlier files hold from that step on."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        self._writer = FileWriter(str(folder), flush_secs=20)
        if purge_step is not None:
            # What a SummaryWriter writes for its purge_step.
            self._writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step=purge_step)

    def write(self, time_s: float, step: int, scalars: Mapping[str, float]) -> None:
        # One event for all: 8 scalars cost 88 us so and 596 us through SummaryWriter.add_scalar, with the
        # interpreter lock held and the training loop waiting for it.
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_summary(Summary(value=values), step, time_s)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
