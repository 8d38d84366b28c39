"""The known name that is most similar to a wrong one. Pure.

Suggests only names that differ by a typo, by characters such as `-` and `_`, or by a missing part. A name that merely
looks similar would mislead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


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


def _parts(name: str) -> list[str]:
    """Runs of letters and of digits."""
    return re.findall(r"[a-z]+|[0-9]+", name.lower())
