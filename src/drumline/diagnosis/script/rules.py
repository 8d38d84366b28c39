"""Rules for a user's own loop: its DataLoader, and its lines of code outside the model.

Promises: pure. Writes a change as it is typed in the script. Recommends a number of workers only if there are cores
for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from drumline.core.account import COMPUTE, DATA, OTHER
from drumline.core.text import counted, percent
from drumline.diagnosis.figures import Figures, ms
from drumline.diagnosis.script.lines import line_text
from drumline.diagnosis.slowdown import Slowdown

LINE = "host-line"
"""The code of a slow line of the script."""
WAIT_WORTH = 0.1
"""Fraction of a step spent waiting for data, above which it is reported."""
INLINE_WORTH = 0.2
"""The same if the loop's own process makes the batches, which always takes some time."""
START_WORTH = 0.05
LINE_WORTH = 0.1
"""Fraction of a step that one line of the script takes, outside the model."""
TAKING = 0.6
"""Fraction of the wait for which a batch was ready, above which the workers are not the limit."""
IDLE_WORKER = 0.4
"""Cores that a worker uses, below which it mostly waits."""
ON_CORE = 0.1
"""Cores that a worker uses, below which they do not limit the number of workers."""
SPARE_CORE = 0.5
"""The fraction of a core that need not be free for another worker, because workers share cores."""
PER_CORE = 4
"""The most workers to recommend for each core of a rank, even if they only wait."""
TAKE_OVER_MS = 0.5
"""The least time in which the loop receives a batch from a worker."""


def waiting_for_data(figures: Figures) -> Iterator[Slowdown]:
    """Steps wait for batches: which process limits them, and how many workers would do."""
    wait = figures.mean("host_data_ms")
    if figures.on_gpu:
        wait = min(wait, figures.mean("data_ms") - figures.mean("copy_ms"))
    wait -= figures.mean("loader_start_ms")
    workers = figures.fact("workers")
    worth = WAIT_WORTH if workers else INLINE_WORTH
    if figures.machine_is_busy:  # the loader waits for a core, as the loop does
        worth = max(worth, figures.mean("loop_queued"))
    if wait < worth * figures.step_ms:
        return
    head = f"{figures.share(wait)} is spent waiting for data: the model could process {figures.speed_without(wait)}"
    if workers is None:
        yield figures.slowdown(
            "data", head, wait, fix="prepare batches ahead of time, in other processes or threads"
        )
    elif not workers:
        yield _inline(figures, head, wait)
    elif figures.mean("taking_ms") > TAKING * wait:
        fix = "return smaller or fewer tensors from the dataset (uint8 images, converted on the device)"
        text = f"{head}. Batches are ready in time, but receiving them from the workers is slow"
        yield figures.slowdown("hand-over", text, wait, fix=fix)
    else:
        yield _saturated(figures, head, wait, workers)


def loader_start(figures: Figures) -> Iterator[Slowdown]:
    """Workers that are restarted for each pass over the data."""
    taken = figures.mean("loader_start_ms")
    if taken < START_WORTH * figures.wall_ms or not figures.fact("workers"):
        return
    text = (
        f"{percent(taken / figures.wall_ms)} of the time is spent restarting the loader's "
        f"{counted(figures.fact('workers'), 'worker')} for each pass over the data"
    )
    yield figures.slowdown("loader-start", text, 0.9 * taken, "DataLoader(persistent_workers=True)")


def slow_line(figures: Figures) -> Iterator[Slowdown]:
    """A line of the script that the loop stays in, outside the loader and the model."""
    lines = _lines(figures, (COMPUTE, OTHER))
    if not lines:
        return
    slowest = max(lines, key=lambda each: each.milliseconds)
    least = LINE_WORTH * figures.step_ms
    if slowest.milliseconds < least:
        return
    cost = slowest.milliseconds
    others = [each.milliseconds for each in lines if (each.file, each.line) == (slowest.file, slowest.line)]
    place = line_text(slowest.file, slowest.line)
    where = ""
    if figures.ranks > 1:
        same = [each for each in others if each >= 0.5 * cost]
        where = " on every rank" if len(same) == figures.ranks else f" on rank {slowest.rank} alone"
    if figures.on_gpu:
        # Waiting for a GPU that computes costs nothing; the time that it then idles does.
        idle = min(cost, figures.mean("late_ms"))
        if idle < least:
            return
        text = f"line {place} blocks the host in every step ({ms(cost)}){where}; the GPU is then idle for {ms(idle)}"
        fix = "read values from the device only every hundred steps, and log in the background"
        yield figures.slowdown(LINE, text, idle, fix=fix)
        return
    text = f"line {place} takes {ms(cost)} of each step ({percent(cost / figures.step_ms)}){where}"
    yield figures.slowdown(LINE, text, cost, fix="do it less often, or in the background")


