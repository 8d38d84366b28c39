"""Ties a worker's life to its launcher's.

Promises: no worker outlives the launcher, however that ended. Refuses nothing; asks the kernel once, at the
worker's start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from drumline.core.environment import LAUNCHER

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Called by a worker at its start: the kernel kills it when its launcher is gone, even after kill -9.

    Does nothing unless our launcher started this process (a run under nohup must outlive its shell). Other
    kernels than Linux only get the check for a launcher that is gone already.
    """
    if LAUNCHER not in os.environ:
        return
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(os.environ[LAUNCHER]):
        os.kill(os.getpid(), signal.SIGKILL)
