"""Ranks that no longer take the same steps: which rank the others wait for, and whether it can still come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drumline.core.text import counted
from drumline.guards.finding import Finding


@dataclass(frozen=True)
class RankStatus:
    """What a rank reports about itself: steps done, whether it is in a step or between two, for how long nothing has
    moved, and whether it may be waiting for other ranks (in a collective, in DDP, in or after backward).

    `passes` holds the forward passes of each step as [first step, number] pairs, the step in progress last.
    `comparing`: the rank waits in the guard, where ranks compare before a step.
    """

    steps: int
    phase: Literal["step", "between", "finished"]
    idle: float = 0.0
    waits: bool = False
    where: str = ""
    passes: Sequence[Sequence[int]] = ()
    comparing: bool = False

    def passes_in(self, step: int) -> int | None:
        """Forward passes of a step; None for one that is too long ago or has not begun."""
        if step > self.steps + 1:
            return None
        return next((number for first, number in reversed(self.passes) if first <= step), None)

    def __str__(self) -> str:
        if self.phase == "finished":
            return f"finished after step {self.steps}"
        doing = f"waits in step {self.steps + 1}" if self.phase == "step" else f"is past step {self.steps}"
        return doing + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Verdict:
    """A finding, and whether waiting is hopeless."""

    finding: Finding
    hopeless: bool


def judge(statuses: Mapping[int, RankStatus], hang_seconds: float) -> Verdict | None:
    """None while anything may still move. Waiting in a step is hopeless if a rank with no more steps has finished, or
    waits between steps in a different collective."""
    stuck = {rank: one for rank, one in statuses.items() if one.waits and one.idle >= hang_seconds}
    waiting = [rank for rank, one in stuck.items() if one.phase == "step"]
    if not waiting:
        return None
    reached = max(statuses[rank].steps for rank in waiting)
    since = f"{max(statuses[rank].idle for rank in waiting):.0f} s, step {reached + 1}"
    where = "; ".join(f"rank {rank} {one}" for rank, one in statuses.items())
    if len(stuck) == len(statuses):
        crossed = _crossed(statuses)
        if crossed is not None:
            return Verdict(Finding("steps", crossed[0], where, since, crossed[1]), True)
    behind = {rank: one for rank, one in statuses.items() if one.phase != "step" and one.steps <= reached}
    if not behind:
        return None
    lost = [rank for rank, one in behind.items() if one.phase == "finished" or rank in stuck]
    busy = [rank for rank in behind if rank not in lost]
    if busy:
        what = f"rank {busy[0]} keeps the others waiting"
        fix = "nothing to do if it is saving or evaluating; otherwise check that line"
        return Verdict(Finding("waiting", what, where, since, fix), False)
    what, fix = skipped_step(statuses) or (
        "ranks take unequal numbers of steps",
        "give every rank the same number of batches: DistributedSampler, drop_last=True, or a number of steps agreed "
        "on before the loop",
    )
    return Verdict(Finding("steps", what, where, since, fix), True)


def _crossed(statuses: Mapping[int, RankStatus]) -> tuple[str, str] | None:
    """Every rank waits: what happened and what to do if they wait at different points of the loop."""
    skipped = skipped_step(statuses)
    if skipped is not None:
        return skipped
    first = next((rank for rank, one in statuses.items() if one.comparing), None)
    if first is None:
        return None
    steps = statuses[first].steps
    others = [rank for rank, one in statuses.items() if not one.comparing or one.steps != steps]
    if not others:
        return None
    return (
        f"rank {first} is ready for step {steps + 1} and rank {others[0]} waits somewhere else: neither can continue",
        "call the same collectives, in the same order, on every rank",
    )


def skipped_step(statuses: Mapping[int, RankStatus], since: int = 1) -> tuple[str, str] | None:
    """What happened and what to do: the first step, from `since` on, in which a rank made more forward passes than
    another. It skipped the update."""
    for step in sorted({max(first, since) for one in statuses.values() for first, _ in one.passes}):
        counts = {rank: one.passes_in(step) for rank, one in statuses.items()}
        known = {rank: count for rank, count in counts.items() if count}
        if len(known) < 2 or len(set(known.values())) == 1:
            continue
        most = max(known, key=lambda rank: known[rank])
        least = min(known, key=lambda rank: known[rank])
        return (
            f"rank {most} skipped step {step}: {known[most]} forward passes in it, {known[least]} on rank {least}",
            "skip a batch on every rank or on none: all_reduce a flag and continue if any rank set it, or keep the "
            "step and multiply the bad loss by 0",
        )
    return None


def unequal_steps(ranks: Sequence[int], messages: Sequence[Mapping[str, Any]], agreed: int) -> Finding | None:
    """Ranks that end after different numbers of steps. They agreed after step `agreed`."""
    counts = [message["steps"] for message in messages]
    number = next((at for at in range(len(counts[0])) if len({each[at] for each in counts}) > 1), None)
    if number is None:
        return None
    statuses = {
        rank: RankStatus(message["steps"][0], "finished", passes=message["passes"])
        for rank, message in zip(ranks, messages, strict=True)
    }
    what, fix = skipped_step(statuses, agreed + 1) or (
        "ranks took unequal numbers of steps",
        "call optimizer.step() equally often on every rank: skip a batch on all ranks or on none",
    )
    where = ", ".join(
        f"rank {rank}: {counted(each[number], 'step')}" for rank, each in zip(ranks, counts, strict=True)
    )
    return Finding("steps", what, where, f"after step {agreed}", fix)
