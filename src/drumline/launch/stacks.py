"""Where in the code each thread of a hung process stands, asked for by a signal.

Promises: a process answers from inside a native call too, without any of its Python code being run; the answer is
cut to what a person reads. A stopped process cannot answer; that is told from /proc.
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
"""File that a worker writes its stacks into."""

SIGNAL = signal.SIGUSR1
ANSWER_SECONDS = 1.0
LINES = 40
MAIN_FRAMES, OTHER_FRAMES = 16, 4


def answer_signal(env: Mapping[str, str]) -> None:
    """Called by a worker at its start: from now on SIGUSR1 makes it write its stacks where the launcher looks."""
    if VARIABLE in env:
        # Stays open as long as the process: the handler writes to its descriptor.
        descriptor = os.open(env[VARIABLE], os.O_WRONLY | os.O_APPEND)
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


class Stacks:
    """The launcher's side: a place for each worker's answer, that belongs to no file system."""

    def __init__(self, workers: int) -> None:
        self._descriptors = [os.memfd_create("drumline-stacks") for _ in range(workers)]

    def variable(self, local_rank: int) -> dict[str, str]:
        """What this worker is to be given."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptors[local_rank]}"}

    def ask(self, processes: Mapping[int, int]) -> dict[int, str]:
        """What those of the processes (ids by local rank) answer that can, as faulthandler writes it."""
        before = {local_rank: self._size(local_rank) for local_rank in processes}
        for pid in processes.values():
            os.kill(pid, SIGNAL)
        deadline, sizes = time.monotonic() + ANSWER_SECONDS, dict[int, int]()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            last, sizes = sizes, {local_rank: self._size(local_rank) for local_rank in processes}
            if last == sizes and all(sizes[local_rank] > before[local_rank] for local_rank in processes):
                break  # all have answered, and finished
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


def tidy(answer: str) -> list[str]:
    """An answer for people: the main thread first, innermost call first, paths from the package on, at most 40
    lines."""
    threads = [_thread(block) for block in re.split(r"\n(?=(?:Current t|T)hread )", answer.strip()) if block]
    # faulthandler goes from the youngest thread to the main one.
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
    """The place at which the main thread stands."""
    lines = tidy(answer)
    return lines[1].strip() if len(lines) > 1 else ""


def _thread(block: str) -> list[str]:
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', block, re.MULTILINE)
    # How the interpreter came to run a module or a thread tells nobody anything.
    while len(frames) > 1 and (frames[-1][0] == "<frozen runpy>" or frames[-1][2].startswith("_bootstrap")):
        del frames[-1]
    return [f"{_short(path)}:{line} in {function}" for path, line, function in frames]


def _short(path: str) -> str:
    """The part of a path that tells something: from the package, or the standard library's module, on."""
    for mark in ("/site-packages/", "/src/", "/dist-packages/"):
        if mark in path:
            return path.rpartition(mark)[2]
    return re.sub(r"^.*/lib/python3\.\d+/", "", path)
