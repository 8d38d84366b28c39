"""Why a run is slow: what was measured, the rules that read it, and what would help."""
