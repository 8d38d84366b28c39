"""Fills a teacher cache, and checks it against the live teacher.

Promises: what is stored is a pure function of (teacher, view, seed, epoch, sample id) on one kind of machine: every
forward has CHUNK images, in order of sample ids, whatever the world, the training batch or the block. A fill that was
interrupted, by Ctrl-C or kill -9, goes on with the blocks that are missing. Refuses to begin what the disk cannot
hold, folders that not all processes share, and one that another run is filling.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drumline.core.errors import UserError
from drumline.core.heartbeat import Phase, enter
from drumline.data.feed.batch import Batch
from drumline.data.feed.loader import Batches
from drumline.data.feed.sampler import Request
from drumline.distill.cache.format import (
    CHECKSUMS,
    SAME_BITS,
    Cache,
    Place,
    describe_machine,
    from_first,
    refuse_if_any,
    sole_filler,
    unwritable,
)
from drumline.distill.cache.payload import differences, encode
from drumline.parallel.world import World
from drumline.train.evaluate import padded

CHUNK = 256
"""Images to a forward. A block is a whole number of chunks, its last one aside."""
MEETING = 8
"""Chunks between two meetings of the ranks."""
SIGHT_SECONDS = 30.0
"""How long a network file system may take to show one machine what another has written."""
Teacher = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""uint8 images (n, height, width, channels) to logits and, where they are kept, pooled features."""
Feed = Callable[[Iterable[Request]], Batches]
"""The batches of requests, on the device, in order."""


