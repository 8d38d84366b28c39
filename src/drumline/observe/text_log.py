"""log.txt as the story of a run: how its lines look, how a story opens and closes, and lines from outside the run.

Promises: a reader of log.txt alone learns what ran and how it ended, also when the process that wrote it was killed:
its launcher adds the cause, or the process that resumes the run says that there is none on record.
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
from drumline.core.text import message

LOG = "log.txt"
STARTED = "started: "
FINISHED, STOPPED, FAILED = "finished: ", "stopped: ", "failed: "
"""How the lines begin that open and close the story of a process."""


EARLY_SECONDS = 0.5
"""Seconds between two checks for log.txt while lines wait for it."""
ERASE_LINE = b"\r\x1b[K"
SHOW_CURSOR = b"\x1b[?25h"


def leave_bar() -> None:
    """Gives back the terminal of a bar whose process can no longer do so."""
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, ERASE_LINE + SHOW_CURSOR)


def say(text: str) -> None:
    """A line on stderr from a process or a moment that does not draw the display; it replaces a bar that stands on
    the line of the cursor, which is drawn again below. Safe in a signal handler; lost when stderr is closed."""
    with suppress(OSError):
        os.write(2, (ERASE_LINE if os.isatty(2) else b"") + message(text).encode() + b"\n")


def stamped(text: str) -> str:
    """An entry of log.txt: the time, then the text, with further lines indented."""
    return time.strftime("%Y-%m-%d %H:%M:%S  ") + message(text).replace("\n", "\n    ") + "\n"


def append_entry(folder: Path, text: str) -> None:
    """An entry from outside the thread that writes log.txt: from a launcher or a signal handler.

    Writes nothing where there is no log.txt, and never fails: the terminal shows such a line too.
    """
    _append(folder, stamped(text))


def _append(folder: Path, entries: str) -> bool:
    """Appends the entries; returns whether log.txt exists and took them."""
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
    """Whether the last process that wrote to log.txt left no line about its end."""
    try:
        lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    texts = [line.partition("  ")[2] for line in lines if line[:1].isdigit()]
    starts = [index for index, text in enumerate(texts) if text.startswith(STARTED)]
    last = texts[starts[-1] :] if starts else []
    return bool(last) and not any(text.startswith((FINISHED, STOPPED, FAILED)) for text in last)


def _log_of(folder: Path) -> Path:
    """The log being written: while an initial stage of a distillation runs, it is the one of the stage."""
    stages = [] if (folder / LOG).exists() else folder.glob(f"initial-*/{LOG}")
    return max(stages, key=lambda path: path.stat().st_mtime, default=folder / LOG)


class LauncherLog:
    """What a launcher says: to the user at once, and to the log.txt of its run, as soon as there is one.

    `folder` gives the run folder, or None while no worker has one. Of the launchers of several machines the one that
    starts rank 0 sets `writes`, and each sets `start`, the launch and its generation: a folder that a later one has
    taken over meanwhile, while this launcher was frozen or cut off, is left alone. A thread writes the file: a disk
    that hangs cannot hold up the launcher.
    """

    def __init__(self, say: Callable[[str], None], folder: Callable[[], Path | None]) -> None:
        self._say, self._folder = say, folder
        self._notes: queue.SimpleQueue[tuple[str, str, tuple[str, int]] | None] = queue.SimpleQueue()
        self._early: list[str] = []
        self._thread: threading.Thread | None = None
        self.writes, self.start = True, ("", 0)

    def __call__(self, text: str, opening: str = "launcher: ") -> None:
        """`opening` is `FAILED` or `STOPPED` where the text says why the workers ended."""
        self._say(text)
        if self.writes:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="log.txt", daemon=True)
                self._thread.start()
            # In a log that appears later, the line must not read as the end of the processes that write that log.
            self._notes.put((stamped(opening + text), stamped("launcher: " + text), self.start))

    def close(self, seconds: float = 2.0) -> None:
        """Waits until all is written, not longer than that."""
        self._notes.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    def _write(self) -> None:
        ended = False
        while not ended:
            note = None
            with suppress(queue.Empty):
                note = self._notes.get(timeout=EARLY_SECONDS if self._early else None)
                ended = note is None
            if self._early and self._written("".join(self._early), self.start):
                self._early = []
            if note is not None:
                now, later, start = note
                if self._early or not self._written(now, start):
                    self._early.append(later)

    def _written(self, entries: str, start: tuple[str, int]) -> bool:
        """Writes the entries. Returns whether they can be dropped: log.txt has them, or belongs to a later start."""
        folder = self._folder()
        return folder is not None and (lock.is_past(folder, *start) or _append(folder, entries))
