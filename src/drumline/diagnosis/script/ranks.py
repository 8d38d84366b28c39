"""The messages of all ranks as the evidence that the rules read. Pure.

Promises: only intervals that every rank has are used: a rank that ended early or reports late shortens the evidence,
and a rank that reports nothing is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from drumline.core.account import BETWEEN_STEPS, DATA, EXCHANGE
from drumline.diagnosis.evidence import Evidence, Interval, merged
from drumline.diagnosis.script.lines import line_text

LEAST_S, MOST_INTERVALS = 5.0, 12
"""Seconds of an interval at least, and intervals at most, that the rules compare."""
MOST_LINES = 64
"""Lines of source that a rank reports."""


def evidence_of(messages: Sequence[Mapping[str, Any] | None]) -> Evidence:
    """The evidence in these messages."""
    known = [each for each in messages if each is not None and each["intervals"]]
    if not known:
        return Evidence([])
    rows = [{(row["step"], row["steps"]): row for row in each["intervals"]} for each in known]
    places = [_place(each) for each in known]
    facts: dict[str, Any] = {
        **known[0]["facts"],
        "lines": _lines(known),
        "own_code": [place for place, _ in places],
    }
    intervals = []
    for key in rows[0]:
        if all(key in each for each in rows):
            intervals.append(_interval([each[key] for each in rows], facts, [share for _, share in places]))
    intervals = [*intervals[:1], *_joined(intervals[1:])]
    evaluating = sum(max(each.get("host_evaluation_ms")) > 0 for each in intervals)
    if evaluating:  # what the rules take for the size of one evaluation: that of an interval
        evaluated = sum(each["facts"].get("evaluated", 0) for each in known)
        facts["eval_samples"] = evaluated / evaluating
    return Evidence(intervals)


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Fewer and longer ones: in a short one, a pass that begins looks as if training became slower."""
    least = max(LEAST_S, sum(each.seconds for each in intervals) / MOST_INTERVALS)
    groups: list[list[Interval]] = [[]]
    for each in intervals:
        if sum(one.seconds for one in groups[-1]) >= least:
            groups.append([])
        groups[-1].append(each)
    if len(groups) > 1 and sum(one.seconds for one in groups[-1]) < least:
        last = groups.pop()
        groups[-1] += last
    return [merged(group) for group in groups if group]


def _interval(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], own: Sequence[float]) -> Interval:
    """The same steps of all ranks."""
    names = [name for name in rows[0]["values"] if all(name in row["values"] for row in rows)]
    values = {name: tuple(row["values"][name] for row in rows) for name in names}
    values["own_code_share"] = tuple(own)
    slowest = max(values["step_ms"]) * rows[0]["steps"] / 1e3
    samples = sum(row["samples"] for row in rows)
    first = rows[0]
    return Interval(
        first["step"], first["epoch"], first["steps"], samples / slowest if slowest else 0.0, values, facts
    )


def _place(message: Mapping[str, Any]) -> tuple[str, float]:
    """The line that a rank was in most often while it trained, but for data and other ranks; and how often."""
    training = [each for each in message["lines"] if each[0] not in BETWEEN_STEPS]
    own = [each for each in training if each[0] not in (DATA, EXCHANGE) and each[1]]
    if not own:
        return "", 0.0
    _, file, line, count = own[0]
    return line_text(file, line), count / sum(each[3] for each in training)


def _lines(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, str, int, float]]:
    """Rank, part, file and line, with the fraction of that rank's samples in this part that saw it."""
    found = []
    for rank, each in enumerate(messages):
        in_part: Counter[str] = Counter()
        for part, _, _, count in each["lines"]:
            in_part[part] += count
        found += [
            (rank, part, file, line, count / in_part[part])
            for part, file, line, count in each["lines"]
            if file and count >= 3
        ]
    return found
