"""Imported first by the fork servers of loaders, packing and checking, and by nobody else.

Signals for a whole process group mean the owner: the trainer finishes its step and saves, packing notes how far it
came. The server and the processes it forks must stay until then. They end with the owner (`owned.end_with_owner`).
"""

from __future__ import annotations

import atexit
import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
# Taking torch apart at exit takes long on a busy machine, and a server whose owner was killed is to be gone at once.
atexit.register(os._exit, 0)
