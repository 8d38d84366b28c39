"""Rules about data: steps wait for batches because of the disk, decoding, the workers or the user's own code."""

from __future__ import annotations

import math
from collections.abc import Iterator

from drumline.core.text import percent
from drumline.diagnosis.figures import Figures, ms
from drumline.diagnosis.slowdown import Slowdown

WAIT_WORTH = 0.1
"""Fraction of a step spent waiting for data, above which it is reported. Less is often noise or an epoch's end."""
INLINE_WORTH = 0.25
"""The same if the process makes the batch itself between two steps, which always takes some time."""
MAIN = 0.5
"""Fraction of the feed's time that makes something its limit."""
MOST_WORKERS = 64
SPARE_CORE = 0.5
"""Free cores that are enough for another worker."""
WAITS = 0.1
"""Workers that use less than this of a core wait for something else, so the cores do not limit their number."""


def waiting_for_data(figures: Figures) -> Iterator[Slowdown]:
    """The limit of the feed, if steps wait for it."""
    if figures.on_gpu and figures.fact("arrays") and not figures.known("feed_work_ms"):
        return  # the GPU holds the data and makes its batches itself
    wait = figures.mean("data_ms") - figures.mean("copy_ms")
    worth = WAIT_WORTH if _ahead(figures) else INLINE_WORTH
    if figures.machine_is_busy:  # the feed waits for a core, as the loop does
        worth = max(worth, figures.mean("loop_queued"))
    if wait < worth * figures.step_ms:
        return
    head = f"{figures.share(wait)} is spent waiting for data: the model could process {figures.speed_without(wait)}"
    spent = _parts(figures)
    main = max(spent, key=lambda name: spent[name])
    total = sum(spent.values())
    if not total or spent[main] < MAIN * total:
        main = "feed"
    yield {"disk": _disk, "make": _make, "transform": _transform, "feed": _feed}[main](
        figures, head, wait, spent
    )


RULES = (waiting_for_data,)


def _ahead(figures: Figures) -> bool:
    """Whether batches are made while earlier steps compute."""
    return figures.known("feed_space_ms") or figures.on_gpu or bool(figures.fact("workers", 0))


def _parts(figures: Figures) -> dict[str, float]:
    """Where the feed's time goes, in milliseconds of each step: files, decoding, the user's transform, the rest."""
    read, make = figures.mean("feed_read_ms"), figures.mean("feed_make_ms")
    work = figures.mean("feed_work_ms")
    workers = {
        "disk": figures.mean("workers_read_ms"),
        "make": figures.mean("workers_make_ms"),
        "transform": figures.mean("workers_own_ms"),
    }
    total = sum(workers.values())
    if not figures.fact("workers", 0):  # the feed's own thread does everything
        return {**workers, "feed": max(0.0, work - total)}
    if figures.fact("pool") == "processes" and total:
        return {name: make * each / total for name, each in workers.items()} | {"feed": work}
    made = workers["make"] + workers["transform"]
    own = make * workers["transform"] / made if made else 0.0
    return {"disk": read, "make": make - own, "transform": own, "feed": work}


def _disk(figures: Figures, head: str, wait: float, spent: dict[str, float]) -> Slowdown:
    evidence = f"the feed waits {ms(spent['disk'])} per step for files"
    if figures.known("read_mb") and figures.step_ms:
        evidence += f"; it reads {sum(figures.get('read_mb')) / figures.step_ms * 1e3:,.0f} MB/s"
        needed = sum(figures.get("read_mb")) / max(figures.step_ms - wait, 1e-9) * 1e3
        evidence += f" and needs {needed:,.0f} MB/s"
    gained, flag = min(wait, spent["disk"]), ""
    fix = (
        "move the data to a faster or local disk, or pack it into a few large files: "
        "`drumline pack DATA OUT`, then set data.path=OUT"
    )
    # The number of native threads that read files does not depend on data.workers.
    if figures.fact("pool") == "processes" or figures.own_code("data.source"):
        workers = max(1, int(figures.fact("workers", 0)))
        wanted = math.ceil(workers * spent["disk"] / max(figures.step_ms - wait, 1e-9))
        wanted = min(wanted, MOST_WORKERS)
        flag = figures.flag("data.workers", wanted) if wanted > workers else ""
        if flag:
            gained = min(wait, spent["disk"] * (1 - workers / wanted))
            fix = f"{wanted} workers read more files at once; if the disk is already at its limit, {fix}"
    return figures.slowdown("disk", f"{head}. The disk is the limit: {evidence}", gained, flag, fix)


