"""Checks of the data: samples that ranks share, labels and inputs that differ between them, evaluation counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from drumline.core.text import counted
from drumline.guards.checks.drift import is_plain
from drumline.guards.finding import Finding, Reports, rank_names

SHARED_FRACTION = 0.5
"""In a user's loop, two ranks may have up to this fraction of a batch in common: samples are drawn with replacement
or repeated to fill the last batch. In Drumline's own loop no sample of a global batch may repeat."""
OVERLAP_FRACTION = 0.1
"""Two ranks that have more than this fraction of a pass in common train on the same samples."""
LEAST_SAMPLES = 8
"""Passes with fewer samples than this are too short to compare."""
INPUT_SCALE = 10.0
"""Inputs whose standard deviations differ by this factor, or whose means lie this many deviations apart, were
prepared differently. Ranks with different data (classes, sites, noise) stay far below it."""
INPUT_STEPS = 3
"""Steps in which inputs must be on different scales before they are reported."""
_MOST_INPUTS = 4
_TOTAL_FRACTION = 0.75
"""A count above this fraction of the data set, equal on all ranks, is a total and not one rank's slice."""
_SPLIT_FIX = (
    "give the loader a DistributedSampler (or split the data by rank), with the same seed on all ranks"
)


def repeated_ids(
    batches: Sequence[torch.Tensor], step: int, planned: torch.Tensor | None = None
) -> Finding | None:
    """A sample that occurs twice in one global batch, given each rank's sample ids. `planned`: the ids of the batch,
    if class-balanced sampling may repeat some; then a sample that occurs more often than planned."""
    ids = torch.cat(list(batches))
    values, counts = ids.unique(return_counts=True)
    allowed = torch.ones_like(counts)
    if planned is not None and len(planned):
        drawn, times = planned.unique(return_counts=True)
        at = torch.searchsorted(drawn, values).clamp_max(len(drawn) - 1)
        allowed = torch.where(drawn[at] == values, times[at], 1)
    extra = (counts - allowed).clamp_min(0)
    repeats = int(extra.sum())
    if not repeats:
        return None
    sample = int(values[extra > 0][0])
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


def same_samples(reports: Reports) -> Finding | None:
    """Ranks that report the same sample ids for one step, or got equal inputs in two comparisons in a row."""
    common = shared_ids(reports.of("ids"))
    if common is None:
        return _same_inputs(reports)
    first, second, count = common
    return Finding(
        "same-samples",
        "two ranks are fed the same samples",
        f"ranks {reports.ranks[first]} and {reports.ranks[second]} share {count} sample ids of one step",
        reports.since,
        _SPLIT_FIX,
        certain=True,
    )


def _same_inputs(reports: Reports) -> Finding | None:
    """Each rank reports the fingerprints of its batch at the last comparison and now."""
    before, now = zip(*reports.of("batches"), strict=True)
    both = [index for index in equal_batches(now) if index in equal_batches(before)]
    if not both:
        return None
    # The same batch in every step is an attempt to overfit it. Equal inputs with different gradients at the output
    # may have different labels.
    repeats = any(before[index] == now[index] for index in both)
    arrived, drawn = reports.of("arrived"), reports.of("data")
    equal = len({tuple(arrived[index]) for index in both}) < len(both)
    ids = [drawn[index]["ids"] if drawn[index] is not None else [] for index in both]
    read = all(ids) and len({tuple(one) for one in ids}) < len(both)
    return Finding(
        "same-samples",
        "ranks are fed the same samples",
        f"ranks {', '.join(str(reports.ranks[index]) for index in both)} got equal inputs twice in a row",
        f"step {max(1, reports.step - 1):,}",
        _SPLIT_FIX,
        certain=not repeats and (equal or read),
    )


def overlap(reports: Reports) -> Finding | None:
    """Whether two ranks read the same samples of the same data set, or a sampler does not match the ranks. A rank
    reports the loader that it trained on last (`script/loaders.py`)."""
    known, size = reports.known("data"), len(reports.ranks)
    for rank, one in known:
        if one["replicas"] is not None and one["replicas"] != size and len(known) == size:
            return Finding(
                "same-samples",
                f"the DistributedSampler is for {one['replicas']} replicas and {size} ranks train: samples "
                + ("are never read" if one["replicas"] > size else "are read by several ranks"),
                f"rank {rank}",
                reports.since,
                "leave num_replicas and rank of the DistributedSampler to the process group",
            )
    for (first, mine), (second, theirs) in combinations(known, 2):
        if mine["data"] != theirs["data"] or mine["replaces"] or theirs["replaces"]:
            continue
        found = _overlap_of_two(f"ranks {first} and {second}", mine, theirs, reports.since)
        if found is not None:
            return found
    return None