RULES = (waiting_for_data, loader_start, slow_line)


@dataclass(frozen=True)
class _Line:
    """A line of the user's on one rank, with its time in each step."""

    rank: int
    file: str
    line: int
    milliseconds: float


def _lines(figures: Figures, parts: tuple[str, ...]) -> list[_Line]:
    found: dict[tuple[int, str, int], float] = {}
    for rank, part, file, line, share in figures.fact("lines", ()):
        if part in parts:
            key = (rank, file, line)
            found[key] = found.get(key, 0.0) + share * figures.part(rank, part)
    return [_Line(*key, taken) for key, taken in found.items()]


def _inline(figures: Figures, head: str, wait: float) -> Slowdown:
    """num_workers=0: the loop makes each batch itself."""
    on_core = min(1.0, figures.mean("data_cpu_ms") / wait)
    wanted = _workers(figures, wait, on_core, now=0)
    where = _in_dataset(figures)
    text = f"{head}. The loop makes each batch itself (num_workers=0){where}"
    if not wanted:
        fix = "all cores are busy: do less work per sample, or store results that are the same in every epoch"
        return figures.slowdown("decode", text, wait, fix=fix)
    after = max(figures.step_ms - wait + TAKE_OVER_MS, wait / wanted, _cores_ms(figures))
    return figures.slowdown(
        "workers", text, figures.step_ms - after, f"DataLoader(num_workers={wanted}, persistent_workers=True)"
    )


def _saturated(figures: Figures, head: str, wait: float, workers: int) -> Slowdown:
    """The workers cannot keep up."""
    used = figures.mean("loader_cores") / workers
    known = figures.known("loader_cores")
    wants = used
    if figures.machine_is_busy:  # they wait for a core as often as the loop does
        wants = used / max(1 - figures.mean("loop_queued"), 0.1)
    making = figures.step_ms  # of each batch, by all workers together: they limit the steps
    wanted = workers + _workers(figures, making, min(wants, 1.0) if known else 1.0, now=workers)
    busy = f", each busy {percent(min(used, 1.0))} of the time" if known else ""
    text = f"{head}. {counted(workers, 'worker')} cannot keep up{busy}"
    if wanted > workers:
        after = max(figures.step_ms - wait, making * workers / wanted, _cores_ms(figures))
        return figures.slowdown("workers", text, figures.step_ms - after, f"DataLoader(num_workers={wanted})")
    if known and wants < IDLE_WORKER:
        text += ": they wait for the disk or the network"
        return figures.slowdown(
            "disk", text, wait, fix="use a faster or local disk, or fewer and larger files"
        )
    fix = "do less work per sample: store smaller images, use fewer or simpler transforms"
    return figures.slowdown("decode", f"{text}, and no core is free", wait, fix=fix)


def _workers(figures: Figures, making: float, on_core: float, now: int) -> int:
    """Workers to add, so that a batch is made while the model computes one, as far as there are cores."""
    wait = figures.mean("host_data_ms")
    target = max(figures.step_ms - wait, 1e-9)
    needed = math.ceil(max(1, now) * making / target) - now
    needed = max(0, min(needed, PER_CORE * max(1, figures.cores // figures.local_ranks) - now))
    if on_core < ON_CORE:
        return needed  # they wait, for a disk or a network
    # The core on which the loop made the batches is free when workers make them.
    spare = figures.free_cores / figures.local_ranks + (SPARE_CORE if now else on_core)
    return min(needed, math.floor(spare / on_core + 1e-6))


def _cores_ms(figures: Figures) -> float:
    """The shortest step for which there are cores: what this machine's ranks compute, spread over all of them."""
    if not figures.cores:
        return 0.0
    used = sum(figures.get("own_cores")[: figures.local_ranks])
    return figures.step_ms * used / figures.cores


def _in_dataset(figures: Figures) -> str:
    """The line of the dataset that takes longest, if one stands out."""
    lines = _lines(figures, (DATA,))
    if not lines:
        return ""
    slowest = max(lines, key=lambda each: each.milliseconds)
    share = min(1.0, slowest.milliseconds / max(figures.mean("host_data_ms"), 1e-9))  # looks are samples
    return f"; {percent(share)} of that in {line_text(slowest.file, slowest.line)}" if share > 0.3 else ""
