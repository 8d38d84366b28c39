"""What this process and its machine use between two moments: cores, disk, memory, descriptors.

Promises: reads the operating system's own counters, a few hundred microseconds at a time, never in a step. What the
system does not report is left out.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Usage:
    """The counters at one moment."""

    time_s: float
    own_cpu_s: float
    """Of this process and its children that have ended."""
    busy_cpu_s: float
    """Of all processes of the machine."""
    disk_bytes: int | None
    """Read from disks by this process, not from the page cache."""
    memory_bytes: int
    descriptors: int
    threads: int

    @staticmethod
    def now() -> Usage:
        process = psutil.Process()
        with process.oneshot():
            own = process.cpu_times()
            everywhere = psutil.cpu_times()
            busy = sum(everywhere) - everywhere.idle - getattr(everywhere, "iowait", 0.0)
            # `guest` is a part of `user`.
            busy -= getattr(everywhere, "guest", 0.0) + getattr(everywhere, "guest_nice", 0.0)
            return Usage(
                time.perf_counter(),
                own.user + own.system + own.children_user + own.children_system,
                busy,
                process.io_counters().read_bytes if hasattr(process, "io_counters") else None,
                process.memory_info().rss,
                process.num_fds() if os.name == "posix" else 0,
                process.num_threads(),
            )

    def since(self, before: Usage) -> dict[str, float]:
        """Cores used and megabytes per second read since then; memory, descriptors and threads now."""
        seconds = max(self.time_s - before.time_s, 1e-9)
        found = {
            "own_cores": (self.own_cpu_s - before.own_cpu_s) / seconds,
            "busy_cores": (self.busy_cpu_s - before.busy_cpu_s) / seconds,
            "memory_mb": self.memory_bytes / 2**20,
            "descriptors": float(self.descriptors),
            "threads": float(self.threads),
        }
        if self.disk_bytes is not None and before.disk_bytes is not None:
            found["disk_mb_s"] = (self.disk_bytes - before.disk_bytes) / 2**20 / seconds
        return found
