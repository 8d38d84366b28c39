"""Stop signals, noted for the launcher's loop to obey.

Promises: a signal that is ignored on purpose (nohup) stays ignored; the handlers of before come back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

SAME_REQUEST_SECONDS = 0.5
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Requests:
    """The stop requests so far, oldest first: signal and time."""

    def __init__(self) -> None:
        self._noted: list[tuple[signal.Signals, float]] = []

    def __len__(self) -> int:
        return len(self._noted)

    @property
    def first(self) -> signal.Signals:
        return self._noted[0][0]

    @property
    def seconds(self) -> float:
        """Since the first one."""
        return time.monotonic() - self._noted[0][1]

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Takes over the stop signals. Main thread only."""
        before = {number: signal.getsignal(number) for number in STOPS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end_us(self) -> None:
        """Ends this process by the signal that asked for it."""
        signal.signal(self.first, signal.SIG_DFL)
        os.kill(os.getpid(), self.first)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Notes a request. A wrapper that passes on the Ctrl-C which the terminal sent us too makes two of
        one, so what follows at once is the same request."""
        now = time.monotonic()
        if not self._noted or now - self._noted[-1][1] > SAME_REQUEST_SECONDS:
            self._noted.append((signal.Signals(number), now))
