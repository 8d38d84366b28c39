"""Which lines of a user's code the loop is in, outside the model: sampled by a background thread.

Promises: reads the stack of the loop's thread a few times a second, keeps no frame and a bounded number of lines. The
times between samples vary, so that they do not coincide with the steps. A line that holds Python's lock is seen a
little less often than one that waits.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

from drumline.core.account import Account
from drumline.guards.script.source_lines import SourceLine, is_user_file

MOST_LINES = 1000
_RATIO = 0.618034
"""The fraction of the golden ratio: multiples of it, less their whole part, fill 0 to 1 evenly."""


class LineSampler:
    """Counts the lines of one thread by the part that its loop is in."""

    def __init__(self, parts: Account) -> None:
        self._parts = parts
        self.counts: Counter[tuple[str, str, int]] = Counter()
        """Samples by part, file and line; the file is empty if no line of the user's was on the stack."""
        self._own: dict[str, bool] = {}
        self._samples = 0

    def pause(self, mean: float) -> float:
        """Seconds until the next sample: half to one and a half times the mean."""
        self._samples += 1
        return mean * (0.5 + (self._samples * _RATIO) % 1.0)

    def sample(self) -> None:
        """Looks once. Called from another thread."""
        thread, part = self._parts.present
        frame = sys._current_frames().get(thread)
        file, line = self._user_line(frame)
        del frame
        key = (part, file, line)
        if key in self.counts or len(self.counts) < MOST_LINES:
            self.counts[key] += 1

    def most(self, number: int) -> list[tuple[str, str, int, int]]:
        """Part, file, line and samples of the lines that were seen most."""
        items = list(self.counts.items())  # at once: the thread goes on counting
        items.sort(key=lambda each: -each[1])
        return [(*key, count) for key, count in items[:number]]

    def _user_line(self, frame: FrameType | None) -> tuple[str, int]:
        """The innermost line of the user's own code; else of a package that the user has installed."""
        installed: tuple[str, int] = ("", 0)
        while frame is not None:
            file = frame.f_code.co_filename
            own = self._own.get(file)
            if own is None:
                own = self._own[file] = is_user_file(file)
            if own:
                if "site-packages" not in file:
                    return file, frame.f_lineno
                installed = installed if installed[0] else (file, frame.f_lineno)
            frame = frame.f_back
        return installed


def line_text(file: str, line: int) -> str:
    """`train.py:88`, with the source quoted."""
    return str(SourceLine(file, line))
