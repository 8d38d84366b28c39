"""Text that came from outside, made fit to be shown: names of files, classes, tensors and archive members, errors of
libraries.

Promises: nothing in what comes out moves a cursor, changes a colour, hides or reorders letters, or fails to encode.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence


def printable(text: str, keep: str = "") -> str:
    r"""The text with whatever a terminal would obey written as in Python (`\x1b`), but for the signs in `keep`."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in keep else ascii(sign)[1:-1] for sign in text)


def message(text: str) -> str:
    """The same for a message of ours, whose lines and tabs stay."""
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
