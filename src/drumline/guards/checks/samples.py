"""Samples that two ranks are fed in the same step or in the same pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drumline.guards.finding import Finding, Found, rank_names

SHARED_FRACTION = 0.5
"""In a user's loop, two ranks may have up to this fraction of a batch in common: samples are drawn with replacement
or repeated to fill the last batch. In Drumline's own loop no sample of a global batch may repeat."""
OVERLAP_FRACTION = 0.1
"""Two ranks that have more than this fraction of a pass in common train on the same samples."""
LEAST_SAMPLES = 8
"""Passes with fewer samples than this are too short to compare."""
_SPLIT_FIX = (
    "give the loader a DistributedSampler (or split the data by rank), with the same seed on all ranks"
)


def repeated_ids(batches: Sequence[torch.Tensor], step: int) -> Finding | None:
    """A sample that comes twice in one global batch, given each rank's sample ids."""
    ids = torch.cat(list(batches))
    values, counts = ids.unique(return_counts=True)
    repeats = len(ids) - len(values)
    if not repeats:
        return None
    sample = int(values[counts > 1][0])
    ranks = rank_names([rank for rank, batch in enumerate(batches) if bool((batch == sample).any())])
    others = f" and {repeats - 1:,} others" if repeats > 1 else ""
    return Finding(
        "same-samples",
        f"sample {sample}{others} came twice in one global batch, on {ranks}",
        where=f"{ranks} of {len(batches)}, {repeats:,} of {len(ids):,} samples",
        since=f"step {step:,}",
        fix="feed each rank its own slice of the global batch: check the code that makes or changes batches",
    )


def shared_ids(ids: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """The indices of the first two ranks that share more than `SHARED_FRACTION` of a batch, and how many ids."""
    for first, mine in enumerate(ids):
        for second in range(first + 1, len(ids)):
            common = len(set(mine) & set(ids[second]))
            if mine and common > SHARED_FRACTION * max(len(set(mine)), len(set(ids[second]))):
                return first, second, common
    return None


def equal_batches(batches: Sequence[int | None]) -> list[int]:
    """The indices of the ranks whose batch another rank has too, given each rank's batch fingerprint."""
    return [
        index
        for index, batch in enumerate(batches)
        if batch is not None and any(other == batch for i, other in enumerate(batches) if i != index)
    ]


def same_ids(ranks: Sequence[int], messages: Sequence[Mapping[str, Any]], step: int) -> Found | None:
    """Ranks that report the same sample ids for one step."""
    common = shared_ids([message["ids"] for message in messages])
    if common is None:
        return None
    first, second, count = common
    where = f"ranks {ranks[first]} and {ranks[second]} share {count} sample ids of one step"
    return Finding(
        "same-samples", "two ranks are fed the same samples", where, f"step {step}", _SPLIT_FIX
    ), True


def same_inputs(
    ranks: Sequence[int], messages: Sequence[Mapping[str, Any]], both: Sequence[int], step: int
) -> Found | None:
    """Ranks, by index in `both`, that got equal inputs in two comparisons in a row."""
    if not both:
        return None
    where = f"ranks {', '.join(str(ranks[index]) for index in both)} got equal inputs twice in a row"
    since = f"step {max(1, step - 1)}"
    finding = Finding("same-samples", "ranks are fed the same samples", where, since, _SPLIT_FIX)
    # The same batch in every step is an attempt to overfit it. Equal inputs with different gradients at the output
    # may have different labels.
    repeats = any(messages[index]["same"] for index in both)
    equal = len({tuple(messages[index]["arrived"]) for index in both}) < len(both)
    drawn = [messages[index]["data"] for index in both]
    known = all(one is not None and one["ids"] for one in drawn)
    read = known and len({tuple(one["ids"]) for one in drawn}) < len(both)
    return finding, not repeats and (equal or read)


def overlap(ranks: Sequence[int], summaries: Sequence[Mapping[str, Any] | None], step: int) -> Finding | None:
    """Whether two ranks read the same samples of the same data set, or a sampler does not match the ranks. A summary
    describes the loader that a rank trained on last (`script/loaders.py`)."""
    known = [(rank, one) for rank, one in zip(ranks, summaries, strict=True) if one is not None]
    for rank, one in known:
        if one["replicas"] is not None and one["replicas"] != len(ranks) and len(known) == len(ranks):
            return Finding(
                "same-samples",
                f"the DistributedSampler is for {one['replicas']} replicas and {len(ranks)} ranks train: samples "
                + ("are never read" if one["replicas"] > len(ranks) else "are read by several ranks"),
                f"rank {rank}",
                f"step {step}",
                "leave num_replicas and rank of the DistributedSampler to the process group",
            )
    for index, (first, mine) in enumerate(known):
        for second, theirs in known[index + 1 :]:
            if mine["data"] != theirs["data"] or mine["replaces"] or theirs["replaces"]:
                continue
            found = _overlap_of_two(f"ranks {first} and {second}", mine, theirs, step)
            if found is not None:
                return found
    return None


def _overlap_of_two(
    pair: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], step: int
) -> Finding | None:
    if mine["shuffle"] != theirs["shuffle"] and mine["shuffle"] and theirs["shuffle"]:
        return Finding(
            "same-samples",
            "ranks shuffle differently, so their slices overlap and some samples are never read",
            f"{pair}: seed and epoch of the DistributedSampler are {mine['shuffle']} and {theirs['shuffle']}",
            f"step {step}",
            "give every rank the same seed and call set_epoch with the same number",
        )
    both = (mine, theirs)
    whole = all(one["size"] and one["planned"] and one["planned"] > 0.75 * one["size"] >= 4 for one in both)
    every = max(mine["one_of"], theirs["one_of"])
    common = {one for one in set(mine["seen"]) & set(theirs["seen"]) if is_sampled(one, every)}
    least = min(sum(is_sampled(one, every) for one in side["seen"]) for side in both)
    if whole:
        what, where = "every rank reads the whole data set", f"{pair} read {mine['planned']} samples a pass"
    elif len(common) >= LEAST_SAMPLES and len(common) > OVERLAP_FRACTION * least:
        what = "two ranks train on the same samples"
        where = f"{pair} share {100 * len(common) / least:.0f} % of a pass"
    else:
        return None
    return Finding(
        "same-samples", what, f"{where} ({mine['size']} in the data set)", f"step {step}", _SPLIT_FIX
    )


def is_sampled(number: int, every: int) -> bool:
    """Whether a sample id is one of the one in `every` that are remembered: the same ids on every rank."""
    return ((number * 0x9E3779B97F4A7C15 >> 16) & 0xFFFFFFFF) % every == 0
