"""What a command leaves for scripts: its result as JSON, on the last line of stdout, unless a person reads there."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_result(result: dict[str, Any]) -> None:
    """Prints nothing on a terminal: people have read it on stderr."""
    if sys.stdout is not None and not sys.stdout.isatty():
        print(json.dumps(result), flush=True)
