"""How many samples an evaluation counted over all ranks, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.text import counted
from drumline.guards.finding import Finding

_TOTAL_FRACTION = 0.75
"""A count above this fraction of the data set, equal on all ranks, is a total and not one rank's slice."""


def miscounted(ranks: Sequence[int], counts: Sequence[int | None], of: int, since: str) -> Finding | None:
    """None if each sample was counted once, or if every rank counted the whole set."""
    where = ", ".join(
        f"rank {rank}: {'no count' if count is None else count}"
        for rank, count in zip(ranks, counts, strict=True)
    )
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return Finding(
            "evaluation",
            f"only {len(known)} of {len(counts)} ranks reported how many samples they evaluated",
            where,
            since,
            "call watch.evaluated(count, of=len(dataset)) on every rank",
        )
    total = sum(known)
    if total == of or all(count == of for count in known):
        return None
    totals = len(set(known)) == 1 and len(known) > 1 and known[0] > _TOTAL_FRACTION * of
    total = known[0] if totals else total
    samples = counted(abs(total - of), "sample")
    if total > of:
        what = f"the evaluation counted {total} samples of {of}: {samples} twice"
        fix = (
            "DistributedSampler repeats samples to give every rank the same number: leave the repeated ones out of "
            "the count, or split by range(rank, len(dataset), world_size)"
        )
    else:
        what = f"the evaluation counted {total} samples of {of}: {samples} left out"
        fix = (
            "set drop_last=False for the evaluation's loader and sampler, and read every batch on every rank"
        )
    if totals:
        fix += (
            ". All ranks passed the same count, a total: pass each rank's own count, from before all_reduce"
        )
    return Finding("evaluation", what, where, since, fix)
