"""Decides whether the workers hang and which rank the others wait for. Pure.

Promises: ranks that wait for one whose work may take long (compiling, saving) do not count as hung; a run with slow
steps gets time in proportion; time in which the launcher itself was stopped does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drumline.core.heartbeat import Beat, Phase
from drumline.launch.failure import Failure
from drumline.launch.stacks import format_stacks, innermost

PATIENCE = 3.0
"""A step may take this many times as long as the slowest so far."""

LATE_SECONDS = 1.0
"""If two checks of the workers are further apart than this, the launcher itself was stopped."""


@dataclass(frozen=True)
class Sign:
    """The state of one rank: its last beat and how many seconds ago it came, how long the process has been stopped
    (0: it is running), and the longest time between two beats of a steady phase."""

    rank: int
    beat: Beat
    silent: float
    stopped: float = 0.0
    slowest: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Seconds without a beat: in phases with steady beats (0: no limit), and in phases where one operation may take
    long."""

    hang: float
    starting: float


class Pulse:
    """One worker's beats over time."""

    def __init__(self, rank: int, now: float) -> None:
        self._rank, self._beat = rank, Beat()
        self._since = self._checked = now
        self._stopped_since: float | None = None
        self._slowest = 0.0

    def update(self, beat: Beat, stopped: bool, now: float) -> Sign:
        """Records the latest beat and whether the process is stopped."""
        late = now - self._checked
        self._checked = now
        if late > LATE_SECONDS:
            self._since += late
            self._stopped_since = None
        if beat.count != self._beat.count:
            # The starting phase ends with a beat right before the first step, so that step's length is known too.
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
    """Whether the run hangs. `busy_elsewhere`: a rank of another machine does something that may take long."""
    if limits.hang == 0:
        return False
    if any(sign.stopped > limits.hang for sign in signs):
        return True
    return any(_overdue(sign, limits) for sign in signs) and not busy_elsewhere and not is_busy(signs, limits)


def is_busy(signs: Sequence[Sign], limits: Limits) -> bool:
    """Whether one of the ranks does something that may take long, so that others may wait for it."""
    return any(not sign.beat.phase.steady and not _overdue(sign, limits) for sign in signs)


def describe(sign: Sign, answer: str) -> str:
    """The state of a rank for the user; `answer` holds its stacks as faulthandler wrote them."""
    if sign.stopped:
        lines = ["stopped by SIGSTOP or a debugger, so its stack cannot be read"]
    else:
        lines = format_stacks(answer) or ["no answer to the request for its stack"]
    head = f"rank {sign.rank}: {sign.beat.phase.label}, {sign.beat.step:,} steps done, silent for {sign.silent:.1f} s"
    return "\n".join([head, *(f"  {line}" for line in lines)])


def verdict(
    signs: Sequence[Sign], answers: Mapping[int, str], elsewhere: Sequence[int], now: float
) -> Failure:
    """The hang as a failure of the rank that the others most likely wait for. `elsewhere` has the fewest steps of
    each other machine; a machine further behind is more likely to have that rank."""
    rank, why = blocking_rank(signs, {rank: innermost(answer) for rank, answer in answers.items() if answer})
    silent = max(max(sign.silent, sign.stopped) for sign in signs)
    behind = any(step < min(sign.beat.step for sign in signs) for step in elsewhere)
    return Failure(
        signs[0].rank if rank is None else rank,
        f"hung: no progress for {silent:.1f} s; {why or 'all ranks look the same'}",
        now,
        follows=behind and not any(sign.stopped for sign in signs),
        lost=True,
    )


def blocking_rank(signs: Sequence[Sign], frames: Mapping[int, str]) -> tuple[int | None, str]:
    """The rank that the others most likely wait for, and the reason; None if all look the same. `frames` has the
    innermost frame of each rank's main thread, as far as known."""
    stopped = [sign for sign in signs if sign.stopped]
    if stopped:
        return stopped[0].rank, "it is stopped by SIGSTOP or a debugger"
    if len(signs) == 1:
        return signs[0].rank, "it is the only rank on this machine"
    fewest = min(sign.beat.step for sign in signs)
    behind = [sign.rank for sign in signs if sign.beat.step == fewest]
    if len(behind) < len(signs):
        return behind[0], f"it has taken the fewest steps, {fewest:,}"
    counts = Counter(frames.values())
    odd = [rank for rank, frame in frames.items() if counts[frame] == 1]
    if len(odd) == 1 and len(frames) > 2:
        return odd[0], "its main thread is at a different line from the others"
    return None, ""


def _overdue(sign: Sign, limits: Limits) -> bool:
    if sign.beat.phase.steady:
        return sign.silent > max(limits.hang, PATIENCE * sign.slowest)
    return sign.silent > max(limits.hang, limits.starting)
