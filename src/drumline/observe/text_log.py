"""log.txt: the format of its lines, its opening and closing lines, and lines from other processes than the run's own.

Promises: log.txt says what ran and how it ended, even if the process that wrote it was killed: its launcher adds the
cause, or the process that resumes the run reports that the log has no closing line.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from drumline.core import lock
from drumline.core.text import message, wrapped

LOG = "log.txt"
STARTED = "started: "
FINISHED, STOPPED, FAILED = "finished: ", "stopped: ", "failed: "
"""Prefixes of the lines that open and close the log of a process."""
LAUNCHER, WARNING = "launcher: ", "WARNING: "
"""Prefixes of lines from the process that started the run, and of warnings."""
RESUMED, REMOVED = "resumed from ", "metrics.jsonl: removed "
"""Prefixes of lines that say where a run continues, and what it repeats."""


EARLY_SECONDS = 0.5
"""Time between two checks for log.txt while lines wait for it to exist."""
ERASE_LINE = "\r\x1b[K"
SHOW_CURSOR = "\x1b[?25h"


def leave_bar() -> None:
    """Erases the progress bar of a process that can no longer do it, and shows the cursor again."""
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, (ERASE_LINE + SHOW_CURSOR).encode())


def say(text: str) -> None:
    """Writes a line to stderr from a process or a signal handler that does not draw the display. It overwrites a
    progress bar on the current line, which is drawn again below, and is wrapped at the width of a terminal. Does
    nothing if stderr is closed."""
    with suppress(OSError):
        text = message(text)
        if os.isatty(2):
            text = ERASE_LINE + wrapped(text, os.get_terminal_size(2).columns or 80)
        os.write(2, text.encode() + b"\n")


def stamped(text: str) -> str:
    """An entry of log.txt: the time, then the text, its further lines indented."""
    return time.strftime("%Y-%m-%d %H:%M:%S  ") + message(text).replace("\n", "\n    ") + "\n"


def append_entry(folder: Path, text: str) -> None:
    """Appends an entry from a launcher or a signal handler.

    Does nothing if there is no log.txt, and never fails: the terminal shows the line too.
    """
    _append(folder, stamped(text))


def _append(folder: Path, entries: str) -> bool:
    """Appends the entries. Returns false if there is no log.txt, or it cannot be written."""
    try:
        handle = os.open(_log_of(folder), os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(handle, entries.encode())
        finally:
            os.close(handle)
    except OSError:
        return False
    return True


def ended_unrecorded(folder: Path) -> bool:
    """Whether the last process that wrote log.txt left no closing line."""
    try:
        lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    texts = [line.partition("  ")[2] for line in lines if line[:1].isdigit()]
    starts = [index for index, text in enumerate(texts) if text.startswith(STARTED)]
    last = texts[starts[-1] :] if starts else []
    return bool(last) and not any(text.startswith((FINISHED, STOPPED, FAILED)) for text in last)


def _log_of(folder: Path) -> Path:
    """The log being written. While an initial phase of a distillation runs, it is the log of that phase."""
    stages = [] if (folder / LOG).exists() else folder.glob(f"initial-*/{LOG}")
    return max(stages, key=lambda path: path.stat().st_mtime, default=folder / LOG)


class LauncherLog:
    """Messages of a launcher: displayed at once, and written to the run's log.txt as soon as it exists.

    `folder` returns the run folder, or None while no worker has one. With several machines, only the launcher that
    starts rank 0 sets `writes`. Each launcher sets `start`, the launch and its generation: a folder that a later
    generation has taken over, while this launcher was frozen or cut off, is left alone. A thread writes the file, so
    that a disk that hangs cannot block the launcher.
    """

    def __init__(self, say: Callable[[str], None], folder: Callable[[], Path | None]) -> None:
        self._say, self._folder = say, folder
        self._entries: queue.SimpleQueue[tuple[str, str, tuple[str, int]] | None] = queue.SimpleQueue()
        self._early: list[str] = []
        self._thread: threading.Thread | None = None
        self.writes, self.start = True, ("", 0)

    def __call__(self, text: str, opening: str = LAUNCHER) -> None:
        """`opening` is `FAILED` or `STOPPED` if the text says why the workers ended."""
        self._say(text)
        if self.writes:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="log.txt", daemon=True)
                self._thread.start()
            # If the log appears later, the line must not read as the end of the processes that write that log.
            self._entries.put((stamped(opening + text), stamped(LAUNCHER + text), self.start))

    def close(self, seconds: float = 2.0) -> None:
        """Waits until everything is written, for at most `seconds`."""
        self._entries.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    def _write(self) -> None:
        ended = False
        while not ended:
            entry = None
            with suppress(queue.Empty):
                entry = self._entries.get(timeout=EARLY_SECONDS if self._early else None)
                ended = entry is None
            if self._early and self._written("".join(self._early), self.start):
                self._early = []
            if entry is not None:
                now, later, start = entry
                if self._early or not self._written(now, start):
                    self._early.append(later)

    def _written(self, entries: str, start: tuple[str, int]) -> bool:
        """Writes the entries. Returns whether they are done with: written, or the folder belongs to a later start."""
        folder = self._folder()
        return folder is not None and (lock.is_past(folder, *start) or _append(folder, entries))
