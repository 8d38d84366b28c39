"""Processes that work for another one (checking, packing) and must not outlive it, however that ended.

Promises: Ctrl-C is left to the owner, which ends its processes; one that was killed takes them along. They would stay
for ever otherwise: each waits for work on a pipe that it could write to itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import FrameType


def serve_owner() -> None:
    """Called by a process at its start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_owner()


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Ctrl-C (and SIGTERM, which schedulers send) as a question asked between samples: raised at any moment, it can
    strike while the pool of processes holds a lock, and ending the pool then waits for ever. A second one is raised
    at once."""
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's business
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    except Exception as error:
        if seen:  # a terminal's Ctrl-C also ends processes that have not yet begun to ignore it; no wonder they fail
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_owner() -> None:
    """From now on this process ends when its owner does. torch's own watchdog, for one, looks at the parent process,
    which is the fork server; and that one lives as long as its children do."""
    threading.Thread(target=_wait_for_owner, daemon=True).start()


def _wait_for_owner() -> None:
    owner = multiprocessing.parent_process()
    assert owner is not None
    wait([owner.sentinel])
    os._exit(1)
