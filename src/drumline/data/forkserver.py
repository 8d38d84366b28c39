"""Imported by the loaders' fork server and by nobody else.

A SIGTERM for a whole process group means the trainer, which finishes its step and saves; the server and the
loaders it forks must stay until then. They end with the trainer (`processes._end_with_trainer`).
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
