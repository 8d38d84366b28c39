"""The result of a command for scripts: JSON on the last line of stdout, unless stdout is a terminal."""

from __future__ import annotations

import json
import math
import sys
from typing import Any


def print_result(result: Any) -> None:
    """Prints nothing on a terminal, where stderr has shown the result."""
    if sys.stdout is not None and not sys.stdout.isatty():
        print(json_line(result), flush=True)


def json_line(result: Any) -> str:
    """Valid JSON: NaN and infinity, which JSON does not have, are null."""
    return json.dumps(_plain(result), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
