"""What this process and its machine use between two moments: cores, disk, memory, descriptors.

Promises: reads the operating system's own counters, some milliseconds at a time, never in a step. What the system
does not report is left out, and never an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

RATES = ("own_cores", "busy_cores", "disk_mb_s", "switches_s", "loop_cores", "loop_queued", "queued_cores")
"""Per second, of counters that only rise: cores of this process with its children, of all processes of the machine;
megabytes from disks, not from the page cache; how often a thread of this process had to leave its core to another
one; the loop's thread on a core, and in the queue for one; all threads of this process in that queue."""
LEVELS = ("memory_mb", "free_memory_mb", "descriptors", "threads")
"""At the later moment: memory of this process with its children; what the machine does not use, and what its page
cache could give back; of this process alone."""
_UNKNOWN = (psutil.Error, OSError, AttributeError, NotImplementedError, ValueError)
"""How counters that a system does not have, or does not let us read, show: sandboxes have fewer."""


@dataclass(frozen=True)
class Usage:
    """The counters at one moment."""

    time_s: float
    counters: Mapping[str, float]
    """Those of `RATES`, from the start of the process or the machine, and `LEVELS`."""

    @staticmethod
    def now(loop: int | None = None) -> Usage:
        """Now. `loop`: the native id of the loop's thread; the caller's if it is not given."""
        process, thread, found = psutil.Process(), loop or threading.get_native_id(), dict[str, float]()
        for counters in (
            lambda: dict(zip(("loop_cores", "loop_queued"), _scheduled(thread), strict=True)),
            lambda: {"queued_cores": _queued_s()},
            lambda: {"busy_cores": _busy_s()},
            lambda: _with_children(process),
            lambda: {"switches_s": process.num_ctx_switches().involuntary},
            lambda: {"threads": process.num_threads()},
            lambda: {"descriptors": process.num_fds()},
            lambda: {"free_memory_mb": psutil.virtual_memory().available / 2**20},
        ):
            with suppress(*_UNKNOWN):
                found |= counters()
        return Usage(time.perf_counter(), found)

    def since(self, before: Usage) -> dict[str, float]:
        """The rates since then, and the levels now."""
        seconds = max(self.time_s - before.time_s, 1e-9)
        found = {name: self.counters[name] for name in LEVELS if name in self.counters}
        for name in RATES:
            if name in self.counters and name in before.counters:
                # A child that has ended takes its counters along.
                found[name] = max(0.0, self.counters[name] - before.counters[name]) / seconds
        return found


def _with_children(process: psutil.Process) -> dict[str, float]:
    """What a process and its children (loader processes) have used."""
    with process.oneshot():
        own, memory = process.cpu_times(), process.memory_info().rss
    cpu_s = own.user + own.system + own.children_user + own.children_system
    found = {"own_cores": cpu_s, "memory_mb": memory / 2**20}
    with suppress(*_UNKNOWN):
        found["disk_mb_s"] = _disk_mb(process)
    for child in process.children(recursive=True):
        with suppress(psutil.Error), child.oneshot():  # it may have ended
            used, memory = child.cpu_times(), child.memory_info().rss
            found["own_cores"] += used.user + used.system
            found["memory_mb"] += memory / 2**20
            if "disk_mb_s" in found:
                found["disk_mb_s"] += _disk_mb(child)
    return found


def _disk_mb(process: psutil.Process) -> float:
    return float(process.io_counters().read_bytes) / 2**20


def _busy_s() -> float:
    """The seconds that the machine's cores have worked."""
    every = psutil.cpu_times()
    busy = sum(every) - every.idle - getattr(every, "iowait", 0.0)
    # `guest` is a part of `user`.
    return float(busy - getattr(every, "guest", 0.0) - getattr(every, "guest_nice", 0.0))


def _scheduled(thread: int) -> tuple[float, float]:
    """The seconds of one thread of this process on a core and in the queue."""
    on_core, queued, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    return int(on_core) / 1e9, int(queued) / 1e9


def _queued_s() -> float:
    total = 0.0
    for each in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            total += _scheduled(int(each.name))[1]
    return total