def _overlap_of_two(
    pair: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], since: str
) -> Finding | None:
    if mine["shuffle"] != theirs["shuffle"] and mine["shuffle"] and theirs["shuffle"]:
        return Finding(
            "same-samples",
            "ranks shuffle differently, so their slices overlap and some samples are never read",
            f"{pair}: seed and epoch of the DistributedSampler are {mine['shuffle']} and {theirs['shuffle']}",
            since,
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
    return Finding("same-samples", what, f"{where} ({mine['size']} in the data set)", since, _SPLIT_FIX)


def is_sampled(number: int, every: int) -> bool:
    """Whether a sample id is one of the one in `every` that are remembered: the same ids on every rank."""
    return ((number * 0x9E3779B97F4A7C15 >> 16) & 0xFFFFFFFF) % every == 0


def different_label_columns(reports: Reports) -> Finding | None:
    """Data sets of the same type and length, with the same inputs on two ranks and different labels."""
    for (first, one), (second, other) in combinations(reports.known("data"), 2):
        mine, theirs = one["data"], other["data"]
        if mine["type"] != theirs["type"] or mine.keys() != theirs.keys():
            continue
        differ = [name for name in mine if name.endswith("[labels]") and mine[name] != theirs[name]]
        same = [name for name in mine if name.endswith("[]") and mine[name] == theirs[name]]
        if differ and same:
            return Finding(
                "labels",
                f"the data sets of ranks {first} and {second} have the same "
                f"'{same[0].removesuffix('[]')}' and a different '{differ[0].removesuffix('[labels]')}'",
                f"ranks {first} and {second}",
                reports.since,
                "load inputs and labels in the same order on every rank: sort file names, shuffle with the sampler",
            )
    return None


def different_labels(reports: Reports) -> Finding | None:
    """A label of the loader that becomes one class in the loss of a rank and a different class on another rank."""
    for (rank, mine), (other, theirs) in combinations(reports.known("classes"), 2):
        for label in mine.keys() & theirs.keys():
            if mine[label] != theirs[label]:
                return Finding(
                    "labels",
                    f"label {label} of the loader is class {mine[label]} in the loss of rank {rank} and class "
                    f"{theirs[label]} on rank {other}",
                    f"ranks {rank} and {other}",
                    reports.since,
                    "number the classes the same way on every rank: sort their names",
                )
    return None


def input_scales(tensors: Iterable[torch.Tensor]) -> list[tuple[float, float]]:
    """Mean and standard deviation of the first floating-point inputs of a batch with more than one dimension."""
    found = []
    for tensor in tensors:
        if tensor.dim() > 1 and tensor.is_floating_point() and is_plain(tensor) and tensor.numel() > 1:
            deviation, mean = torch.std_mean(tensor.detach().float())
            found.append((float(mean), float(deviation)))
    return found[:_MOST_INPUTS]


def different_scales(scales: Sequence[Sequence[Sequence[float]]]) -> tuple[int, int] | None:
    """The indices of the first two ranks whose inputs are on different scales."""
    for index, other in enumerate(scales):
        if len(other) != len(scales[0]):
            return None
        for (mean, deviation), (other_mean, other_deviation) in zip(scales[0], other, strict=True):
            small, large = sorted((deviation, other_deviation))
            if small > 0 and (large > INPUT_SCALE * small or abs(mean - other_mean) > INPUT_SCALE * large):
                return 0, index
    return None


def different_inputs(reports: Reports) -> Finding | None:
    """Two ranks whose inputs are on different scales in each of the first steps, given the scales in all of them."""
    scales = reports.of("inputs")
    if any(len(each) != INPUT_STEPS for each in scales):
        return None
    pairs = [different_scales(at_one_step) for at_one_step in zip(*scales, strict=True)]
    if None in pairs:
        return None
    pair = pairs[-1]
    assert pair is not None
    shown = [", ".join(f"mean {mean:.3g} std {std:.3g}" for mean, std in scales[index][-1]) for index in pair]
    first, second = (reports.ranks[index] for index in pair)
    return Finding(
        "inputs",
        f"the inputs of ranks {first} and {second} are on different scales: {shown[0]} and {shown[1]}",
        f"ranks {first} and {second}, in each of {INPUT_STEPS} steps",
        "step 1",
        "normalise the inputs in the same way on every rank; ignore this if ranks have different kinds of data",
    )


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
            certain=True,
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
    return Finding("evaluation", what, where, since, fix, certain=True)
