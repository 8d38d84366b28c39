"""How many samples an evaluation counted, over all ranks, against how many there are (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.guards.finding import Finding


def miscounted(ranks: Sequence[int], counts: Sequence[int | None], of: int, since: str) -> Finding | None:
    """None when each sample was counted once, or when every rank counted the whole set."""
    known = [count for count in counts if count is not None]
    told = ", ".join(
        f"rank {rank}: {'nothing said' if count is None else count}"
        for rank, count in zip(ranks, counts, strict=True)
    )
    silent = [rank for rank, count in zip(ranks, counts, strict=True) if count is None]
    total = sum(known)
    if silent:
        return Finding(
            "evaluation",
            f"only {len(known)} of {len(counts)} ranks said how many samples they evaluated",
            where=told,
            since=since,
            fix="call watch.evaluated(count, of=len(dataset)) on every rank, or on each with the whole set",
        )
    if total == of or all(count == of for count in known):
        return None
    same = len(set(known)) == 1 and len(known) > 1 and 4 * known[0] > 3 * of
    if same:  # too large for a share: each rank passed a total
        total = known[0]
    off = abs(total - of)
    samples = f"{off} sample{'s' if off > 1 else ''}"
    if total > of:
        what = f"the evaluation counted {total} samples of {of}: {samples} twice"
        fix = (
            "DistributedSampler repeats samples to give every rank as many: leave the repeated ones out of the "
            "count, or deal them by range(rank, len(dataset), world_size)"
        )
    else:
        what = f"the evaluation counted {total} samples of {of}: {samples} left out"
        fix = (
            "set drop_last=False for the evaluation's loader and sampler, and read every batch on every rank"
        )
    if same:
        fix += (
            ". All ranks passed the same count, a total: pass each rank's own count, from before all_reduce"
        )
    return Finding("evaluation", what, where=told, since=since, fix=fix)
