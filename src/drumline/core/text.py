"""Text that commands print: names from outside made safe, wrapped lines, numbers, suggestions, and results as JSON.

What `printable` and `message` return cannot move a cursor, change a colour, hide or reorder letters, or fail to
encode. Numbers are plain ASCII of a steady width; NaN and infinity are written as such. `near` suggests only names
that differ by a typo, by characters such as `-` and `_`, or by a missing part.
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


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
        lines += wrapped_lines(line, width, indent + "  ") or [""]
    return "\n".join(lines)


def wrapped_lines(text: str, width: int, indent: str = "", first: str = "") -> list[str]:
    """The lines of a paragraph, wrapped between words and never inside `a command`. `indent` precedes each line but
    the first, which `first` precedes."""
    kept = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        kept,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


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


def near(wrong: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The known names most similar to `wrong`, best first: equal except for punctuation and case, one that begins or
    ends with it (`warmup` for `warmup_epochs`, `resnet` for `resnet18`), or one with at most a quarter of its letters
    mistyped (at least one)."""
    bare = "".join(_parts(wrong))
    ranked = []
    for order, name in enumerate(known):
        parts = _parts(name)
        candidate = "".join(parts)
        if candidate == bare:
            rank = 0
        elif any(bare == "".join(parts[:count]) for count in range(1, len(parts))):
            rank = 1
        elif any(bare == "".join(parts[count:]) for count in range(1, len(parts))):
            rank = 2
        else:
            mistakes = distance(bare, candidate)
            if mistakes > max(1, min(len(bare), len(candidate)) // 4):
                continue
            rank = 2 + mistakes
        ranked.append((rank, order, name))
    return [name for _, _, name in sorted(ranked)[:most]]


def distance(one: str, other: str) -> int:
    """How many letters to insert, delete, replace or swap with a neighbour to turn `one` into `other`."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        older, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            best = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != wanted))
            if older and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                best = min(best, older[j - 2] + 1)
            row.append(best)
    return row[-1]


def did_you_mean(wrong: str, known: Iterable[str], otherwise: str = "") -> str:
    """A fix: the nearest name, or `otherwise` if none is near."""
    close = near(wrong, known)
    return f"did you mean {close[0]}?" if close else otherwise


def print_result(result: Any) -> None:
    """Prints the result of a command as the last line of stdout, for scripts. Prints nothing on a terminal, where
    stderr has shown the result."""
    if sys.stdout is not None and not sys.stdout.isatty():
        print(json_line(result), flush=True)


def json_line(result: Any) -> str:
    """Valid JSON: NaN and infinity, which JSON does not have, are null."""
    return json.dumps(_plain(result), allow_nan=False)


def _parts(name: str) -> list[str]:
    """Runs of letters and of digits."""
    return re.findall(r"[a-z]+|[0-9]+", name.lower())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
