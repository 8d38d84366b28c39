"""The cached teacher: a run reads the teacher's outputs from a cache instead of computing them.

Promises: before the first step, the cache is filled and spot-checked against the live teacher, whose memory is then
freed. Each batch carries its rows, bit for bit as stored, in the order of the requests; a thread reads them ahead. No
row is used before its whole epoch has been verified. An epoch that is damaged or not filled raises when its first row
is needed, not earlier. Rejects methods that read more of the teacher than a cache stores, transforms that mix images,
and data without sample ids.

The transformed image is a pure function of (seed, epoch, sample id), so a cache serves any student, batch and number
of processes. The key is a pure function of settings and data: teacher, transform, seed, labels, the stored bytes of
some images, and what a row keeps of an output. Runs with equal keys share a cache.
"""

from __future__ import annotations

import hashlib
import math
import signal
import zlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from drumline.config.recipe import Distill, Recipe
from drumline.core.errors import LostError, UserError
from drumline.core.precision import Precision
from drumline.core.progress import progress
from drumline.data.feed.batch import Batch
from drumline.data.feed.loader import Batches, prefetch
from drumline.data.feed.sampler import Ids, Request
from drumline.data.feed.transform import FULL_SCALE, Transform
from drumline.data.sources import ArrayDataset, Dataset
from drumline.distillation.cache.fill import CHUNK, fill, spot_check
from drumline.distillation.cache.folder import Cache, Key, open_cache
from drumline.distillation.cache.rows import Rule, decode
from drumline.distillation.teacher import LoadedTeacher, Teacher, TeacherOutput
from drumline.models.tapped import Tapped
from drumline.parallel.world import World
from drumline.state.fingerprint import state_sha256
from drumline.state.provenance import module_digest
from drumline.training.schedule import Plan
from drumline.training.sets import Sets, normaliser
from drumline.training.stop import StopSign

CACHEABLE_TAPS = ("pooled",)
"""Taps that a cache can store beside the logits."""
READY = 2
"""Batches of rows that are read ahead of the step."""
SAMPLED_IMAGES = 64
"""Images whose bytes are part of the key."""


@dataclass(frozen=True)
class CachedTeacher:
    """A complete cache, ready for training."""

    cache: Cache
    device: torch.device
    messages: tuple[str, ...]
    """Log lines about it."""

    def __call__(self, images: Tensor, batch: Batch) -> TeacherOutput:
        """The teacher's outputs on the batch."""
        logits, pooled = decode(batch.extra, self.cache.key.rule)
        return TeacherOutput(logits, {} if pooled is None else {"pooled": pooled})

    def add_rows(self, batches: Batches, requests: Iterable[Request]) -> Batches:
        """Adds the rows to each batch."""
        return with_rows(batches, requests, self.cache, self.device)


def check_cacheable(recipe: Recipe, taps: tuple[str, ...], source: str) -> None:
    """Raises a `UserError` if a cache cannot serve the methods or the data. Called before anything is computed."""
    if Path(recipe.distill.cache).is_file():
        raise UserError(f"distill.cache = {recipe.distill.cache}: is a file", "use a folder or a new name")
    if len(recipe.distill.teacher_weights) > 1 and taps:
        raise UserError(
            f"distill.cache: {', '.join(recipe.distill.method)} reads the features of each of the "
            f"{len(recipe.distill.teacher_weights)} teachers, but a cache stores those of one",
            "remove distill.cache, give one teacher, or use a method on logits such as kd",
        )
    maps = [tap for tap in taps if tap not in CACHEABLE_TAPS]
    if maps:
        raise UserError(
            f"distill.cache: {', '.join(recipe.distill.method)} reads the teacher's {', '.join(maps)}, but a cache "
            "stores only logits and pooled features (maps of every sample and epoch would be too large)",
            "remove distill.cache, or use a method that reads only logits or pooled features, such as kd or crd",
        )
    if source == "synthetic":
        raise UserError(
            "distill.cache: synthetic data repeats a few batches and has no sample ids",
            "remove distill.cache, or use real data",
        )


