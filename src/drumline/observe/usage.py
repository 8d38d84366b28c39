"""What this process and its machine use between two moments: cores, disk, memory, descriptors.

Promises: reads the operating system's own counters, some milliseconds at a time, never in a step. What the system
does not report is left out.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Usage:
    """The counters at one moment, of this process with its children (loader processes) unless they say otherwise."""

    time_s: float
    own_cpu_s: float
    busy_cpu_s: float
    """Of all processes of the machine."""
    disk_bytes: int | None
    """Read from disks, not from the page cache."""
    memory_bytes: int
    descriptors: int
    """Of this process alone, like `threads`."""
    threads: int
    switches: int
    """How often a thread of this process had to leave its core to another one."""
    loop_s: tuple[float, float] | None
    """The calling thread's seconds on a core, and in the queue for one."""
    queued_s: float | None
    """The seconds that this process's threads waited for a core, added up."""
    free_memory_bytes: int
    """Of the machine: what is not used, and what the page cache could give back."""

    @staticmethod
    def now() -> Usage:
        """Called by the thread whose `loop_s` it is to have."""
        process = psutil.Process()
        everywhere = psutil.cpu_times()
        busy = sum(everywhere) - everywhere.idle - getattr(everywhere, "iowait", 0.0)
        # `guest` is a part of `user`.
        busy -= getattr(everywhere, "guest", 0.0) + getattr(everywhere, "guest_nice", 0.0)
        with process.oneshot():
            own = process.cpu_times()
            cpu_s = own.user + own.system + own.children_user + own.children_system
            memory, disk = process.memory_info().rss, _disk_bytes(process)
            descriptors = process.num_fds() if os.name == "posix" else 0
            threads, switches = process.num_threads(), process.num_ctx_switches().involuntary
        for child in process.children(recursive=True):
            try:
                with child.oneshot():
                    used = child.cpu_times()
                    cpu_s += used.user + used.system
                    memory += child.memory_info().rss
                    disk = None if disk is None else disk + (_disk_bytes(child) or 0)
            except psutil.Error:  # it has ended
                continue
        return Usage(
            time.perf_counter(),
            cpu_s,
            busy,
            disk,
            memory,
            descriptors,
            threads,
            switches,
            _scheduled(threading.get_native_id()),
            _queued_s(),
            psutil.virtual_memory().available,
        )

    def since(self, before: Usage) -> dict[str, float]:
        """Cores used and megabytes per second read since then; memory, descriptors and threads now."""
        seconds = max(self.time_s - before.time_s, 1e-9)
        # A child that has ended takes its counters along.
        found = {
            "own_cores": max(0.0, self.own_cpu_s - before.own_cpu_s) / seconds,
            "busy_cores": (self.busy_cpu_s - before.busy_cpu_s) / seconds,
            "memory_mb": self.memory_bytes / 2**20,
            "free_memory_mb": self.free_memory_bytes / 2**20,
            "descriptors": float(self.descriptors),
            "threads": float(self.threads),
            "switches_s": (self.switches - before.switches) / seconds,
        }
        if self.disk_bytes is not None and before.disk_bytes is not None:
            found["disk_mb_s"] = max(0, self.disk_bytes - before.disk_bytes) / 2**20 / seconds
        if self.loop_s is not None and before.loop_s is not None:
            found["loop_cores"] = (self.loop_s[0] - before.loop_s[0]) / seconds
            found["loop_queued"] = (self.loop_s[1] - before.loop_s[1]) / seconds
        if self.queued_s is not None and before.queued_s is not None:
            found["queued_cores"] = max(0.0, self.queued_s - before.queued_s) / seconds
        return found


def _disk_bytes(process: psutil.Process) -> int | None:
    try:
        return int(process.io_counters().read_bytes)
    except (AttributeError, psutil.Error, OSError):  # not on this system, or not allowed
        return None


def _scheduled(thread: int) -> tuple[float, float] | None:
    """The seconds of one thread of this process on a core and in the queue; None if the system does not say."""
    try:
        on_core, queued, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(on_core) / 1e9, int(queued) / 1e9


def _queued_s() -> float | None:
    try:
        threads = [each.name for each in Path("/proc/self/task").iterdir()]
    except OSError:
        return None
    found = [_scheduled(int(thread)) for thread in threads]
    return sum(each[1] for each in found if each is not None)
