"""Text for people: names that came from outside made safe to print, wrapped lines, numbers and durations.

What `printable` and `message` return cannot move a cursor, change a colour, hide or reorder letters, or fail to
encode. Numbers are plain ASCII of a steady width; NaN and infinity are written as such.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence


def printable(text: str, keep: str = "") -> str:
    r"""The text with every character that a terminal would obey escaped as in Python (`\x1b`), except those in
    `keep`."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in keep else ascii(sign)[1:-1] for sign in text)


def message(text: str) -> str:
    """The same for a message of ours, which keeps its line breaks and tabs."""
    return printable(text, keep="\n\t")


def wrapped(text: str, width: int) -> str:
    """Wraps text at `width` characters, between words and never inside `a command`. Continuation lines have two
    more spaces of indentation than the line they continue."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        kept = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\0"), line)
        lines += textwrap.wrap(
            kept, width, subsequent_indent=indent + "  ", break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines).replace("\0", " ")


def either(names: Sequence[str]) -> str:
    """`A`, `A or B`, `A, B or C`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def counted(number: int, one: str, several: str = "") -> str:
    """A number and the noun it counts: `1 class`, `2,000 samples`."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def rate(per_second: float, unit: str) -> str:
    """1234.5, `img` -> `1,234 img/s`; below 10 with one decimal."""
    return f"{per_second:,.{0 if per_second >= 10 else 1}f} {unit}/s"


def percent(fraction: float) -> str:
    """0.0031 -> `0.3 %`; from 10 % on without decimals."""
    number = 100 * fraction
    return f"{number:.{0 if number >= 9.95 else 1}f} %"


def loss_text(value: float) -> str:
    """2.34567 -> `2.3457`; very small and very large values in powers of ten."""
    if value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.2e}"


def duration(seconds: float) -> str:
    """75 -> `1:15`, 5025 -> `1:23:45`, 100000 -> `1 d 3 h`."""
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
