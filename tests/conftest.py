"""Properties have no deadline and may be slow to draw: how long an example takes is up to the machine."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("hypothesis"):  # tests of the GPU do without
    from hypothesis import HealthCheck, settings

    settings.register_profile("drumline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("drumline")