def fill(
    cache: Cache,
    epochs: range,
    teacher: Teacher,
    feed: Feed,
    world: World,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Computes what is missing of these epochs, shared by the ranks; whether all of it is there now, the same on
    every rank. `stopping` is asked between two chunks."""
    with ExitStack() as held:
        plan = from_first(world, lambda: _prepare(cache, epochs, world, held))
        if plan.missing or plan.present:
            _see_token(cache, plan.token, world)
            if not _work_off(cache, plan, teacher, feed, world, stopping):
                return False
            world.barrier()
        enter(Phase.STARTING)
        _see_all(cache, epochs, world)
    return True


def spot_check(
    cache: Cache, epochs: range, teacher: Teacher, feed: Feed, world: World, count: int = 2
) -> str:
    """Computes a few chunks anew and compares them with what is stored, bit for bit; on another machine or torch
    than the cache's, or with kernels that need not repeat, with a tolerance, and says so. Which chunks
    follows from (seed, epochs). The ranks share the work and the verdict."""
    here = describe_machine(world)
    exact = here == cache.machine and here["kernels"] == SAME_BITS
    mine = chosen_chunks(cache, epochs, count)[world.rank :: world.size]
    odd = ""
    with closing(feed(mine)) as batches:
        for request, batch in zip(mine, batches, strict=True):
            enter(Phase.STARTING)
            odd = odd or _compare(cache, teacher, request, batch, exact)
    refuse_if_any(
        world,
        odd,
        "give another folder with --distill.cache or delete this one; or start with the teacher, code and machine "
        "that filled it",
    )
    if exact:
        return ""
    filled, now = (
        f"{machine['device']}, torch {machine['torch']}, {machine['kernels']}"
        for machine in (cache.machine, here)
    )
    return (
        f"the teacher cache was filled on {filled}; this is {now}: compared with a tolerance, bits may differ"
    )


def chosen_chunks(cache: Cache, epochs: range, count: int) -> list[Request]:
    """The chunks that a spot check looks at: different ones, a pure function of (seed, epochs, count)."""
    per_epoch = -(-cache.key.samples // CHUNK)
    chosen: dict[int, None] = {}
    draw = 0
    while len(chosen) < min(count, per_epoch * len(epochs)):
        text = f"{cache.key.seed} {epochs.start} {epochs.stop} {draw}"
        word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        chosen[word % (per_epoch * len(epochs))] = None
        draw += 1
    return [
        _request(epochs[number // per_epoch], number % per_epoch * CHUNK, cache.key.samples)
        for number in chosen
    ]


@dataclass(frozen=True)
class _Plan:
    """What a fill has to do."""

    missing: list[Place]
    """Blocks to be computed."""
    present: list[Place]
    """Blocks of epochs without a list of checksums that are there already."""
    token: str
    """Name of a file that every rank must see."""


def _prepare(cache: Cache, epochs: range, world: World, held: ExitStack) -> _Plan:
    """Looks for what is missing, and at the room for it; clears what a killed run has left behind. Where something
    is missing, `held` keeps other runs out until it is closed."""
    if not any(_wanting(cache, epochs)):
        return _Plan([], [], "")
    token = f"seen-{uuid.uuid4().hex[:8]}.tmp"
    try:
        held.enter_context(sole_filler(cache.folder))
        # Looked for again: another run may have filled it before the lock was free.
        missing, present = _wanting(cache, epochs)
        if not missing and not present:
            return _Plan([], [], "")
        for stale in [*cache.folder.glob("*.tmp"), *cache.folder.glob("epoch-*/*.tmp")]:
            stale.unlink(missing_ok=True)
        needed = sum(cache.file_bytes(block) for _, block in missing)
        free = shutil.disk_usage(cache.folder).free
        if needed > free:
            raise UserError(
                f"distill.cache = {cache.folder}: {_size(needed)} are to be filled ({len(missing):,} blocks), and "
                f"the disk has {_size(free)} free",
                "give a folder on a larger disk, fewer epochs, or keep fewer logits per sample",
            )
        if world.size > 1:
            (cache.folder / token).touch()
    except OSError as error:
        raise unwritable(cache.folder, error) from error
    return _Plan(missing, present, token)


def _wanting(cache: Cache, epochs: range) -> tuple[list[Place], list[Place]]:
    """Of the epochs that are not whole: the blocks that are missing, and those that are there."""
    missing: list[Place] = []
    present: list[Place] = []
    for epoch in epochs:
        absent = cache.missing(epoch)
        if absent or not (cache.epoch_folder(epoch) / CHECKSUMS).exists():
            missing += ((epoch, block) for block in absent)
            present += ((epoch, block) for block in sorted({*range(cache.blocks)} - {*absent}))
    return missing, present


def _work_off(
    cache: Cache,
    plan: _Plan,
    teacher: Teacher,
    feed: Feed,
    world: World,
    stopping: Callable[[], bool],
) -> bool:
    """Block j goes to rank j mod world. The ranks meet every MEETING chunks, also those that are done: to agree on
    stopping, to list the checksums of whole epochs, and lest one waits for another longer than it may."""
    shares = [plan.missing[rank :: world.size] for rank in range(world.size)]
    steps = max(1, *(sum(_chunk_count(cache, block) for _, block in share) for share in shares))
    mine = shares[world.rank]
    fresh = {place: cache.read(*place)[1] for place in plan.present[world.rank :: world.size]}
    known: dict[Place, str] = {}
    rows: list[Tensor] = []
    asked = False
    with closing(feed(request for _, request in _chunks(cache, mine))) as batches:
        todo = zip(_chunks(cache, mine), batches, strict=True)
        for step in range(1, steps + 1):
            asked = asked or stopping()
            item = None if asked else next(todo, None)
            enter(Phase.FILLING)
            if item is not None:
                (place, request), batch = item
                rows.append(_compute(cache, teacher, batch)[0])
                if request.samples[-1] + 1 == cache.samples(place[1]).stop:
                    fresh[place] = cache.write(*place, torch.cat(rows).cpu().numpy())
                    rows.clear()
            if step % MEETING == 0 or step == steps:
                everybody = world.all_gather_object((asked, fresh))
                fresh = {}
                if world.is_rank_zero:
                    for _, theirs in everybody:
                        known |= theirs
                    _seal(cache, known)
                if any(theirs for theirs, _ in everybody):
                    return False
    return True


def _see_token(cache: Cache, token: str, world: World) -> None:
    """Every rank must look at the same folder, before any of them computes for hours."""
    if world.size == 1:
        return
    path = cache.folder / token
    odd = (
        "" if _appears(path.exists) else f"distill.cache = {cache.folder}: is not the folder that rank 0 sees"
    )
    try:
        refuse_if_any(world, odd, "several machines need a common folder: give one that each of them sees")
    finally:
        if world.is_rank_zero:
            path.unlink(missing_ok=True)


def _see_all(cache: Cache, epochs: range, world: World) -> None:
    """Every rank must have all that was filled, or it would find out in the middle of training."""

    def complete() -> bool:
        return all(cache.whole(epoch) for epoch in epochs)

    odd = (
        ""
        if _appears(complete)
        else f"distill.cache = {cache.folder}: not every block that was filled is here"
    )
    refuse_if_any(world, odd, "several machines need a common folder: give one that each of them sees")


def _appears(seen: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SIGHT_SECONDS
    while not seen():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
    return True


def _chunk_count(cache: Cache, block: int) -> int:
    return -(-len(cache.samples(block)) // CHUNK)


def _chunks(cache: Cache, places: list[Place]) -> Iterator[tuple[Place, Request]]:
    """The chunks of each block in turn."""
    for place in places:
        samples = cache.samples(place[1])
        for first in range(samples.start, samples.stop, CHUNK):
            yield place, _request(place[0], first, samples.stop)


def _request(epoch: int, first: int, end: int) -> Request:
    return Request(epoch, np.arange(first, min(first + CHUNK, end), dtype=np.int64))


@torch.inference_mode()
def _compute(cache: Cache, teacher: Teacher, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows, logits and features of a chunk."""
    count = len(batch.images)
    logits, pooled = teacher(padded(batch.images, CHUNK))
    rows = encode(logits, pooled, cache.key.rule)
    return rows[:count], logits[:count], None if pooled is None else pooled[:count]


def _seal(cache: Cache, known: dict[Place, str]) -> None:
    """Lists the checksums of the epochs of which each block's is known, and forgets them."""
    for epoch in sorted({epoch for epoch, _ in known}):
        places = [(epoch, block) for block in range(cache.blocks)]
        if all(place in known for place in places):
            cache.seal(epoch, [known.pop(place) for place in places])


def _compare(cache: Cache, teacher: Teacher, request: Request, batch: Batch, exact: bool) -> str:
    """What is wrong with a stored chunk, in words."""
    first = int(request.samples[0])
    block = next(block for block in range(cache.blocks) if first in cache.samples(block))
    start = first - cache.samples(block).start
    mapped, _ = cache.read(request.epoch, block)
    stored = torch.from_numpy(mapped[start : start + len(request.samples)].copy())
    computed, logits, pooled = (
        None if part is None else part.cpu() for part in _compute(cache, teacher, batch)
    )
    assert computed is not None
    assert logits is not None
    apart, features_apart = differences(stored, logits, pooled, cache.key.rule)
    if exact:
        wrong = (stored != computed).any(dim=1)
    else:
        share = 1e-3 if cache.key.rule.numbers is torch.float32 else 0.05
        # Written so that a NaN is wrong.
        wrong = ~(apart <= share * max(1.0, float(logits.abs().amax())))
        if cache.key.rule.pooled and pooled is not None:
            wrong |= ~(features_apart <= share * max(1.0, float(pooled.abs().amax())))
    if not wrong.any():
        return ""
    sample = first + int(wrong.int().argmax())
    largest = [f"{float(part.nan_to_num(nan=math.inf).amax()):.3g}" for part in (apart, features_apart)]
    return (
        f"distill.cache = {cache.folder}: {int(wrong.sum())} of {len(wrong)} rows of epoch {request.epoch} are not "
        f"what the teacher gives now, the first of sample {sample}; logits differ by up to {largest[0]}"
        + (f", features by up to {largest[1]}" if cache.key.rule.pooled else "")
        + ": the cache is of another teacher, code or machine"
    )


def _size(amount: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.1f} GB"
