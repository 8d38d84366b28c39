"""Rules about what changes while a run trains: a cold first epoch, decaying speed, growing memory and descriptors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from drumline.core.text import percent, rate
from drumline.diagnosis.evidence import Interval, merged
from drumline.diagnosis.figures import Figures, ms
from drumline.diagnosis.slowdown import Slowdown

COLD_WORTH, COLD_TIMES = 0.05, 1.5
"""A cold start is reported if it cost this fraction of all the time, and was this many times slower."""
DECAYED, DECAYED_IF_BUSY = 1.15, 2.0
"""A step at the end takes this many times what it took at the beginning. Programs that share cores and caches also
make a step longer while it runs."""
LEAST_INTERVALS, LEAST_STEPS = 6, 80
"""Intervals, and steps in them, that show a trend."""
SHORT = 0.25
"""Intervals with less than this fraction of the usual steps say little."""
MEMORY_GROWTH_MB, MEMORY_GROWTH = 64.0, 0.1
"""Growth after the first interval, absolute and relative, that is no warming up."""
DESCRIPTOR_GROWTH = 40
STEADY_GROWTH = 0.5
"""The second half of the intervals must grow by this fraction of what the first half grew by: caches level off."""
CAUSE = 0.3
"""Fraction of the lost time that a part must explain to be named."""
CLOCK_FELL = 0.05


def cold_start(figures: Figures) -> Iterator[Slowdown]:
    """The first pass over the data was slower because its files were not in memory yet."""
    series = _usable(figures.evidence.intervals)
    first = [each for each in series if each.epoch <= 1.0 + 1e-9]
    rest = [each for each in series if each.epoch > 1.0 + 1e-9]
    if not first or not rest:
        return
    cold, warm = merged(first), merged(rest)
    excess = max(cold.get("step_ms")) - max(warm.get("step_ms"))
    waited = cold.mean("data_ms") - warm.mean("data_ms")
    read = _reading(cold) - _reading(warm)
    if excess <= 0 or waited < 0.5 * excess or read < CAUSE * waited:
        return
    total = sum(each.seconds for each in series)
    times, lost_s = max(cold.get("step_ms")) / max(warm.get("step_ms")), excess * cold.steps / 1e3
    if times < COLD_TIMES or lost_s < COLD_WORTH * total:
        return
    text = (
        f"epoch 1 was {times:.1f} times slower than later epochs: each step waited {ms(waited)} longer for data that "
        "was not in memory yet"
    )
    disk = cold.mean("disk_mb_s")
    text += f" ({disk:,.0f} MB/s from the disk)" if disk >= 1 else ""
    fix = "pack the data into a few large files (`drumline pack DATA OUT`), or use a local disk"
    yield figures.slowdown("cold-start", text, lost_s / total * figures.wall_ms, fix=fix)


def decay(figures: Figures) -> Iterator[Slowdown]:
    """Steps become slower."""
    series = _usable(figures.steady)
    if len(series) < LEAST_INTERVALS or sum(each.steps for each in series) < LEAST_STEPS:
        return
    # Without waiting for a core, which `machine-busy` reports.
    times = [max(each.get("step_ms")) * (1 - min(1.0, max(each.get("loop_queued")))) for each in series]
    third = len(series) // 3
    early, late = median(times[:third]), median(times[-third:])
    # Every late interval is slower than every early one: chance does not do that often.
    if late < (DECAYED_IF_BUSY if figures.machine_is_busy else DECAYED) * early or min(times[-third:]) <= max(
        times[:third]
    ):
        return
    before, after = merged(series[:third]), merged(series[-third:])
    began = next(each for each, taken in zip(series, times, strict=True) if taken > (early + late) / 2)
    text = (
        f"the speed fell by {percent(1 - early / late)} from epoch {before.epoch:.3g} to {after.epoch:.3g}, "
        f"most of it by epoch {began.epoch:.3g} ({rate(before.images_per_s, 'img')} to "
        f"{rate(after.images_per_s, 'img')}): {_cause(before, after)}"
    )
    lost = sum(max(0.0, taken - early) * each.steps for each, taken in zip(series, times, strict=True))
    yield figures.slowdown(
        "decay",
        text,
        lost / sum(each.steps for each in series),
        fix="remove the cause; resume the run to see whether a restart restores the speed",
    )


def growing_memory(figures: Figures) -> Iterator[Slowdown]:
    grown = _growth(figures, "memory_mb")
    if grown is None:
        return
    rank, first, last = grown
    if last - first < max(MEMORY_GROWTH_MB, MEMORY_GROWTH * first):
        return
    series = _usable(figures.steady)
    per_step = (last - first) / (series[-1].step - series[0].step)
    total, free = figures.fact("machine_memory_mb"), series[-1].mean("free_memory_mb")
    text = f"memory grew steadily from {first:,.0f} to {last:,.0f} MB{_of(figures, rank)}, {per_step:.2g} MB a step"
    if total and free:
        hours = free / per_step * figures.step_ms / 3.6e6
        when = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.0f} minutes"
        text += f": the machine's {total / 1024:,.0f} GB will be full in about {when}"
    fix = "look for a list or a cache that keeps tensors, such as losses without .item() or .detach()"
    yield figures.slowdown("memory", text, 0.0, fix=fix)


def growing_descriptors(figures: Figures) -> Iterator[Slowdown]:
    grown = _growth(figures, "descriptors")
    if grown is None or grown[2] - grown[1] < DESCRIPTOR_GROWTH:
        return
    rank, first, last = grown
    text = f"open files grew steadily from {first:,.0f} to {last:,.0f}{_of(figures, rank)}"
    yield figures.slowdown(
        "descriptors", text, 0.0, fix="close what your own code opens: files, sockets, pools of processes"
    )


RULES = (cold_start, decay, growing_memory, growing_descriptors)


def _usable(intervals: Sequence[Interval]) -> list[Interval]:
    """The intervals that are long enough to be meaningful."""
    usual = median(each.steps for each in intervals)
    return [each for each in intervals if each.steps >= SHORT * usual]


def _reading(interval: Interval) -> float:
    """Milliseconds of a step that the feed or its workers spend on files."""
    return max(interval.mean("feed_read_ms"), interval.mean("workers_read_ms"))


def _growth(figures: Figures, name: str) -> tuple[int, float, float] | None:
    """The rank on which a value grew most, with its first and last value; None if it did not grow to the end."""
    series = [each for each in _usable(figures.steady) if name in each.values]
    if len(series) < LEAST_INTERVALS:
        return None
    rank = max(range(figures.ranks), key=lambda each: series[-1].get(name)[each] - series[0].get(name)[each])
    values = [each.get(name)[rank] for each in series]
    middle = len(values) // 2
    first_half, second_half = values[middle] - values[0], values[-1] - values[middle]
    rising = sum(later > earlier for earlier, later in pairwise(values))
    if second_half < STEADY_GROWTH * first_half or rising < 0.7 * (len(values) - 1):
        return None
    return rank, values[0], values[-1]


def _of(figures: Figures, rank: int) -> str:
    return f" on rank {rank}" if figures.ranks > 1 else ""


def _cause(before: Interval, after: Interval) -> str:
    """The part that took most of the added time, and what changed beside it."""
    added = max(after.get("step_ms")) - max(before.get("step_ms"))
    parts = {
        name: after.mean(name) - before.mean(name)
        for name in {**before.values, **after.values}
        if name.startswith("host_") and name not in ("host_evaluation_ms", "host_checkpoint_ms")
    }
    causes = []
    device = after.mean("compute_ms") - before.mean("compute_ms")
    if "gpu" in after.facts and device >= CAUSE * added:
        causes.append(f"the GPU computes {ms(device)} longer")
    elif parts and max(parts.values()) >= CAUSE * added:
        part = max(parts, key=lambda name: parts[name])
        causes.append(f"{part.removeprefix('host_').removesuffix('_ms')} takes {ms(parts[part])} longer")
    fell = before.mean("gpu_clock") - after.mean("gpu_clock")
    if fell > CLOCK_FELL:
        hot = ", because it is hot" if after.mean("gpu_hot") > before.mean("gpu_hot") else ""
        causes.append(f"its clock fell by {percent(fell)} of its maximum{hot}")
    if after.mean("disk_mb_s") > 1.5 * before.mean("disk_mb_s") + 1:
        causes.append(
            f"reads from the disk rose from {before.mean('disk_mb_s'):,.0f} to {after.mean('disk_mb_s'):,.0f} MB/s, "
            "so the page cache no longer holds the data"
        )
    for name, what, least in (("memory_mb", "MB of memory", 64), ("descriptors", "open files", 20)):
        if after.mean(name) - before.mean(name) > least:
            causes.append(f"{after.mean(name) - before.mean(name):,.0f} more {what}")
    if after.mean("loop_queued") > before.mean("loop_queued") + 0.1:
        causes.append("the loop waits longer for a core, which other programs use")
    return "; ".join(causes) or "no single cause"
