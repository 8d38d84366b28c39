"""Processes that work for another one (checking, packing) and must not outlive it, however that ended.

Promises: Ctrl-C is left to the owner, which ends its processes; one that was killed takes them along. They would stay
for ever otherwise: each waits for work on a pipe that it could write to itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait


def serve_owner() -> None:
    """Called by a process at its start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_owner, daemon=True).start()


def _end_with_owner() -> None:
    owner = multiprocessing.parent_process()
    assert owner is not None
    wait([owner.sentinel])
    os._exit(1)
