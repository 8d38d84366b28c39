"""The only file that writes logs: metrics.jsonl (the truth), log.txt, fingerprints.txt and TensorBoard events.

Promises: the training loop never waits for a file (one background thread does all file work); every line of
metrics.jsonl is whole valid JSON; a resumed run has no line twice. While a disk is full its lines wait in memory,
which is said once; `flush` and `close` raise a UserError if they cannot be written by then. TensorBoard missing,
slow or failing stops nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from drumline.core import files as atomic
from drumline.core import lock
from drumline.observe.lines import Value, append, append_to, cannot_write, encode, repair
from drumline.observe.text_log import LOG, ended_unrecorded, stamped
from drumline.state.chain import FILE as FINGERPRINTS
from drumline.state.chain import repair_chain

if TYPE_CHECKING:
    from drumline.observe.tensorboard import TensorBoard

SCALARS_KEPT = 10_000
"""Metrics that may wait for TensorBoard; beyond this new ones are left out of it, counted, and noted."""
LINES_KEPT = 100_000
"""Lines that may wait for the disk (some 20 MB). They are never dropped: beyond this `metric` waits."""

RETRY_S = 1.0
"""How long after a failed write it is tried again."""
_LOOK_EVERY_S = 0.1
# `metric` does not wake the thread: that alone would cost the loop 5 us; the thread looks by itself.


def nobody(text: str) -> None:
    """The listener of a run_log whose notes are shown nowhere."""


class RunLog:
    """Log of one run, kept by rank 0 in the (existing) run folder. With `folder=None` it does nothing.

    `RunLog(folder)` is for a new run; `RunLog.open` for a folder that an earlier process wrote to;
    `RunLog.waiting` for such a folder that is not to be changed yet.
    """

    def __init__(
        self,
        folder: Path | None,
        announce: Callable[[str], None] = nobody,
        *,
        waiting: bool = False,
    ) -> None:
        self._folder = folder
        self._announce = announce
        self._purge_step: int | None = None
        self._waiting = waiting
        """Nothing is written yet: what is said is announced and kept in memory until `begin`."""
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._notes: list[str] = []
        self._records: list[str] = []
        self._records_file: FileIO | None = None
        self.chain = ""
        """The chain value that the next record of fingerprints follows."""
        self._scalars: deque[_Scalars] = deque()
        self._scalars_left_out = 0
        self._wants_scalars = True
        self._flushes_asked = 0
        self._flushes_done = 0
        self._closing = False
        self._stuck: OSError | None = None
        """Why the last attempt to write failed; None once one went well."""
        self._stuck_told = False
        self._error: Exception | None = None
        self._error_raised = False
        self._tensorboard: TensorBoard | None = None
        if folder is not None and not waiting:
            self._start(folder)

    @classmethod
    def waiting(cls, folder: Path | None, announce: Callable[[str], None] = nobody) -> RunLog:
        """A log that touches no file before `begin`, and leaves none when it is closed before."""
        return cls(folder, announce, waiting=True)

    @classmethod
    def open(
        cls,
        folder: Path | None,
        announce: Callable[[str], None] = nobody,
        keep_until_step: int | None = None,
    ) -> RunLog:
        """`waiting`, begun at once."""
        book = cls.waiting(folder, announce)
        book.begin(keep_until_step)
        return book

    def check(self) -> None:
        """Whether the files can be written, before anything is changed. Raises a UserError."""
        if self._folder is not None:
            for name in ("metrics.jsonl", LOG, FINGERPRINTS):
                if os.path.lexists(self._folder / name):
                    append_to(self._folder / name).close()

    def begin(self, keep_until_step: int | None = None) -> None:
        """Go on with the log of a folder that may hold one, as if the run had stopped after a step.

        Metrics beyond `keep_until_step` go away (None keeps all steps), and so does a line that a crash tore.
        Lines of `keep_until_step` itself stay: write all of a step's lines and `flush` before saving its
        checkpoint, and do not repeat its evaluation after the resume.
        """
        folder = self._folder
        if folder is None or not self._waiting:
            return
        repaired = repair(folder / "metrics.jsonl", keep_until_step)
        try:
            chain, damage = repair_chain(folder / FINGERPRINTS, keep_until_step)
        except OSError as error:
            raise cannot_write(folder / FINGERPRINTS, error) from error
        self._purge_step = None if keep_until_step is None else keep_until_step + 1
        killed = ended_unrecorded(folder)
        self.chain = chain
        self._waiting = False
        self._start(folder)
        if killed:
            self.log(
                "the process before left no closing line: it was killed (kill -9, out of memory, power cut)"
            )
        if damage:
            self.log(f"WARNING: {damage}")
        if repaired.beyond:
            self.log(f"metrics.jsonl: lines removed after step {keep_until_step:,}: {repaired.beyond:,}")
        if repaired.torn:
            self.log(f"metrics.jsonl: incomplete lines removed: {repaired.torn:,}")

    def _start(self, folder: Path) -> None:
        self._metrics_file = append_to(folder / "metrics.jsonl")
        self._notes_file = append_to(folder / LOG)
        self._thread = threading.Thread(target=self._work, name="run_log", daemon=True)
        self._thread.start()

    def metric(
        self, kind: str, /, *, step: int | None = None, epoch: float | None = None, **values: Value
    ) -> None:
        """One line in metrics.jsonl, and its numbers in TensorBoard as `kind/name`. Returns at once.

        The line is in the file a tenth of a second later, or when `flush` returns.
        Values are plain Python numbers, texts, or lists of them: a tensor would have to wait for the device.
        """
        if self._folder is None:
            return
        now = time.time()
        line = encode(now, kind, step, epoch, values)
        with self._changed:
            assert not self._closing, "metric() after close()"
            self._raise_error()
            if len(self._lines) >= LINES_KEPT:
                self._changed.wait_for(
                    lambda: (
                        len(self._lines) < LINES_KEPT or self._error is not None or self._stuck is not None
                    )
                )
                self._raise_stuck()
            self._lines.append(line)
            if step is not None and self._wants_scalars:
                if len(self._scalars) < SCALARS_KEPT:
                    self._scalars.append(_Scalars(now, step, kind, values))
                else:
                    self._scalars_left_out += 1

    def record(self, text: str, chain: str) -> None:
        """A record of fingerprints, whole lines, and the chain value that it ends with. Returns at once."""
        if self._folder is None:
            return
        with self._changed:
            assert not self._closing, "record() after close()"
            self._raise_error()
            self._records.append(text)
            self.chain = chain

    def log(self, text: str, show: bool = True) -> None:
        """A line with the time in log.txt, shown by the display at once unless it is for the log alone."""
        if self._folder is None:
            return
        if show:
            self._announce(text)
        with self._changed:
            assert not self._closing, "log() after close()"
            self._notes.append(stamped(text))
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything said so far is on disk."""
        if self._folder is None:
            return
        assert not self._waiting, "flush() before begin()"
        with self._changed:
            self._flushes_asked += 1
            mine = self._flushes_asked
            self._stuck = None
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._flushes_done >= mine or self._error is not None or self._stuck is not None
            )
            self._raise_error()
            self._raise_stuck()

    def close(self) -> None:
        """Flush and end the thread. Raises an error of the thread only if no earlier call did."""
        if self._folder is None or self._closing or self._waiting:
            return
        if self._scalars_left_out:
            self.log(
                f"TensorBoard fell behind: {self._scalars_left_out:,} entries are in metrics.jsonl alone"
            )
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._metrics_file.close()
        self._notes_file.close()
        if self._records_file is not None:
            self._records_file.close()
        if not self._error_raised:
            self._raise_error()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _raise_stuck(self) -> None:
        if self._stuck is not None:
            assert self._folder is not None
            self._error_raised = True
            raise cannot_write(self._folder, self._stuck) from self._stuck

    def _raise_error(self) -> None:
        if self._error is None:
            return
        assert self._folder is not None
        self._error_raised = True
        if isinstance(self._error, OSError):
            raise cannot_write(self._folder, self._error) from self._error
        raise self._error

    # What follows runs on the background thread.

    def _work(self) -> None:
        try:
            while self._turn():
                pass
            with suppress(Exception):  # its last events; what was lost before has been said
                if self._tensorboard is not None:
                    self._tensorboard.close()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Write all waiting lines, then one entry for TensorBoard: a slow one never holds up the lines.

        With nothing left to write, do what a flush or close waits for.
        """
        with self._changed:
            self._changed.wait_for(self._has_work, timeout=_LOOK_EVERY_S)
            lines, self._lines = self._lines, []
            notes, self._notes = self._notes, []
            records, self._records = self._records, []
            scalars = self._scalars.popleft() if self._scalars else None
            asked, closing = self._flushes_asked, self._closing
            if len(lines) >= LINES_KEPT:
                self._changed.notify_all()
        waiting = _Waiting(lines, notes, records)
        try:
            if waiting or scalars is not None or closing or asked > self._flushes_done:
                assert self._folder is not None
                lock.check(self._folder)
            if waiting or scalars is not None:
                self._write(waiting)
                if scalars is not None:
                    self._write_scalars(scalars)
                return True
            if closing or asked > self._flushes_done:
                os.fsync(self._metrics_file.fileno())
                os.fsync(self._notes_file.fileno())
                if self._records_file is not None:
                    os.fsync(self._records_file.fileno())
                self._flush_tensorboard()
                with self._changed:
                    self._flushes_done = asked
                    self._stuck_told = self._error_raised = False
                    self._changed.notify_all()
        except OSError as error:
            if closing:
                raise
            self._wait_for_room(error, waiting)
        return not closing

    def _write(self, waiting: _Waiting) -> None:
        """Each kind is off the list as soon as it is in its file."""
        append(self._metrics_file, waiting.lines)
        waiting.lines.clear()
        append(self._notes_file, waiting.notes)
        waiting.notes.clear()
        if waiting.records:
            self._write_records(waiting.records)
            waiting.records.clear()

    def _wait_for_room(self, error: OSError, waiting: _Waiting) -> None:
        """Keeps what could not be written, tells whoever waits for it, and gives the disk a moment."""
        with self._changed:
            self._lines[:0] = waiting.lines
            self._notes[:0] = waiting.notes
            self._records[:0] = waiting.records
            self._stuck = error
            self._changed.notify_all()
            asked, told, self._stuck_told = self._flushes_asked, self._stuck_told, True
        if not told:
            self._announce(
                f"WARNING: cannot write the log {self._folder}: {error.strerror}; its lines wait in memory, and "
                "writing is tried again"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._flushes_asked > asked, timeout=RETRY_S)

    def _has_work(self) -> bool:
        return bool(
            self._lines
            or self._notes
            or self._records
            or self._scalars
            or self._flushes_asked > self._flushes_done
            or self._closing
        )

    def _write_records(self, records: list[str]) -> None:
        if self._records_file is None:
            assert self._folder is not None
            self._records_file = atomic.append_to(self._folder / FINGERPRINTS)
        append(self._records_file, records)

    def _write_scalars(self, scalars: _Scalars) -> None:
        if self._tensorboard is None:
            self._tensorboard = self._open_tensorboard()
        if self._tensorboard is not None:
            numbers = _numbers(scalars)
            if numbers:
                try:
                    self._tensorboard.write(scalars.time_s, scalars.step, numbers)
                except (
                    Exception
                ) as error:  # its writer passes on what its own thread met, a full disk for one
                    self._leave_tensorboard(error)

    def _flush_tensorboard(self) -> None:
        try:
            if self._tensorboard is not None:
                self._tensorboard.flush()
        except Exception as error:
            self._leave_tensorboard(error)

    def _leave_tensorboard(self, error: Exception) -> None:
        with self._changed:
            self._wants_scalars = False
            self._scalars.clear()
            self._tensorboard = None
        self._announce(f"WARNING: TensorBoard events end here ({error}); metrics.jsonl has everything")

    def _open_tensorboard(self) -> TensorBoard | None:
        assert self._folder is not None
        try:
            from drumline.observe.tensorboard import TensorBoard
        except Exception as error:  # version clashes raise more than ImportError, and no run needs it
            with self._changed:
                self._wants_scalars = False
                self._scalars.clear()
            self.log(f"no TensorBoard events: its import failed ({type(error).__name__}: {error})")
            return None
        return TensorBoard(self._folder, self._purge_step)


@dataclass
class _Waiting:
    """Lines on their way to their files."""

    lines: list[str]
    notes: list[str]
    records: list[str]

    def __bool__(self) -> bool:
        return bool(self.lines or self.notes or self.records)


@dataclass(frozen=True)
class _Scalars:
    """The values of one `metric` call on their way to TensorBoard."""

    time_s: float
    step: int
    kind: str
    values: Mapping[str, Value]


def _numbers(scalars: _Scalars) -> dict[str, float]:
    return {
        f"{scalars.kind}/{name}": value
        for name, value in scalars.values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