def open_cached_teacher(
    recipe: Recipe, teacher: Teacher, identity: Identity, sets: Sets, plan: Plan, world: World
) -> CachedTeacher:
    """Opens the recipe's cache, fills the missing blocks of this run's epochs, and spot-checks a few rows."""
    normalise = normaliser(sets, recipe)
    wanted = _rule(recipe, teacher, sets.transform.size, world)
    key = make_key(
        teacher=identity.present,
        source=sets.train,
        transform=sets.transform,
        mean=sets.mean,
        std=sets.std,
        seed=recipe.run.seed,
        rule=wanted,
    )
    cache = open_cache(Path(recipe.distill.cache), key, world, identity.former)
    rule = cache.key.rule
    epochs = range(math.ceil(plan.total / plan.per_epoch))
    missing = [(epoch, block) for epoch in epochs for block in cache.missing(epoch)]
    if missing and rule.pooled and not wanted.pooled:
        raise UserError(
            f"distill.cache = {cache.folder}: {len({epoch for epoch, _ in missing})} of {len(epochs)} epochs are not "
            f"filled. It stores pooled features, which {', '.join(recipe.distill.method)} does not compute",
            "use a different folder, or fill it with the method that began it",
        )
    chunks = sum(-(-len(cache.samples(block)) // CHUNK) for _, block in missing[:: world.size])

    def outputs(images: Tensor) -> tuple[Tensor, Tensor | None]:
        logits, taps = teacher(normalise(images))
        return logits.to(rule.numbers), taps["pooled"].to(rule.numbers) if wanted.pooled else None

    def with_progress(requests: Iterable[Request]) -> Batches:
        with closing(sets.feed(recipe.run.seed, requests, world.device)) as batches:
            text = "filling the teacher cache"
            yield from progress(batches, text, chunks) if world.is_rank_zero and chunks else batches

    with StopSign(world) as stop:
        complete = fill(cache, epochs, outputs, with_progress, world, stopping=lambda: stop.asked)
    if not complete:
        stopped = UserError(
            f"stopped while filling {cache.folder}; the blocks filled so far are kept",
            "repeat the command to continue",
            code="stopped",
        )
        stopped.exit_code = 128 + signal.Signals[stop.signal or "SIGTERM"]
        raise stopped
    warning = spot_check(
        cache, epochs, outputs, lambda requests: sets.feed(recipe.run.seed, requests, world.device), world
    )
    teacher.check()
    filled = f" ({len(missing):,} of {cache.blocks * len(epochs):,} blocks filled now)" if missing else ""
    stored = f"the {rule.top} largest logits" if rule.top else "all logits"
    stored += " and the pooled features" if rule.pooled else ""
    return CachedTeacher(
        cache,
        world.device,
        (
            f"teacher: cached in {cache.folder}{filled}; {stored} of each sample",
            *([warning] if warning else []),
        ),
    )


def _rule(recipe: Recipe, teacher: Teacher, size: int, world: World) -> Rule:
    """What a row stores, in the dtype of the teacher's outputs, so that nothing is lost."""
    output = teacher(torch.zeros((2, 3, size, size), device=world.device))
    pooled = output.taps.get("pooled")
    kinds = {output.logits.dtype, *(() if pooled is None else (pooled.dtype,))}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32
    width = 0 if pooled is None else pooled.shape[1]
    return Rule(output.logits.shape[1], str(dtype).removeprefix("torch."), recipe.distill.cache_top, width)


class Identity(NamedTuple):
    """What identifies the teacher in a key."""

    present: str
    former: str
    """As earlier revisions wrote it: with the names of the modules that taps are read from."""


def identify_teacher(
    distill: Distill, teachers: Sequence[LoadedTeacher], precision: Precision, temperature: float
) -> Identity:
    """Models, weights as they were loaded, precision, and how an ensemble is combined. Stored in caches, so the
    format must not change."""
    modules = [each.module for each in teachers]
    models = [module.model if isinstance(module, Tapped) else module for module in modules]
    names = f"model={'+'.join(each.name for each in teachers)}"
    parts = [f"precision={precision.autocast_dtype or torch.float32}"]
    if len(teachers) > 1:
        shares = ",".join(f"{share:g}" for share in distill.shares or (1.0,) * len(teachers))
        parts.append(f"ensemble of {distill.ensemble} at T={temperature:g}, shares {shares}")
    present, former = (
        "; ".join([names, f"weights={weights_sha256(each)}", *parts]) for each in (models, modules)
    )
    return Identity(present, former)


def weights_sha256(modules: Sequence[nn.Module]) -> str:
    """The SHA-256 of all parameters and buffers."""
    tensors = {
        f"{number}/{name}": tensor
        for number, model in enumerate(modules)
        for name, tensor in model.state_dict().items()
    }
    return state_sha256({"model": tensors})


def make_key(
    *,
    teacher: str,
    source: Dataset,
    transform: Transform,
    mean: Sequence[float],
    std: Sequence[float],
    seed: int,
    rule: Rule,
) -> Key:
    """The key of a teacher's outputs on a data set. Rejects transforms that mix images."""
    if transform.mixes:
        raise UserError(
            "distill.cache: a cache stores outputs per sample, but mixed images (data.mixup, data.cutmix) depend on "
            "their neighbour in the batch",
            "remove distill.cache, or set data.mixup and data.cutmix to 0",
        )
    return Key(
        teacher=teacher,
        transform=describe_transform(transform, mean, std),
        source=source.name,
        samples=len(source),
        labels_crc=zlib.crc32(source.labels.tobytes()),
        content=content_of(source, unreadable=transform.on_bad != "raise"),
        seed=seed,
        classes=rule.classes,
        top_k=rule.top,
        pooled=rule.pooled,
        dtype=rule.dtype,
    )


def content_of(source: Dataset, unreadable: bool = False) -> str:
    """The start of the SHA-256 of up to SAMPLED_IMAGES stored images, evenly spaced from the first to the last. With
    `unreadable`, an image that cannot be read is hashed as unreadable; without, it raises."""
    count = min(len(source), SAMPLED_IMAGES)
    digest = hashlib.sha256()
    for sample in (np.arange(count) * (len(source) - 1) // max(1, count - 1)).tolist():
        try:
            if isinstance(source, ArrayDataset):
                pixels = source.take(np.array([sample]))
                kind, data = str(pixels.shape), pixels.tobytes()
            else:
                kind, data = "file", source.read(sample)
        except UserError as error:
            if not unreadable or isinstance(error, LostError):
                raise
            kind, data = "unreadable", b""
        digest.update(f"{sample} {kind} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def describe_transform(transform: Transform, mean: Sequence[float], std: Sequence[float]) -> str:
    """Everything about a transform that determines the teacher's input, as text."""
    chosen = {item.name: getattr(transform, item.name) for item in fields(transform)}
    for mixed in ("mixup", "cutmix"):
        del chosen[mixed]
    if transform.augment != "none":
        del chosen["eval_crop"]
    pixels = asdict(chosen.pop("augmentation"))
    if own := chosen["own"]:
        chosen["own"] = f"{own} {module_digest(own)}"
    # Omitted unless they are used, so that the keys of earlier versions stay valid.
    later = {"hflip": "auto", "crop_scale": FULL_SCALE, "own": "", "vflip": 0.0, "rotation": 0.0}
    chosen, pixels = (
        {name: value for name, value in each.items() if name not in later or value != later[name]}
        for each in (chosen, pixels)
    )
    # Six digits: the last digits of measured statistics may differ between machines.
    chosen |= pixels | {"mean": [float(f"{value:.6g}") for value in mean]}
    chosen |= {"std": [float(f"{value:.6g}") for value in std]}
    return "; ".join(f"{name}={value}" for name, value in chosen.items())


def with_rows(batches: Batches, requests: Iterable[Request], cache: Cache, device: torch.device) -> Batches:
    """Adds the rows of its samples, on the device, to each batch as `extra`. `requests` is a second iterable over the
    requests that the batches are made from. Closing the generator closes `batches`."""
    source = CachedRows(cache, pin=device.type == "cuda")
    with closing(batches), closing(source.for_requests(requests)) as stored:
        for batch, rows in zip(batches, stored, strict=True):
            assert len(rows) == len(batch.labels), (len(rows), len(batch.labels))
            yield batch._replace(extra=rows.to(device, non_blocking=True))


@dataclass(frozen=True)
class CachedRows:
    """Reads the rows of batches."""

    cache: Cache
    pin: bool = False
    """Use page-locked memory, so that copies to a GPU do not wait."""

    def for_requests(self, requests: Iterable[Request]) -> Generator[Tensor, None, None]:
        """(n, row_bytes) uint8 for each request, in order, read ahead by a thread. Each epoch is verified before its
        first row is returned: one block between two requests of the previous epoch. Close it to stop the thread."""
        return prefetch(self._rows(requests), READY)

    def _rows(self, requests: Iterable[Request]) -> Generator[Tensor, None, None]:
        opened: dict[int, _Epoch] = {}
        for request in requests:
            now, later = request.epoch, request.epoch + 1
            opened = {epoch: opened.get(epoch) or _Epoch(self.cache, epoch) for epoch in (now, later)}
            yield opened[now].rows(request.samples, self.pin)
            opened[later].verify_early()


class _Epoch:
    """The blocks of an epoch, each verified when it is mapped."""

    def __init__(self, cache: Cache, epoch: int) -> None:
        self._cache, self._epoch = cache, epoch
        self._remaining = cache.verified(epoch)
        self._blocks: list[NDArray[np.uint8]] = []
        self._failed = False

    def verify_early(self) -> None:
        """Verifies one more block. An error is raised only when the epoch is needed."""
        if self._failed or len(self._blocks) == self._cache.blocks:
            return
        try:
            self._blocks.append(next(self._remaining))
        except UserError:
            self._failed, self._blocks = True, []
            self._remaining = self._cache.verified(self._epoch)

    def rows(self, samples: Ids, pin: bool) -> Tensor:
        """The rows of these samples, in their order."""
        if len(self._blocks) < self._cache.blocks:
            self._blocks.extend(self._remaining)
        rows = torch.empty((len(samples), self._cache.key.rule.row_bytes), dtype=torch.uint8, pin_memory=pin)
        into, of_block = rows.numpy(), self._cache.block_of(samples)
        order = np.argsort(of_block, kind="stable")
        cuts = np.searchsorted(of_block[order], np.arange(len(self._blocks) + 1))
        for block, (first, last) in enumerate(pairwise(cuts.tolist())):
            if first < last:
                where = order[first:last]
                into[where] = self._blocks[block][samples[where] - self._cache.samples(block).start]
        return rows
