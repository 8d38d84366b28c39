"""Finds and kills the processes of a run, for `faults.py`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil


def family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def rank_of(process: psutil.Process) -> int | None:
    """The rank of a worker, or None. Loader processes inherit the variable but do not run the command."""
    try:
        words = process.cmdline()
        return int(process.environ()["RANK"]) if "train" in words and "drumline" in words else None
    except (psutil.Error, KeyError):
        return None


def is_loader(process: psutil.Process) -> bool:
    """Whether Drumline's fork server forked it: it then has the server's command line."""
    try:
        made_by = process.parent()
        words = process.cmdline()
        return (
            any("drumline.data" in word for word in words)
            and made_by is not None
            and made_by.cmdline() == words
        )
    except psutil.Error:
        return False


def processes_of(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DRUMLINE_FAULTS") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def soon(happens: Callable[[], bool], seconds: float = 0.5) -> bool:
    """Waits for it, polling as fast as possible, so that the kill hits the right moment."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if happens():
            return True
        time.sleep(0.0002)
    return False


def sigkill(pids: Sequence[int]) -> int:
    """Kills them. Returns how many were alive."""
    reached = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            reached += 1
    return reached
