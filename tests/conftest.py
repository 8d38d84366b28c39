"""Properties have no deadline and may be slow to draw: how long an example takes is up to the machine. Launchers of
tests have a secret of their own."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec

# Launchers of several machines share it; without it they would create a file in the user's configuration.
os.environ.setdefault("DRUMLINE_SECRET", "for tests and nothing else")

# A background job of a shell ignores Ctrl-C and passes that on to every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if find_spec("hypothesis"):  # tests of the GPU do without
    from hypothesis import HealthCheck, settings

    settings.register_profile("drumline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("drumline")
