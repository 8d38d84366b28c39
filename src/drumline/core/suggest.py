"""Which known name a wrong one may have meant. Pure.

Promises: only names that differ by a typing mistake, by signs such as `-` and `_`, or by a missing end are suggested;
a name that merely looks alike would mislead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def near(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Known names that `word` may have meant, best first: the same but for signs and letter case, one whose first or
    last parts it is (`warmup` of `warmup_epochs`, `resnet` of `resnet18`), or with at most one letter in four (but
    one in any) mistyped."""
    bare = "".join(_parts(word))
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
    """Letters to insert, delete, replace or swap with their neighbour to make `other` of `one`."""
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


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A fix: the nearest name, or what to do where none is near."""
    close = near(word, known)
    return f"did you mean {close[0]}?" if close else otherwise


def _parts(word: str) -> list[str]:
    """Runs of letters and of digits."""
    return re.findall(r"[a-z]+|[0-9]+", word.lower())
