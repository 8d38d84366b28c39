"""Why a run is slow: the measurements, the rules that read them, and what would help."""
