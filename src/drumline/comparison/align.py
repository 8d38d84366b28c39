"""Aligns the layers of two networks without looking at their names.

Promises: pure functions. Each layer has at most one partner, both sequences keep their order, and gaps are as few and
as whole as the scores allow (Needleman and Wunsch, with Gotoh's affine gaps). Equal sequences pair one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Pair = tuple[int | None, int | None]
"""Positions in the two sequences; None for a gap."""
_OPEN, _EXTEND = -2.0, -0.5
_NEVER = float("-inf")


def flow_order(sources: Sequence[Sequence[int]], last: int) -> tuple[list[int], list[int], set[int]]:
    """The positions of layers that are given in the order of their calls, sorted by the flow of values alone: before
    a layer come those that it reads, the longest chain first. Layers that `last` does not depend on come at the end.
    Also the depth of each layer, and which of them are used. Sources below 0 are not layers."""
    depth: list[int] = []
    for number, read in enumerate(sources):
        depth.append(1 + max((depth[source] for source in read if 0 <= source < number), default=0))
    order: list[int] = []
    seen: set[int] = set()
    used: set[int] = set()
    for end in [last, *range(len(sources))] if sources else []:
        waiting = [(end, False)]
        while waiting:
            number, ready = waiting.pop()
            if ready:
                order.append(number)
            elif number not in seen:
                seen.add(number)
                waiting.append((number, True))
                inner = {each for each in sources[number] if 0 <= each < number}
                waiting += [(each, False) for each in sorted(inner, key=lambda each: (depth[each], -each))]
        used = used or set(seen)
    return order, depth, used


def align(
    one: int, other: int, score: Callable[[int, int], float], same: Callable[[int, int], bool]
) -> list[Pair]:
    """Pairs the positions of two sequences of these lengths. Positions whose `score` is not above 0 never pair; equal
    beginnings and ends, by `same`, always do."""
    ahead = 0
    while ahead < min(one, other) and same(ahead, ahead):
        ahead += 1
    behind = 0
    while behind < min(one, other) - ahead and same(one - 1 - behind, other - 1 - behind):
        behind += 1
    middle = _gotoh(one - ahead - behind, other - ahead - behind, lambda i, j: score(i + ahead, j + ahead))
    pairs: list[Pair] = [(number, number) for number in range(ahead)]
    pairs += [(None if i is None else i + ahead, None if j is None else j + ahead) for i, j in middle]
    pairs += [(one - number, other - number) for number in range(behind, 0, -1)]
    return pairs


def _gotoh(rows: int, columns: int, score: Callable[[int, int], float]) -> list[Pair]:
    """The best alignment. The three tables end in a pair, and in a gap of the second or the first sequence."""
    if not rows or not columns:
        return [(i, None) for i in range(rows)] + [(None, j) for j in range(columns)]
    tables = [[[_NEVER] * (columns + 1) for _ in range(rows + 1)] for _ in range(3)]
    pair, down, right = tables
    pair[0][0] = 0.0
    for i in range(1, rows + 1):
        down[i][0] = _OPEN + i * _EXTEND
    for j in range(1, columns + 1):
        right[0][j] = _OPEN + j * _EXTEND
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            value = score(i - 1, j - 1)
            if value > 0:
                pair[i][j] = value + max(table[i - 1][j - 1] for table in tables)
            down[i][j] = _EXTEND + max(pair[i - 1][j] + _OPEN, down[i - 1][j], right[i - 1][j] + _OPEN)
            right[i][j] = _EXTEND + max(pair[i][j - 1] + _OPEN, right[i][j - 1], down[i][j - 1] + _OPEN)
    pairs: list[Pair] = []
    i, j = rows, columns
    now = max(range(3), key=lambda table: tables[table][i][j])
    while i or j:
        if now == 0:
            i, j = i - 1, j - 1
            pairs.append((i, j))
            now = max(range(3), key=lambda table: tables[table][i][j])
        elif now == 1:
            i -= 1
            pairs.append((i, None))
            now = max(range(3), key=lambda table: tables[table][i][j] + (0.0 if table == 1 else _OPEN))
        else:
            j -= 1
            pairs.append((None, j))
            now = max(range(3), key=lambda table: tables[table][i][j] + (0.0 if table == 2 else _OPEN))
    return pairs[::-1]


def slide(
    pairs: Sequence[Pair], same: Callable[[Pair, Pair], bool], whole: Callable[[Sequence[Pair]], Any]
) -> list[Pair]:
    """Moves each gap between repeated layers to where it is one whole block, by the highest `whole`. `same` says
    whether a gap's layer may take the place of that of a pair."""
    result = list(pairs)
    begin = 0
    while begin < len(result):
        side = 1 if result[begin][1] is None else 0 if result[begin][0] is None else None
        if side is None:
            begin += 1
            continue
        end = begin
        while end < len(result) and result[end][side] is None and result[end][1 - side] is not None:
            end += 1
        result = max(_slides(result, begin, end, side, same), key=lambda each: whole(each[0]))[1]
        begin = end
    return result


def _slides(
    pairs: list[Pair], begin: int, end: int, side: int, same: Callable[[Pair, Pair], bool]
) -> list[tuple[list[Pair], list[Pair]]]:
    """The gap at each place that it can slide to, and all pairs then. The given place is first."""
    found = [(pairs[begin:end], pairs)]
    for way in (-1, 1):
        now, first, last = list(pairs), begin, end
        while True:
            beside, far = (first - 1, last - 1) if way < 0 else (last, first)
            if not 0 <= beside < len(now) or None in now[beside] or not same(now[far], now[beside]):
                break
            # The pair beside the gap takes the gap's farthest layer, and its own layer joins the gap.
            pair, gap, now = now[beside], now[far], list(now)
            now[far] = (gap[0], pair[1]) if side == 1 else (pair[0], gap[1])
            now[beside] = (pair[0], None) if side == 1 else (None, pair[1])
            first, last = first + way, last + way
            found.append((now[first:last], now))
    return found
