"""Rules about several processes: one that is slower than the others, and waiting for gradients."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from drumline.core.account import DATA, EXCHANGE
from drumline.core.text import percent
from drumline.diagnosis.figures import HOST_PARTS, Figures, ms
from drumline.diagnosis.rules.host import own_line
from drumline.diagnosis.slowdown import Slowdown

SLOWER = 0.12
"""A rank whose own work takes this much longer than that of the others is slow."""
EXCHANGE_WORTH = 0.12
"""Fraction of a step that even the slowest rank waits for the exchange."""
LARGER = 2
"""The advised batch, in batches of now."""


def slow_rank(figures: Figures) -> Iterator[Slowdown]:
    """Compares what each rank does before it waits for the others: the exchange makes all steps equally long."""
    if figures.ranks < 2:
        return
    own = [_own_work(figures, rank) for rank in range(figures.ranks)]
    slow = max(range(figures.ranks), key=lambda rank: own[rank])
    usual = median([each for rank, each in enumerate(own) if rank != slow])
    excess = own[slow] - usual
    worth = max(SLOWER, max(figures.get("loop_queued"))) if figures.machine_is_busy else SLOWER
    if excess < worth * figures.step_ms:
        return
    parts = {part: _excess(figures, part, slow) for part in HOST_PARTS if part != EXCHANGE}
    part = max(parts, key=lambda name: parts[name])
    text = (
        f"rank {slow} {_slower(own[slow], usual)} the others, which wait for it: {ms(own[slow])} of its own work per "
        f"step, against {ms(usual)}. The extra time is in {part} ({ms(parts[part])} of {ms(excess)})"
    )
    if where := own_line(figures, slow):
        text += f", at {where}"
    if part == DATA:
        fix = "check the disk and the cores of its machine"
    elif slow == 0:
        fix = "check what only rank 0 does, such as logging, printing or saving"
    elif where:
        fix = "check what only this rank does there"
    else:
        fix = "look for other programs on its machine or GPU, and for lower clocks"
    yield figures.slowdown("rank-0" if slow == 0 else "slow-rank", text, excess, fix=fix)


def exposed_exchange(figures: Figures) -> Iterator[Slowdown]:
    """Even the slowest rank waits: for the part of the exchange that does not overlap with backward."""
    if figures.ranks < 2:
        return
    on_device = figures.on_gpu and figures.known(f"device_{EXCHANGE}_ms")
    if figures.on_gpu and not on_device:
        return
    exposed = min(figures.get(f"device_{EXCHANGE}_ms" if on_device else f"host_{EXCHANGE}_ms"))
    # While one rank waits for a core, the others wait for it.
    queued = 0.0 if on_device else min(1.0, figures.mean("loop_queued"))
    exposed = exposed - queued * figures.wall_ms if figures.machine_is_busy else exposed * (1 - queued)
    if exposed < EXCHANGE_WORTH * figures.step_ms:
        return
    text = (
        f"exchanging gradients adds {ms(exposed)} after backward, {percent(exposed / figures.step_ms)} of each step, "
        "even on the rank that waits least"
    )
    yield figures.slowdown(
        "exchange",
        text,
        exposed * (1 - 1 / LARGER),
        figures.larger_batch(LARGER),
        "use a larger batch, which exchanges the same amount for more images, and adapt the learning rate; or use "
        "fewer processes",
    )


RULES = (slow_rank, exposed_exchange)


def _slower(time_ms: float, usual: float) -> str:
    if usual < 0.1:
        return "takes far longer than"
    if time_ms < 2 * usual:
        return f"is {percent(time_ms / usual - 1)} slower than"
    return f"takes {time_ms / usual:.{0 if time_ms >= 10 * usual else 1}f} times as long as"


def _own_work(figures: Figures, rank: int) -> float:
    """A step of this rank alone: without waiting for the others, or for a core."""
    return max(0.0, figures.busy(rank) - figures.get("loop_queued")[rank] * figures.whole.walls[rank])


def _excess(figures: Figures, part: str, slow: int) -> float:
    """How much longer a part takes on the slow rank than on the others."""
    values = figures.get(f"host_{part}_ms")
    return values[slow] - median([value for rank, value in enumerate(values) if rank != slow])
