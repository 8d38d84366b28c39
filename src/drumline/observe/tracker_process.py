"""A tracker in a process of its own, so that its imports, output and waits never affect the training process.

Promises: no call waits for the tracker, except `finish`, for a bounded time and with a message. Its process gets no
secret of ours, shows nothing, reads no input and leaves signals to the run. If the run is killed, it records that the
run failed and ends; a tracker that hangs is killed with everything that it started.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from drumline.observe.trackers import RUN_ID, TRACKERS, RunFacts, TensorBoard, Tracker, run_id

FINISH_S = 30.0
"""Seconds that a run waits for a tracker at its end."""
SILENT_S = 3.0
"""Seconds of that wait before it logs a message."""
WAITING_BYTES = 1 << 20
"""Entries that may wait for a tracker, about an hour's. It misses any more."""


class TrackerError(Exception):
    """What went wrong, for the log."""


class TrackerProcess:
    """The tracker of this name, in a process of its own. `log` adds a line to the run's log."""

    def __init__(self, name: str, log: Callable[[str], None]) -> None:
        self.name, self._log = name, log
        self._waiting = bytearray()
        self._replies = b""
        self._missed = 0

    def open(self, run: RunFacts) -> str:
        facts = asdict(replace(run, id=run_id(Path(run.folder))))
        # Ours hold the secret and the place of this process in the run.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("DRUMLINE_")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._send(facts)
        return ""  # the process reports it later

    def write(self, time_s: float, step: int, numbers: Mapping[str, float]) -> None:
        if len(self._waiting) > WAITING_BYTES:
            self._missed += 1
        else:
            self._send({"time_s": time_s, "step": step, "numbers": numbers})
        self._receive()

    def finish(self, state: str, summary: Mapping[str, float]) -> None:
        try:
            if not state:
                return
            began, said = time.monotonic(), False
            self._send({"state": state, "summary": summary})
            while self._process.poll() is None:
                self._send()
                self._receive()
                waited = time.monotonic() - began
                if waited > FINISH_S:
                    raise TrackerError(f"did not finish within {FINISH_S:g} s")
                if waited > SILENT_S and not said:
                    self._log(f"waiting for {self.name} to finish, for at most {FINISH_S:g} s")
                    said = True
                time.sleep(0.02)
            self._receive()
            if self._missed:
                raise TrackerError(f"fell behind and missed {self._missed:,} entries")
        finally:
            self._end()

    def _send(self, message: Mapping[str, Any] | None = None) -> None:
        """Sends what the pipe takes now, and keeps the rest."""
        if message is not None:
            self._waiting += json.dumps(message).encode() + b"\n"
        with suppress(BlockingIOError, BrokenPipeError):  # `_receive` says why it has ended
            while self._waiting:
                del self._waiting[: os.write(self._input, self._waiting)]

    def _receive(self) -> None:
        """Logs what the process has reported. Raises if it has failed."""
        ended = self._process.poll()
        with suppress(BlockingIOError):
            while data := os.read(self._output, 1 << 16):
                self._replies += data
        *lines, self._replies = self._replies.split(b"\n")
        for reply in map(json.loads, lines):
            if "failed" in reply:
                self._end()
                raise TrackerError(reply["failed"])
            self._log(f"{self.name}: {reply['where']}")
        if ended:
            self._end()
            raise TrackerError(f"its process ended with code {ended}")

    def _end(self) -> None:
        """Kills the process, and those that it has started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.stdin.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class Trackers:
    """The trackers of a run, called on the thread of its log. One that fails is reported and dropped. They are opened
    with the first numbers."""

    def __init__(self, names: Sequence[str], log: Callable[[str], None]) -> None:
        self._log = log
        self._active: dict[str, Tracker] = {
            name: TensorBoard() if name == "tensorboard" else TrackerProcess(name, log)
            for name in names
            if name != "none"
        }
        self._opened: set[str] = set()

    def __bool__(self) -> bool:
        """Whether any tracker still takes numbers."""
        return bool(self._active)

    def write(self, run: RunFacts, time_s: float, step: int, numbers: Mapping[str, float]) -> None:
        self._each(run, lambda tracker: tracker.write(time_s, step, numbers))

    def finish(self, run: RunFacts, state: str, summary: Mapping[str, float]) -> None:
        """Ends all. An empty `state` leaves the run to another process, which continues it."""
        # A run that was killed at its very end has no new numbers when it is resumed.
        known = state and Path(run.folder, RUN_ID).exists()
        self._active = {
            name: tracker
            for name, tracker in self._active.items()
            if name in self._opened or (known and isinstance(tracker, TrackerProcess))
        }
        self._each(run, lambda tracker: tracker.finish(state, summary))
        self._active.clear()

    def _each(self, run: RunFacts, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._active.items()):
            try:
                if name not in self._opened:
                    tracker.open(run)
                    self._opened.add(name)
                call(tracker)
            except Exception as error:  # a version clash raises more than ImportError
                del self._active[name]
                self._log(f"WARNING: {name} is off: {describe(error)}; metrics.jsonl has all metrics")


def describe(error: BaseException) -> str:
    """The error on one line of limited length."""
    text = str(error) if isinstance(error, TrackerError) else f"{type(error).__name__}: {error}"
    return _without_passwords(" ".join(text.split()))[:600]


def _without_passwords(text: str) -> str:
    """Without the user and the password of an address."""
    return re.sub(r"//[^/@\s]+@", "//", text)


def main(name: str) -> None:
    """The process of a tracker: does what the lines of its input say, and reports on its output."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("r+b", buffering=0) as nothing:
        for descriptor in (0, 1, 2):
            os.dup2(nothing.fileno(), descriptor)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def reply(message: Mapping[str, str]) -> None:
        with suppress(BrokenPipeError):
            print(json.dumps(message), file=replies, flush=True)

    tracker: Tracker = TRACKERS[name]()
    try:
        where = tracker.open(RunFacts(**json.loads(requests.readline())))
        reply({"where": _without_passwords(where)})
        end: dict[str, Any] = {"state": "failed", "summary": {}}  # of a run that is killed
        for line in requests:
            request = json.loads(line)
            if "state" in request:
                end = request
                break
            tracker.write(**request)
        tracker.finish(**end)
    except BaseException as error:
        reply({"failed": describe(error)})
        os._exit(1)  # what the library does at exit may wait for ever


def _end_with(owner: int) -> None:
    """Gives a tracker that hangs the usual time when the run is gone."""
    while os.getppid() == owner:
        time.sleep(1)
    time.sleep(FINISH_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
