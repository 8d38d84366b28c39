"""Hung workers: whether the workers hang, which rank the others wait for, and the stacks of a hung process.

Promises: ranks that wait for one whose work may take long (compiling, saving) do not count as hung; a run with slow
steps gets time in proportion; time in which the launcher itself was stopped does not count. A process that is asked
by a signal for its stacks answers even from inside a native call, and none of its Python code runs; a stopped process
cannot answer.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.core.heartbeat import Beat, Phase
from drumline.launch.failure import Failure

PATIENCE = 3.0
"""A step may take this many times as long as the slowest so far."""

LATE_SECONDS = 1.0
"""If two checks of the workers are further apart than this, the launcher itself was stopped."""

VARIABLE = "DRUMLINE_STACKS"
"""The file to which a worker writes its stacks."""

SIGNAL = signal.SIGUSR1
ANSWER_SECONDS = 1.0
LINES = 40
MAIN_FRAMES, OTHER_FRAMES = 16, 4


@dataclass(frozen=True)
class Sign:
    """The state of one rank: its last beat and how many seconds ago it came, how long the process has been stopped
    (0: it is running), and the longest time between two beats of a steady phase."""

    rank: int
    beat: Beat
    silent: float
    stopped: float = 0.0
    slowest: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Seconds without a beat: in phases with steady beats (0: no limit), and in phases where one operation may take
    long."""

    hang: float
    starting: float


class Pulse:
    """One worker's beats over time."""

    def __init__(self, rank: int, now: float) -> None:
        self._rank, self._beat = rank, Beat()
        self._since = self._checked = now
        self._stopped_since: float | None = None
        self._slowest = 0.0

    def update(self, beat: Beat, stopped: bool, now: float) -> Sign:
        """Records the latest beat and whether the process is stopped."""
        late = now - self._checked
        self._checked = now
        if late > LATE_SECONDS:
            self._since += late
            self._stopped_since = None
        if beat.count != self._beat.count:
            # The starting phase ends with a beat right before the first step, so that step's length is known too.
            if beat.phase.steady and self._beat.phase in (beat.phase, Phase.STARTING):
                self._slowest = max(self._slowest, now - self._since)
            self._beat, self._since = beat, now
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        held = 0.0 if self._stopped_since is None else now - self._stopped_since
        return Sign(self._rank, self._beat, now - self._since, held, self._slowest)


def is_hung(signs: Sequence[Sign], limits: Limits, busy_elsewhere: bool = False) -> bool:
    """Whether the run hangs. `busy_elsewhere`: a rank of another machine does something that may take long."""
    if limits.hang == 0:
        return False
    if any(sign.stopped > limits.hang for sign in signs):
        return True
    return any(_overdue(sign, limits) for sign in signs) and not busy_elsewhere and not is_busy(signs, limits)


def is_busy(signs: Sequence[Sign], limits: Limits) -> bool:
    """Whether one of the ranks does something that may take long, so that others may wait for it."""
    return any(not sign.beat.phase.steady and not _overdue(sign, limits) for sign in signs)


def describe(sign: Sign, answer: str) -> str:
    """The state of a rank for the user; `answer` holds its stacks as faulthandler wrote them."""
    if sign.stopped:
        lines = ["stopped by SIGSTOP or a debugger, so its stack cannot be read"]
    else:
        lines = format_stacks(answer) or ["no answer to the request for its stack"]
    head = f"rank {sign.rank}: {sign.beat.phase.label}, {sign.beat.step:,} steps done, silent for {sign.silent:.1f} s"
    return "\n".join([head, *(f"  {line}" for line in lines)])


def verdict(
    signs: Sequence[Sign], answers: Mapping[int, str], elsewhere: Sequence[int], now: float
) -> Failure:
    """The hang as a failure of the rank that the others most likely wait for. `elsewhere` has the fewest steps of
    each other machine; a machine further behind is more likely to have that rank."""
    rank, why = blocking_rank(signs, {rank: innermost(answer) for rank, answer in answers.items() if answer})
    silent = max(max(sign.silent, sign.stopped) for sign in signs)
    behind = any(step < min(sign.beat.step for sign in signs) for step in elsewhere)
    return Failure(
        signs[0].rank if rank is None else rank,
        f"hung: no progress for {silent:.1f} s; {why or 'all ranks look the same'}",
        now,
        follows=behind and not any(sign.stopped for sign in signs),
        lost=True,
    )


def blocking_rank(signs: Sequence[Sign], frames: Mapping[int, str]) -> tuple[int | None, str]:
    """The rank that the others most likely wait for, and the reason; None if all look the same. `frames` has the
    innermost frame of each rank's main thread, as far as known."""
    stopped = [sign for sign in signs if sign.stopped]
    if stopped:
        return stopped[0].rank, "it is stopped by SIGSTOP or a debugger"
    if len(signs) == 1:
        return signs[0].rank, "it is the only rank on this machine"
    fewest = min(sign.beat.step for sign in signs)
    behind = [sign.rank for sign in signs if sign.beat.step == fewest]
    if len(behind) < len(signs):
        return behind[0], f"it has taken the fewest steps, {fewest:,}"
    counts = Counter(frames.values())
    odd = [rank for rank, frame in frames.items() if counts[frame] == 1]
    if len(odd) == 1 and len(frames) > 2:
        return odd[0], "its main thread is at a different line from the others"
    return None, ""


# Stacks.


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


def _overdue(sign: Sign, limits: Limits) -> bool:
    if sign.beat.phase.steady:
        return sign.silent > max(limits.hang, PATIENCE * sign.slowest)
    return sign.silent > max(limits.hang, limits.starting)


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
