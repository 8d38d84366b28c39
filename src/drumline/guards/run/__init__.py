"""Guards of Drumline's own loop: `guards.py` calls the checks around each step of a run."""