def _make(figures: Figures, head: str, wait: float, spent: dict[str, float]) -> Slowdown:
    """Decoding and cropping: more workers if there are cores for them."""
    workers = int(figures.fact("workers", 0))
    wanted = _workers_wanted(figures, wait, spent["make"])
    decoding = f"decoding takes {percent(spent['make'] / sum(spent.values()))} of the feed's time"
    if wanted > workers:
        after = spent["make"] * max(workers, 1) / wanted
        saved = min(wait, spent["make"] - after)
        cores = f"; {figures.free_cores:.1f} of {figures.cores} cores are free" if figures.cores else ""
        by = f"{workers} {'workers' if workers != 1 else 'worker'}" if workers else "the feed without workers"
        return figures.slowdown(
            "workers",
            f"{head}. {by[0].upper()}{by[1:]} cannot keep up: {decoding}{cores}",
            saved,
            figures.flag("data.workers", wanted),
            f"use {wanted} workers",
        )
    busy = figures.mean("busy_cores")
    used = f", and {busy:.1f} of {figures.cores} cores are busy" if figures.known("busy_cores") else ""
    flag = figures.flag("data.decode", "auto") if figures.on_gpu else ""
    fix = (
        "store smaller images (`drumline pack DATA OUT --resize-short 256`) or decoded ones (`--raw`), then set "
        "data.path=OUT"
    )
    return figures.slowdown(
        "decode", f"{head}. Decoding is the limit: {decoding}{used}", min(wait, spent["make"]), flag, fix
    )


def _transform(figures: Figures, head: str, wait: float, spent: dict[str, float]) -> Slowdown:
    named = ", ".join(figures.own_code("data.transform")) or "your own transform"
    text = f"{head}. {named} takes {percent(spent['transform'] / sum(spent.values()))} of the feed's time"
    workers = int(figures.fact("workers", 0))
    wanted = _workers_wanted(figures, wait, spent["transform"])
    flag = figures.flag("data.workers", wanted) if wanted > workers else ""
    if not workers:  # arrays: the feed makes them itself unless processes are asked for
        flag, given = figures.flag("data.pool", "processes"), figures.setting("data.workers")
        wanted = given if isinstance(given, int) else max(1, figures.cores // figures.local_ranks)
    after = spent["transform"] * max(workers, 1) / wanted if flag else 0.0
    fix = "make it faster, for example with NumPy on whole arrays, or do it once and store the result"
    return figures.slowdown("transform", text, min(wait, spent["transform"] - after), flag, fix)


def _feed(figures: Figures, head: str, wait: float, spent: dict[str, float]) -> Slowdown:
    if not sum(spent.values()):
        workers = figures.fact("workers")
        evidence = f" with {workers} workers" if workers is not None else ""
        return figures.slowdown(
            "data", f"{head}{evidence}", wait, fix="give the loader more workers, or make each sample cheaper"
        )
    parts = sorted(spent, key=lambda name: -spent[name])
    listed = ", ".join(
        f"{_TITLES[name]} {percent(spent[name] / sum(spent.values()))}" for name in parts if spent[name]
    )
    return figures.slowdown(
        "feed",
        f"{head}. The feed's time: {listed}",
        min(wait, spent["feed"]),
        fix="use larger batches, which need less Python per image, or a simpler augmentation",
    )


_TITLES = {
    "disk": "files",
    "make": "decoding",
    "transform": "your transform",
    "feed": "Python and augmentation",
}


def _workers_wanted(figures: Figures, wait: float, part_ms: float) -> int:
    """The workers with which a part of the feed would be as fast as the model, as far as there are cores for them."""
    workers = max(1, int(figures.fact("workers", 0)))
    target = max(figures.step_ms - wait, 1e-9)
    needed = math.ceil(workers * part_ms / target)
    making = figures.mean("workers_make_ms")
    # A worker that waits for a core would use it.
    wants = figures.mean("workers_make_cpu_ms") + figures.mean("queued_cores") * figures.wall_ms
    on_core = min(1.0, wants / making) if making else 0.0
    if on_core > WAITS and figures.cores:
        free = figures.free_cores / figures.local_ranks
        more = math.floor((free + 1 - SPARE_CORE) / on_core)
        needed = min(needed, workers + more, math.floor(figures.cores / figures.local_ranks / on_core))
    return min(needed, MOST_WORKERS)
