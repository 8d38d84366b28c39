"""Numbers written for people: counts, speeds, shares, durations, and how long something still takes.

Promises plain ASCII of a steady width; NaN and infinity are written as such, never hidden.
"""

from __future__ import annotations

import math
from collections import deque


def count(number: int) -> str:
    """1234567 -> `1,234,567`."""
    return f"{number:,}"


def rate(per_second: float, unit: str) -> str:
    """1234.5, `img` -> `1,234 img/s`; below 10 with one decimal."""
    return f"{per_second:,.{0 if per_second >= 10 else 1}f} {unit}/s"


def share(part: float) -> str:
    """0.0031 -> `0.3 %`; from 10 % on without decimals."""
    percent = 100 * part
    return f"{percent:.{0 if percent >= 9.95 else 1}f} %"


def loss(value: float) -> str:
    """2.34567 -> `2.3457`; very small and very large values in powers of ten."""
    if value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.2e}"


def duration(seconds: float) -> str:
    """75 -> `1:15`, 5025 -> `1:23:45`, 100000 -> `1 d 3 h`."""
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Pace:
    """Recent speed of something counted, over about the last half minute or the last forty updates."""

    _GAP_S = 0.75
    _KEPT = 40

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=self._KEPT)
        self._speed = 0.0
        self._last = (0.0, 0)
        self._paused = False

    def update(self, now: float, done: int) -> None:
        """`done` things are done at time `now`."""
        if self._paused:
            self._seen.clear()
            self._paused = False
        if self._seen:
            then, before = self._seen[0]
            if now > then and done > before:
                self._speed = (done - before) / (now - then)
        if not self._seen or now - self._seen[-1][0] >= self._GAP_S:
            self._seen.append((now, done))
        self._last = (now, done)

    def pause(self) -> None:
        """Something else runs until the next update; its time is not held against the speed."""
        self._paused = True

    def seconds_left(self, now: float, total: int) -> float | None:
        """None until two updates have been seen."""
        if not self._speed:
            return None
        then, done = self._last
        return max(0.0, (total - done) / self._speed - (now - then))
