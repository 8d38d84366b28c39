"""The stack of each thread of a hung process, requested by a signal.

Promises: a process answers even from inside a native call, and none of its Python code runs; the answer is shortened
to what a person reads. A stopped process cannot answer; `is_stopped` reads that from /proc.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "DRUMLINE_STACKS"
"""The file to which a worker writes its stacks."""

SIGNAL = signal.SIGUSR1
ANSWER_SECONDS = 1.0
LINES = 40
MAIN_FRAMES, OTHER_FRAMES = 16, 4


def answer_signal(env: Mapping[str, str]) -> None:
    """Called by a worker at its start: from now on SIGUSR1 makes it write its stacks to the launcher's file."""
    if VARIABLE in env:
        # Stays open for the life of the process: the handler writes to this descriptor.
        descriptor = os.open(env[VARIABLE], os.O_WRONLY | os.O_APPEND)
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


class Stacks:
    """The launcher's side: an anonymous file for each worker's answer."""

    def __init__(self, workers: int) -> None:
        self._descriptors = [os.memfd_create("drumline-stacks") for _ in range(workers)]

    def variable(self, local_rank: int) -> dict[str, str]:
        """The variable for this worker."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptors[local_rank]}"}

    def ask(self, processes: Mapping[int, int]) -> dict[int, str]:
        """The answers of the processes (ids by local rank), as faulthandler writes them; empty if one does not
        answer."""
        before = {local_rank: self._size(local_rank) for local_rank in processes}
        for pid in processes.values():
            os.kill(pid, SIGNAL)
        deadline, sizes = time.monotonic() + ANSWER_SECONDS, dict[int, int]()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            last, sizes = sizes, {local_rank: self._size(local_rank) for local_rank in processes}
            if last == sizes and all(sizes[local_rank] > before[local_rank] for local_rank in processes):
                break  # all answers are complete
        return {
            local_rank: os.pread(self._descriptors[local_rank], 1 << 20, before[local_rank]).decode(
                errors="replace"
            )
            for local_rank in processes
        }

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _size(self, local_rank: int) -> int:
        return os.fstat(self._descriptors[local_rank]).st_size


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (FileNotFoundError, ProcessLookupError):
        return False


def format_stacks(answer: str) -> list[str]:
    """An answer for the user: the main thread first, innermost call first, paths relative to the package, at most 40
    lines."""
    threads = [_thread(block) for block in re.split(r"\n(?=(?:Current t|T)hread )", answer.strip()) if block]
    # faulthandler writes the youngest thread first and the main thread last.
    lines: list[str] = []
    for number, frames in enumerate(reversed(threads)):
        most = OTHER_FRAMES if number else MAIN_FRAMES
        lines.append("main thread:" if number == 0 else "another thread:")
        lines += [f"  {frame}" for frame in frames[:most]]
        if len(frames) > most:
            lines.append(f"  ... {len(frames) - most} more")
    if len(lines) > LINES:
        lines[LINES - 1 :] = [f"... {len(lines) - LINES + 1} more lines"]
    return lines


def innermost(answer: str) -> str:
    """The innermost frame of the main thread."""
    lines = format_stacks(answer)
    return lines[1].strip() if len(lines) > 1 else ""


def _thread(block: str) -> list[str]:
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', block, re.MULTILINE)
    # The interpreter's own frames below a module or a thread are of no use to a reader.
    while len(frames) > 1 and (frames[-1][0] == "<frozen runpy>" or frames[-1][2].startswith("_bootstrap")):
        del frames[-1]
    return [f"{_short(path)}:{line} in {function}" for path, line, function in frames]


def _short(path: str) -> str:
    """The path relative to the package, or to the standard library."""
    for mark in ("/site-packages/", "/src/", "/dist-packages/"):
        if mark in path:
            return path.rpartition(mark)[2]
    return re.sub(r"^.*/lib/python3\.\d+/", "", path)
