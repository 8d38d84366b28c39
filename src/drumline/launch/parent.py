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

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Called by a worker at its start: the kernel kills it when its launcher is gone, even after kill -9.

    Without `parent`, does nothing unless our launcher started this process (a run under nohup must outlive
    its shell). A helper process of a worker gives the worker's process id as `parent`; the kernel then means
    the thread that started it, so start helpers from a thread that stays. Other kernels than Linux only get
    the check for a parent that is gone already.
    """
    if parent is None:
        if LAUNCHER not in os.environ:
            return
        parent = int(os.environ[LAUNCHER])
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
