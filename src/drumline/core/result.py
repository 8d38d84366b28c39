"""What a command leaves for scripts: its result as JSON, on the last line of stdout, unless a person reads there."""

from __future__ import annotations

import json
import math
import sys
from typing import Any


def print_result(result: Any) -> None:
    """Prints nothing on a terminal: people have read it on stderr."""
    if sys.stdout is not None and not sys.stdout.isatty():
        print(json_line(result), flush=True)


def json_line(result: Any) -> str:
    """Valid JSON: what is NaN or infinite, for which JSON has no word, is null."""
    return json.dumps(_plain(result), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
