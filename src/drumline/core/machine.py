"""The resources of this machine that a process may use: cores, memory, open files, a port.

Promises: numbers that are right inside containers and batch jobs, where a process may use only part of the machine.
Reads both cgroup versions; a limit that cannot be read counts as no limit.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

DESCRIPTORS = 65536
"""Limit of open files to ask for. Data loading passes tensors by descriptor, and the common default of 1024 is too
low."""


def host_name() -> str:
    """This machine's name, for messages."""
    return socket.gethostname()


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use: its affinity mask, limited to the cgroup's quota, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    quota = _cpu_quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cores_per_process(local_processes: int, env: Mapping[str, str] = os.environ) -> int:
    """The cores for each process of this machine. Slurm gives each task cores of its own, but a launcher (ours or
    torchrun) inside a task divides them among its workers."""
    task = "SLURM_PROCID" in env and "TORCHELASTIC_RUN_ID" not in env
    if task and env.get("SLURM_CPUS_PER_TASK", "").isdigit():
        return max(1, min(usable_cores(), int(env["SLURM_CPUS_PER_TASK"])))
    return max(1, usable_cores() // local_processes)


def usable_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may use: the machine's, limited by the cgroup."""
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
    """Raises the soft limit of open files towards the hard one and returns it. Children inherit it."""
    soft, hard = descriptor_limits()
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens at a numeric address; port 0 chooses a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The port of a run that has just ended can be used at once; one with a listener is still rejected.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def _cpu_quota(cgroup: Path) -> float | None:
    """The quota in cores, or None without a limit."""
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
