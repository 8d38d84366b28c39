"""Properties have no deadline and may be slow to draw: how long an example takes is up to the machine. Launchers of
tests have a secret of their own."""

from __future__ import annotations

import os
from importlib.util import find_spec

# Launchers of several machines share it; without it they would create a file in the user's configuration.
os.environ.setdefault("DRUMLINE_SECRET", "for tests and nothing else")

if find_spec("hypothesis"):  # tests of the GPU do without
    from hypothesis import HealthCheck, settings

    settings.register_profile("drumline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("drumline")
