"""Heartbeats: each worker counts its steps in a few bytes of shared memory, which its launcher reads.

Promises: a beat is three stores into shared memory and no system call, and does nothing in a process that our
launcher has not started; the memory belongs to no file system, so nothing is left behind however a process ends.
`hang.py` decides what silence means.
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
"""The path of the shared memory and the number of the worker's slot, separated by a colon."""

SLOT = 64
_LAYOUT = struct.Struct("=3q")


class Phase(IntEnum):
    """What the main thread of a worker is doing."""

    STARTING = 0
    STEPPING = 1
    EVALUATING = 2
    FILLING = 3
    SAVING = 4
    ENDING = 5

    @property
    def steady(self) -> bool:
        """Whether beats come at short intervals. In the other phases one operation may take long: compiling, a first
        batch, a checkpoint on a slow disk."""
        return self in (Phase.STEPPING, Phase.EVALUATING, Phase.FILLING)

    @property
    def label(self) -> str:
        return "filling the teacher cache" if self is Phase.FILLING else self.name.lower()


@dataclass(frozen=True)
class Beat:
    """The state of a worker: its number of beats so far, the steps it has taken, and its phase."""

    count: int = 0
    step: int = 0
    phase: Phase = Phase.STARTING


_slot: memoryview | None = None


def connect(env: Mapping[str, str]) -> None:
    """Opens the shared memory that the launcher names; without a launcher, beats do nothing."""
    global _slot
    if VARIABLE not in env:
        return
    path, _, number = env[VARIABLE].rpartition(":")
    with Path(path).open("r+b") as file:
        whole = mmap.mmap(file.fileno(), 0)
    start = int(number) * SLOT
    _slot = memoryview(whole)[start : start + _LAYOUT.size].cast("q")


def beat(step: int) -> None:
    """Records that a step is done; `step` counts them."""
    if _slot is not None:
        _slot[1] = step
        _slot[2] = 1  # Phase.STEPPING: an attribute of an enum costs more than the rest of this function
        _slot[0] += 1


def enter(phase: Phase) -> None:
    """Records progress in another phase than stepping, which the main thread is in from now on."""
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
        """The variable for this worker."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}:{local_rank}"}

    def read(self, local_rank: int) -> Beat:
        """The state of this worker."""
        count, step, phase = _LAYOUT.unpack_from(self._bytes, local_rank * SLOT)
        return Beat(count, step, Phase(phase))

    def close(self) -> None:
        self._bytes.close()
        os.close(self._descriptor)
