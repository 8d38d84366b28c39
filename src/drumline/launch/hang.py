"""Which worker no longer moves, and which one the others wait for. Pure: what is known goes in, a verdict comes out.

Promises: ranks that wait for one whose work may take long (compiling, saving) are not taken for hung; a run whose
steps are slow by themselves gets time in proportion; time in which the launcher itself stood still does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drumline.core.heartbeat import Beat, Phase
from drumline.launch.failure import Failure
from drumline.launch.stacks import innermost, tidy

PATIENCE = 3.0
"""A step may take this many times as long as the slowest one so far."""

LATE_SECONDS = 1.0
"""A look at the workers that comes later than this after the one before: the launcher itself stood still."""


@dataclass(frozen=True)
class Sign:
    """What is known of one rank: its last beat and how long ago it came, how long it has been seen stopped (0: it is
    not), and its longest time between two beats while it went on steadily."""

    rank: int
    beat: Beat
    silent: float
    stopped: float = 0.0
    slowest: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Seconds without a sign of progress: while beats come steadily (0: no limit), and while one thing may take
    long."""

    hang: float
    starting: float


class Pulse:
    """One worker's beats over time."""

    def __init__(self, rank: int, now: float) -> None:
        self._rank, self._beat = rank, Beat()
        self._since = self._looked = now
        self._stopped_since: float | None = None
        self._slowest = 0.0

    def look(self, beat: Beat, stopped: bool, now: float) -> Sign:
        """Takes in what is to be seen now."""
        late = now - self._looked
        self._looked = now
        if late > LATE_SECONDS:
            self._since += late
            self._stopped_since = None
        if beat.count != self._beat.count:
            # A start ends with a sign right before the first step, so that step's length is known too.
            if beat.phase.steady and self._beat.phase in (beat.phase, Phase.STARTING):
                self._slowest = max(self._slowest, now - self._since)
            self._beat, self._since = beat, now
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        held = 0.0 if self._stopped_since is None else now - self._stopped_since
        return Sign(self._rank, self._beat, now - self._since, held, self._slowest)


def is_hung(signs: Sequence[Sign], limits: Limits, busy_elsewhere: bool = False) -> bool:
    """Whether the run stands still. `busy_elsewhere`: a rank of another machine does something that may take long."""
    if limits.hang == 0:
        return False
    if any(sign.stopped > limits.hang for sign in signs):
        return True
    return any(_overdue(sign, limits) for sign in signs) and not busy_elsewhere and not is_busy(signs, limits)


def is_busy(signs: Sequence[Sign], limits: Limits) -> bool:
    """Whether one of the ranks does something that may take long, so that others may have to wait for it."""
    return any(not sign.beat.phase.steady and not _overdue(sign, limits) for sign in signs)


def standing(sign: Sign, answer: str) -> str:
    """Where a rank stands, for people; `answer` is what it wrote when it was asked for its stacks."""
    if sign.stopped:
        lines = ["is stopped (SIGSTOP, or a debugger) and cannot say where"]
    else:
        lines = tidy(answer) or ["does not answer"]
    head = f"rank {sign.rank}: {sign.beat.phase.words}, {sign.beat.step:,} steps done, silent for {sign.silent:.1f} s"
    return "\n".join([head, *(f"  {line}" for line in lines)])


def verdict(
    signs: Sequence[Sign], answers: Mapping[int, str], elsewhere: Sequence[int], now: float
) -> Failure:
    """The failure that a hang is: of the rank that the others most likely wait for. `elsewhere` has the fewest
    steps of each other machine; one that is further behind is more likely to hold that rank."""
    rank, why = culprit(signs, {rank: innermost(answer) for rank, answer in answers.items() if answer})
    silent = max(max(sign.silent, sign.stopped) for sign in signs)
    behind = any(step < min(sign.beat.step for sign in signs) for step in elsewhere)
    return Failure(
        signs[0].rank if rank is None else rank,
        f"has hung: no progress for {silent:.1f} s; {why or 'nothing tells it from the others'}",
        now,
        follows=behind and not any(sign.stopped for sign in signs),
        lost=True,
    )


def culprit(signs: Sequence[Sign], places: Mapping[int, str]) -> tuple[int | None, str]:
    """The rank that the others most likely wait for, and why it is thought to be; None when nothing tells them apart.
    `places` says where in the code the main thread of each rank stands, as far as known."""
    stopped = [sign for sign in signs if sign.stopped]
    if stopped:
        return stopped[0].rank, "it is stopped (SIGSTOP, or a debugger)"
    if len(signs) == 1:
        return signs[0].rank, "it is the only one here"
    fewest = min(sign.beat.step for sign in signs)
    behind = [sign.rank for sign in signs if sign.beat.step == fewest]
    if len(behind) < len(signs):
        return behind[0], f"it has taken the fewest steps, {fewest:,}"
    counts = Counter(places.values())
    odd = [rank for rank, place in places.items() if counts[place] == 1]
    if len(odd) == 1 and len(places) > 2:
        return odd[0], "it stands at another place than the others"
    return None, ""


def _overdue(sign: Sign, limits: Limits) -> bool:
    if sign.beat.phase.steady:
        return sign.silent > max(limits.hang, PATIENCE * sign.slowest)
    return sign.silent > max(limits.hang, limits.starting)
