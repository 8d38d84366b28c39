"""Ties a worker's life to its launcher's.

Promises: no worker outlives the launcher, however that ended. Refuses nothing; asks the kernel once, at the
worker's start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from drumline.launch.environment import LAUNCHER


def die_with_parent() -> None:
    """Called by a worker at its start: the kernel kills it when its launcher is gone, even after kill -9.

    Does nothing unless our launcher started this process (a run under nohup must outlive its shell), and
    nothing beside the check for a launcher already gone where the kernel is not Linux.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    if sys.platform == "linux":
        set_death_signal = 1
        if ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)
