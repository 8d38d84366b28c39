"""The log of a run: metrics.jsonl, log.txt, fingerprints.txt, trace.jsonl, and what trackers get. No other module
writes them.

Promises: the training loop never waits for a file; one background thread does all file work. Every line of
metrics.jsonl is complete, valid JSON, and a resumed run has no line twice. While the disk is full, lines wait in
memory, which is reported once; `flush` and `close` raise a `UserError` if the lines still cannot be written.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Protocol

from drumline.core import lock
from drumline.core.text import counted
from drumline.observe.metric_files import Value, append, append_to, cannot_write, encode, repair
from drumline.observe.text_log import LOG, REMOVED, ended_unrecorded, stamped
from drumline.observe.tracker_process import Trackers
from drumline.observe.trackers import RunFacts
from drumline.state.chain import FILE as FINGERPRINTS
from drumline.state.chain import repair_chain

METRICS = "metrics.jsonl"
TRACE = "trace.jsonl"
TRACE_BYTES = 16 << 20
"""A larger trace gets no more lines: a run that is resumed often stays small."""
SCALARS_KEPT = 10_000
"""Metrics that may wait for trackers. Beyond this, trackers miss metrics; the log says how many."""
LINES_KEPT = 100_000
"""Metrics that may wait for the disk (some 20 MB). None is dropped: beyond this, `metric` waits."""
RETRY_S = 1.0
"""Pause after a failed write."""
_POLL_S = 0.1
"""How often the thread checks for metrics. Waking it would cost the training loop 5 us for each metric."""


class Log(Protocol):
    """Writes a line to the log, and to the screen unless `show` is false."""

    def __call__(self, text: str, show: bool = True) -> None: ...


class RunLog:
    """The log of one run, written by rank 0 into the (existing) run folder. With `folder=None` it does nothing.

    It touches no file before `begin`; lines wait until then. A log that is closed before that leaves no file.
    """

    def __init__(
        self,
        folder: Path | None,
        show: Callable[[str], None] = lambda text: None,
        trackers: Sequence[str] = ("tensorboard",),
        run: RunFacts | None = None,
    ) -> None:
        """`run` is what the trackers (`run.trackers`) are told about it; by default, its folder alone."""
        self._folder, self._show, self._waiting = folder, show, True
        self._run = run or RunFacts(folder.name if folder else "", str(folder), {})
        self._trackers = Trackers(trackers if folder is not None else (), self._log)
        self._ended: tuple[str, Mapping[str, float]] = ("failed", {})
        self._changed = threading.Condition()
        names = (METRICS, LOG, FINGERPRINTS, TRACE)
        self._metrics, self._text, self._records, self._trace = self._files = [_LogFile(n) for n in names]
        self._trace_bytes = 0
        self.chain = ""
        """The chain value before the next record of fingerprints."""
        self._scalars: deque[_Scalars] = deque()
        self._scalars_left_out = 0
        self._flushes_asked = 0
        self._flushes_done = 0
        self._closing = False
        self._stuck: OSError | None = None
        """Why the last write failed; None after one that succeeded."""
        self._stuck_reported = False
        self._error: Exception | None = None
        self._error_raised = False

    def check(self) -> None:
        """Checks that the existing files can be written, and changes nothing. Raises a `UserError`."""
        if self._folder is not None:
            for file in self._files:
                if os.path.lexists(self._folder / file.name):
                    append_to(self._folder / file.name).close()

    def begin(self, keep_until_step: int | None = None) -> RunLog:
        """Continues the log in the folder, if there is one, as if the run had stopped after a step.

        Removes metrics beyond `keep_until_step` (None keeps all), and a line that a crash left incomplete. The lines
        of `keep_until_step` itself stay: write all lines of a step and `flush` before saving its checkpoint, and do
        not repeat its evaluation after resuming.
        """
        folder = self._folder
        if folder is None or not self._waiting:
            return self
        repaired = repair(folder / METRICS, keep_until_step)
        repair(folder / TRACE, None)  # what happened, also in steps that are taken again
        if (folder / TRACE).exists():
            self._trace_bytes = (folder / TRACE).stat().st_size
        try:
            self.chain, damage = repair_chain(folder / FINGERPRINTS, keep_until_step)
        except OSError as error:
            raise cannot_write(folder / FINGERPRINTS, error) from error
        killed = ended_unrecorded(folder)
        self._waiting = False
        self._run = replace(self._run, step=keep_until_step)
        self._metrics.open(folder)
        self._text.open(folder)
        self._thread = threading.Thread(target=self._work, name="run log", daemon=True)
        self._thread.start()
        if killed:
            self.log(
                "the previous process was killed (kill -9, out of memory, power cut) and left no closing line"
            )
        if damage:
            self.log(f"WARNING: {damage}")
        if repaired.beyond:
            self.log(f"{REMOVED}{counted(repaired.beyond, 'line')} after step {keep_until_step:,}")
        if repaired.torn:
            self.log(f"{REMOVED}{counted(repaired.torn, 'incomplete line')}")
        return self

    def metric(
        self, kind: str, /, *, step: int | None = None, epoch: float | None = None, **values: Value
    ) -> None:
        """Adds one line to metrics.jsonl, and its numbers to the trackers as `kind/name`. Returns at once.

        The line is in the file a tenth of a second later, or when `flush` returns. Values are plain Python numbers,
        text, or lists of them: a tensor would have to wait for the device.
        """
        if self._folder is None:
            return
        now = time.time()
        line = encode(now, kind, step, epoch, values)
        with self._changed:
            assert not self._closing, "metric() after close()"
            self._raise_error()
            if len(self._metrics.lines) >= LINES_KEPT:
                self._changed.wait_for(
                    lambda: len(self._metrics.lines) < LINES_KEPT or bool(self._error or self._stuck)
                )
                self._raise_stuck()
            self._metrics.lines.append(line)
            if step is not None and self._trackers:
                if len(self._scalars) < SCALARS_KEPT:
                    self._scalars.append(_Scalars(now, step, kind, values))
                else:
                    self._scalars_left_out += 1

    def record(self, text: str, chain: str) -> None:
        """Adds a record of fingerprints, complete lines that end with this chain value. Returns at once."""
        if self._folder is None:
            return
        with self._changed:
            assert not self._closing, "record() after close()"
            self._raise_error()
            self._records.lines.append(text)
            self.chain = chain

    def trace(self, lines: Sequence[str]) -> None:
        """Adds complete lines to trace.jsonl. Returns at once."""
        size = sum(map(len, lines))
        if self._folder is not None and self._trace_bytes + size <= TRACE_BYTES:
            self._trace_bytes += size
            with self._changed:
                self._trace.lines.extend(lines)

    def log(self, text: str, show: bool = True) -> None:
        """Adds a line with the time to log.txt, and displays it at once unless `show` is false."""
        if self._folder is not None:
            assert not self._closing, "log() after close()"
            self._log(text, show)

    def _log(self, text: str, show: bool = True) -> None:
        if show:
            self._show(text)
        with self._changed:
            self._text.lines.append(stamped(text))
            self._changed.notify_all()

    def ended(self, state: str, summary: Mapping[str, float]) -> None:
        """What trackers record when the log is closed: `state` is finished or stopped. By default the run failed."""
        self._ended = (state, summary)

    def flush(self) -> None:
        """Waits until everything logged so far is on disk."""
        if self._folder is None:
            return
        assert not self._waiting, "flush() before begin()"
        with self._changed:
            self._flushes_asked += 1
            mine = self._flushes_asked
            self._stuck = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._flushes_done >= mine or bool(self._error or self._stuck))
            self._raise_error()
            self._raise_stuck()

    def close(self) -> None:
        """Flushes and ends the thread. Raises an error of the thread if no earlier call did."""
        if self._folder is None or self._closing or self._waiting:
            return
        if self._scalars_left_out:
            self.log(f"the trackers fell behind: {self._scalars_left_out:,} entries are in {METRICS} alone")
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for file in self._files:
            file.close()
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

    # The methods below run on the background thread.

    def _work(self) -> None:
        try:
            assert self._folder is not None
            while self._turn(self._folder):
                pass
            self._trackers.finish(self._run, *self._ended)
            self._text.append(self._folder, self._text.take())  # what trackers report at the end
        except Exception as error:
            # A run that another process continues has not ended.
            self._trackers.finish(self._run, "" if isinstance(error, lock.Superseded) else "failed", {})
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _turn(self, folder: Path) -> bool:
        """Writes all waiting lines, then one entry for the trackers, so that a slow one never delays lines.

        With nothing left to write, does what `flush` or `close` waits for. Returns whether to go on.
        """
        with self._changed:
            self._changed.wait_for(self._has_work, timeout=_POLL_S)
            was_full = len(self._metrics.lines) >= LINES_KEPT
            taken = [(file, file.take()) for file in self._files]
            scalars = self._scalars.popleft() if self._scalars else None
            asked, closing = self._flushes_asked, self._closing
            if was_full:
                self._changed.notify_all()
        waiting = any(lines for _, lines in taken) or scalars is not None
        try:
            if waiting or closing or asked > self._flushes_done:
                lock.check(folder)
            if waiting:
                for file, lines in taken:
                    file.append(folder, lines)
                if scalars is not None and (numbers := scalars.numbers()):
                    self._trackers.write(self._run, scalars.time_s, scalars.step, numbers)
                return True
            if closing or asked > self._flushes_done:
                for file in self._files:
                    file.sync()
                with self._changed:
                    self._flushes_done = asked
                    self._stuck_reported = self._error_raised = False
                    self._changed.notify_all()
        except OSError as error:
            if closing:
                raise
            self._wait_for_space(error, taken)
        return not closing

    def _wait_for_space(self, error: OSError, taken: list[tuple[_LogFile, list[str]]]) -> None:
        """Keeps what could not be written, wakes the callers that wait for it, and pauses."""
        with self._changed:
            for file, lines in taken:
                file.lines[:0] = lines
            self._stuck = error
            self._changed.notify_all()
            asked, reported, self._stuck_reported = self._flushes_asked, self._stuck_reported, True
        if not reported:
            self._show(
                f"WARNING: cannot write the log {self._folder}: {error.strerror}; its lines wait in memory until "
                "they can be written"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._flushes_asked > asked, timeout=RETRY_S)

    def _has_work(self) -> bool:
        lines = any(file.lines for file in self._files)
        return bool(lines or self._scalars or self._flushes_asked > self._flushes_done or self._closing)


@dataclass
class _LogFile:
    """A file of the log, and the lines that wait for it."""

    name: str
    lines: list[str] = field(default_factory=list)
    file: FileIO | None = None

    def open(self, folder: Path) -> FileIO:
        self.file = append_to(folder / self.name)
        return self.file

    def take(self) -> list[str]:
        taken, self.lines = self.lines, []
        return taken

    def append(self, folder: Path, lines: list[str]) -> None:
        """Writes the lines and empties the list: what is left of it after an error is to be written again."""
        if lines:
            append(self.file or self.open(folder), lines)
            lines.clear()

    def sync(self) -> None:
        if self.file is not None:
            os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


@dataclass(frozen=True)
class _Scalars:
    """The values of one `metric` call, for trackers."""

    time_s: float
    step: int
    kind: str
    values: Mapping[str, Value]

    def numbers(self) -> dict[str, float]:
        return {
            f"{self.kind}/{name}": value
            for name, value in self.values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
