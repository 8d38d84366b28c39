"""Fills a teacher cache, and checks it against the live teacher.

Promises: on one kind of machine, the stored rows are a pure function of (teacher, transform, seed, epoch, sample id):
every forward has CHUNK images in the order of sample ids, independent of the world size, the training batch and the
block. A fill that is interrupted, even by kill -9, continues with the missing blocks. Rejects a disk that is too
small, a folder that not all processes see, and a folder that a different run is filling.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from drumline.core.errors import UserError
from drumline.core.heartbeat import Phase, enter
from drumline.data.feed.batch import Batch
from drumline.data.feed.loader import Batches
from drumline.data.feed.sampler import Request
from drumline.distillation.cache.folder import (
    CHECKSUMS,
    DETERMINISTIC,
    SHARED_FOLDER,
    Cache,
    Place,
    describe_machine,
    from_rank_zero,
    raise_if_any,
    sole_filler,
    unwritable,
)
from drumline.distillation.cache.rows import differences, encode
from drumline.distillation.teacher import nonfinite_outputs
from drumline.parallel.world import World
from drumline.training.evaluate import padded

CHUNK = 256
"""Images per forward. Every block but the last is a whole number of chunks."""
SYNC_EVERY = 8
"""Chunks between two synchronisations of the ranks."""
VISIBLE_SECONDS = 30.0
"""How long a network file system may take to show a file that a different machine has written."""
Teacher = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""From uint8 images (n, height, width, channels) to logits and, if they are stored, pooled features."""
Feed = Callable[[Iterable[Request]], Batches]
"""From requests to their batches on the device, in order."""


