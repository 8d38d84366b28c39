"""A thread that samples the training loop: the line of the user's code that it is in, and the state of the GPU.

Promises: 20 samples a second, each of some ten microseconds, and one reading of the GPU a second; no work in the
step.
Counts only while steps are taken. A line is the user's own if its file belongs to neither Drumline, torch, Python nor
an installed package.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from drumline.core.account import BETWEEN_STEPS, Account, account

LOOKS_PER_S = 20
READINGS_PER_S = 1
_STOP_S = 2.0
"""How long `stop` waits: a driver that hangs must not hold the run."""
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_FOREIGN = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
        "<",
    }
)
"""Where the files of Python and of installed packages are. Frozen modules have names such as `<frozen runpy>`."""


class Sampler:
    """Looks at the thread that an account counts, from `start` to `stop`."""

    def __init__(
        self,
        parts: Account = account,
        device: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._parts, self._device = parts, device
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._forget()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="drumline-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, which may be in the driver for a while yet."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def take(self) -> tuple[str, float, dict[str, float]]:
        """Since the last call: the user's line that the loop was in most often and the fraction of the looks that
        found it there, and the means of the GPU's values."""
        looks, places, sums, readings = self._looks, self._places, self._sums, self._readings
        self._forget()
        place, count = places.most_common(1)[0] if places else ("", 0)
        means = {name: total / readings for name, total in sums.items()} if readings else {}
        return place, count / looks if looks else 0.0, means

    def _forget(self) -> None:
        self._looks, self._readings = 0, 0
        self._places: Counter[str] = Counter()
        self._sums: dict[str, float] = {}

    def _work(self) -> None:
        number = 0
        while not self._stopped.wait(1 / LOOKS_PER_S):
            owner, part = self._parts.present
            if part in BETWEEN_STEPS:
                continue
            place = own_line(sys._current_frames().get(owner))
            self._looks += 1
            if place:
                self._places[place] += 1
            if number % (LOOKS_PER_S // READINGS_PER_S) == 0:
                for name, value in self._device().items():
                    self._sums[name] = self._sums.get(name, 0.0) + value
                self._readings += 1
            number += 1


def own_line(frame: FrameType | None) -> str:
    """The line of the user's own code that the innermost function of ours called, as `own.py:12 in loss`, or the
    innermost line of it if there is none of ours; empty if it is not in the user's code."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            return ""
        if not file.startswith(_FOREIGN):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
