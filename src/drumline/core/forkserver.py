"""Imported first by the fork server of `core/processes.py`, and by nothing else.

Signals to a whole process group are for the owner: a run finishes its step and saves, `drumline pack` records its
progress. The server and the processes it forks must live until then. They end with the owner.
"""

from __future__ import annotations

import atexit
import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
# Tearing down torch takes long on a busy machine, and a server whose owner was killed must be gone at once.
atexit.register(os._exit, 0)