def fill(
    cache: Cache,
    epochs: range,
    teacher: Teacher,
    feed: Feed,
    world: World,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Computes the missing blocks of these epochs, divided among the ranks. Returns, on every rank, whether the
    epochs are complete. `stopping` is called between chunks."""
    with ExitStack() as held:
        plan = from_rank_zero(world, lambda: _prepare(cache, epochs, world, held))
        if plan.missing or plan.present:
            _check_folder(cache, plan.token, world)
            if not _compute_missing(cache, plan, teacher, feed, world, stopping):
                return False
            world.barrier()
        enter(Phase.STARTING)
        _check_complete(cache, epochs, world)
    return True


def spot_check(
    cache: Cache, epochs: range, teacher: Teacher, feed: Feed, world: World, count: int = 2
) -> str:
    """Recomputes a few chunks and compares them with the stored rows, bit for bit. On a different machine or torch
    version, or with nondeterministic kernels, it uses a tolerance and returns a warning. (seed, epochs) determines
    the chunks. The ranks divide the work, and all get the same result."""
    here = describe_machine(world)
    exact = here == cache.machine and here["kernels"] == DETERMINISTIC
    mine = chosen_chunks(cache, epochs, count)[world.rank :: world.size]
    wrong = ""
    with closing(feed(mine)) as batches:
        for request, batch in zip(mine, batches, strict=True):
            enter(Phase.STARTING)
            wrong = wrong or _compare(cache, teacher, request, batch, exact)
    raise_if_any(
        world,
        wrong,
        "use a different folder for distill.cache, delete this one, or use the teacher and machine that filled it",
    )
    if exact:
        return ""
    filled, now = (
        f"{machine['device']}, torch {machine['torch']}, {machine['kernels']}"
        for machine in (cache.machine, here)
    )
    return (
        f"WARNING: the teacher cache was filled on {filled}; this run uses {now}. Rows match within a tolerance; "
        "their bits may differ"
    )


def chosen_chunks(cache: Cache, epochs: range, count: int) -> list[Request]:
    """The distinct chunks of a spot check: a pure function of (seed, epochs, count)."""
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
    """The work of a fill."""

    missing: list[Place]
    """Blocks to compute."""
    present: list[Place]
    """Existing blocks of epochs that have no list of checksums yet."""
    token: str
    """The name of a file that every rank must see."""


def _prepare(cache: Cache, epochs: range, world: World, held: ExitStack) -> _Plan:
    """Finds the missing blocks, checks the free disk space, and removes temporary files of killed runs. If something
    is missing, `held` keeps other runs out until it is closed."""
    if not any(_incomplete(cache, epochs)):
        return _Plan([], [], "")
    token = f"seen-{uuid.uuid4().hex[:8]}.tmp"
    try:
        held.enter_context(sole_filler(cache.folder))
        # Checked again: a different run may have filled it while it held the lock.
        missing, present = _incomplete(cache, epochs)
        if not missing and not present:
            return _Plan([], [], "")
        for stale in [*cache.folder.glob("*.tmp"), *cache.folder.glob("epoch-*/*.tmp")]:
            stale.unlink(missing_ok=True)
        needed = sum(cache.file_bytes(block) for _, block in missing)
        free = shutil.disk_usage(cache.folder).free
        if needed > free:
            raise UserError(
                f"distill.cache = {cache.folder}: needs {_size(needed)} ({len(missing):,} blocks), but the disk has "
                f"{_size(free)} free",
                "use a folder on a larger disk, fewer epochs, or store fewer logits per sample (distill.cache_top)",
            )
        if world.size > 1:
            (cache.folder / token).touch()
    except OSError as error:
        raise unwritable(cache.folder, error) from error
    return _Plan(missing, present, token)


def _incomplete(cache: Cache, epochs: range) -> tuple[list[Place], list[Place]]:
    """The missing and the existing blocks of the epochs that are not complete."""
    missing: list[Place] = []
    present: list[Place] = []
    for epoch in epochs:
        absent = cache.missing(epoch)
        if absent or not (cache.epoch_folder(epoch) / CHECKSUMS).exists():
            missing += ((epoch, block) for block in absent)
            present += ((epoch, block) for block in sorted({*range(cache.blocks)} - {*absent}))
    return missing, present


def _compute_missing(
    cache: Cache,
    plan: _Plan,
    teacher: Teacher,
    feed: Feed,
    world: World,
    stopping: Callable[[], bool],
) -> bool:
    """Rank j mod world computes block j. All ranks synchronise every SYNC_EVERY chunks, even those that are done: to
    stop together, to list the checksums of complete epochs, and so that no collective times out."""
    assigned = [plan.missing[rank :: world.size] for rank in range(world.size)]
    steps = max(1, *(sum(_chunk_count(cache, block) for _, block in blocks) for blocks in assigned))
    mine = assigned[world.rank]
    fresh = {place: cache.read(*place)[1] for place in plan.present[world.rank :: world.size]}
    known: dict[Place, str] = {}
    rows: list[Tensor] = []
    finite: list[Tensor] = []
    stop = False
    with closing(feed(request for _, request in _chunks(cache, mine))) as batches:
        todo = zip(_chunks(cache, mine), batches, strict=True)
        for step in range(1, steps + 1):
            stop = stop or stopping()
            item = None if stop else next(todo, None)
            enter(Phase.FILLING)
            if item is not None:
                (place, request), batch = item
                computed, *outputs = _compute(cache, teacher, batch)
                rows.append(computed)
                finite += (part.isfinite().all() for part in outputs if part is not None)
                if request.samples[-1] + 1 == cache.samples(place[1]).stop:
                    if not torch.stack(finite).all():
                        block = cache.samples(place[1])
                        raise nonfinite_outputs(
                            f"samples between {block.start:,} and {block.stop - 1:,} of epoch {place[0]}"
                        )
                    fresh[place] = cache.write(*place, torch.cat(rows).cpu().numpy())
                    rows.clear()
                    finite.clear()
            if step % SYNC_EVERY == 0 or step == steps:
                gathered = world.all_gather_object((stop, fresh))
                fresh = {}
                if world.is_rank_zero:
                    for _, theirs in gathered:
                        known |= theirs
                    _seal(cache, known)
                if any(theirs for theirs, _ in gathered):
                    return False
    return True


def _check_folder(cache: Cache, token: str, world: World) -> None:
    """Checks that every rank sees the same folder before any of them computes for hours."""
    if world.size == 1:
        return
    path = cache.folder / token
    wrong = (
        "" if _appears(path.exists) else f"distill.cache = {cache.folder}: not the folder that rank 0 sees"
    )
    try:
        raise_if_any(world, wrong, SHARED_FOLDER)
    finally:
        if world.is_rank_zero:
            path.unlink(missing_ok=True)


def _check_complete(cache: Cache, epochs: range, world: World) -> None:
    """Checks that every rank sees all blocks before training starts."""

    def complete() -> bool:
        return all(cache.whole(epoch) for epoch in epochs)

    wrong = (
        "" if _appears(complete) else f"distill.cache = {cache.folder}: some of the filled blocks are missing"
    )
    raise_if_any(world, wrong, SHARED_FOLDER)


def _appears(seen: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not seen():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
    return True


def _chunk_count(cache: Cache, block: int) -> int:
    return -(-len(cache.samples(block)) // CHUNK)


def _chunks(cache: Cache, places: list[Place]) -> Iterator[tuple[Place, Request]]:
    """The chunks of each block."""
    for place in places:
        samples = cache.samples(place[1])
        for first in range(samples.start, samples.stop, CHUNK):
            yield place, _request(place[0], first, samples.stop)


def _request(epoch: int, first: int, end: int) -> Request:
    return Request(epoch, np.arange(first, min(first + CHUNK, end), dtype=np.int64))


@torch.inference_mode()
def _compute(cache: Cache, teacher: Teacher, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows, logits and features of a chunk. Features are the end of a row; without them, it ends before."""
    count = len(batch.images)
    logits, pooled = teacher(padded(batch.images, CHUNK))
    rule = cache.key.rule if pooled is not None else replace(cache.key.rule, pooled=0)
    rows = encode(logits, pooled, rule)
    return rows[:count], logits[:count], None if pooled is None else pooled[:count]


def _seal(cache: Cache, known: dict[Place, str]) -> None:
    """Writes and forgets the checksums of every epoch whose blocks are all known."""
    for epoch in sorted({epoch for epoch, _ in known}):
        places = [(epoch, block) for block in range(cache.blocks)]
        if all(place in known for place in places):
            cache.seal(epoch, [known.pop(place) for place in places])


def _compare(cache: Cache, teacher: Teacher, request: Request, batch: Batch, exact: bool) -> str:
    """What is wrong with a stored chunk; empty if nothing."""
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
    stored = stored[:, : computed.shape[1]]
    rule = cache.key.rule if pooled is not None else replace(cache.key.rule, pooled=0)
    apart, features_apart = differences(stored, logits, pooled, rule)
    if exact:
        wrong = (stored != computed).any(dim=1)
    else:
        tolerance = 1e-3 if rule.numbers is torch.float32 else 0.05
        # Negated, so that a NaN counts as wrong.
        wrong = ~(apart <= tolerance * max(1.0, float(logits.abs().amax())))
        if rule.pooled and pooled is not None:
            wrong |= ~(features_apart <= tolerance * max(1.0, float(pooled.abs().amax())))
    if not wrong.any():
        return ""
    sample = first + int(wrong.int().argmax())
    largest = [f"{float(part.nan_to_num(nan=math.inf).amax()):.3g}" for part in (apart, features_apart)]
    return (
        f"distill.cache = {cache.folder}: {int(wrong.sum())} of {len(wrong)} rows of epoch {request.epoch} differ "
        f"from the teacher's outputs, first that of sample {sample}; logits differ by up to {largest[0]}"
        + (f", features by up to {largest[1]}" if rule.pooled else "")
        + ": a different teacher, code or machine filled the cache"
    )


def _size(amount: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.1f} GB"
