"""What this machine really lets a process have: cores, memory, open files.

Promises: numbers that hold inside containers and batch jobs, where the kernel's totals are not ours to use.
Both cgroup versions are read; a limit that cannot be read counts as no limit.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

DESCRIPTORS = 65536
"""Open files we ask for. Data loading passes tensors by descriptor; 1024, a common default, runs out."""


def host_name() -> str:
    """This machine's name, for messages."""
    return socket.gethostname()


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may keep busy: its affinity mask, cut to the cgroup's quota, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    quota = _cpu_quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cores_per_process(local_processes: int, env: Mapping[str, str] = os.environ) -> int:
    """A fair share of the cores for one of the processes here. Slurm hands each task its own cores already, but a
    launcher (ours or torchrun) inside a task shares them among its workers."""
    task = "SLURM_PROCID" in env and "TORCHELASTIC_RUN_ID" not in env
    if task and env.get("SLURM_CPUS_PER_TASK", "").isdigit():
        return max(1, min(usable_cores(), int(env["SLURM_CPUS_PER_TASK"])))
    return max(1, usable_cores() // local_processes)


def usable_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory this process may use: the machine's, cut to the cgroup's limit."""
    limits = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(cgroup / name)
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def descriptor_limits() -> tuple[int, int]:
    """Soft and hard limit of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_descriptor_limit() -> int:
    """Lifts the soft limit of open files towards the hard one and gives the new one. Children inherit it."""
    soft, hard = descriptor_limits()
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def _cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of time per period, or None without a limit."""
    fields = _read(cgroup / "cpu.max").split()
    if len(fields) == 2 and fields[0] != "max":
        return int(fields[0]) / int(fields[1])
    quota, period = _read(cgroup / "cpu/cpu.cfs_quota_us"), _read(cgroup / "cpu/cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():
        return int(quota) / int(period)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
