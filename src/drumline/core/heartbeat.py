"""Signs of progress: each worker counts its steps in a few shared bytes, and its launcher looks at them.

Promises: a beat is three stores into shared memory, no system call, and nothing at all in a process that no launcher
of ours has started; the bytes belong to no file system, so nothing is left behind however a process ends. What the
launcher makes of silence is decided in `hang.py`.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

VARIABLE = "DRUMLINE_HEARTBEAT"
"""Where a worker finds the bytes: a path and the number of its slot, with a colon between."""

SLOT = 64
_LAYOUT = struct.Struct("=3q")


class Phase(IntEnum):
    """What the main thread of a worker is about."""

    STARTING = 0
    STEPPING = 1
    EVALUATING = 2
    FILLING = 3
    SAVING = 4
    ENDING = 5

    @property
    def steady(self) -> bool:
        """Whether signs come at short intervals. In the others one thing may take long: compiling, a first batch, a
        checkpoint on a slow disk."""
        return self in (Phase.STEPPING, Phase.EVALUATING, Phase.FILLING)

    @property
    def words(self) -> str:
        return "filling the teacher cache" if self is Phase.FILLING else self.name.lower()


@dataclass(frozen=True)
class Beat:
    """What a worker has said last: how many signs so far, the steps it has taken, and its phase."""

    count: int = 0
    step: int = 0
    phase: Phase = Phase.STARTING


_slot: memoryview | None = None


def connect(env: Mapping[str, str]) -> None:
    """Opens the bytes that the launcher has named; without a launcher, beats go nowhere."""
    global _slot
    if VARIABLE not in env:
        return
    path, _, number = env[VARIABLE].rpartition(":")
    with Path(path).open("r+b") as file:
        whole = mmap.mmap(file.fileno(), 0)
    start = int(number) * SLOT
    _slot = memoryview(whole)[start : start + _LAYOUT.size].cast("q")


def beat(step: int) -> None:
    """A step is done; `step` counts them."""
    if _slot is not None:
        _slot[1] = step
        _slot[2] = 1  # Phase.STEPPING: an attribute of an enum costs more than the rest of this function
        _slot[0] += 1


def enter(phase: Phase) -> None:
    """A sign of progress in something else than stepping, which the main thread is about from now on."""
    if _slot is not None:
        _slot[2] = phase
        _slot[0] += 1


class Beats:
    """The launcher's side: a slot for each of its workers."""

    def __init__(self, workers: int) -> None:
        self._descriptor = os.memfd_create("drumline-heartbeat")
        os.ftruncate(self._descriptor, workers * SLOT)
        self._bytes = mmap.mmap(self._descriptor, workers * SLOT)

    def variable(self, local_rank: int) -> dict[str, str]:
        """What this worker is to be given."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}:{local_rank}"}

    def read(self, local_rank: int) -> Beat:
        """What this worker has said last."""
        count, step, phase = _LAYOUT.unpack_from(self._bytes, local_rank * SLOT)
        return Beat(count, step, Phase(phase))

    def close(self) -> None:
        self._bytes.close()
        os.close(self._descriptor)
