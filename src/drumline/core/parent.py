"""Ends a worker when its launcher ends.

Promises: no worker outlives its launcher, however that ended. One system call at the worker's start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from drumline.core.environment import LAUNCHER

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Called by a worker at its start: the kernel kills it when its launcher ends, even by kill -9.

    Does nothing unless our launcher started this process (a run under nohup must outlive its shell). On kernels other
    than Linux it only checks that the launcher still exists.
    """
    if LAUNCHER not in os.environ:
        return
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(os.environ[LAUNCHER]):
        os.kill(os.getpid(), signal.SIGKILL)
