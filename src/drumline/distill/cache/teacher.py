"""A run's teacher read from its cache instead of being computed.

Promises: the cache is filled and spot-checked against the live teacher before the first step; then the step reads
what is stored, from the rows that travel with each batch, and the teacher's memory is free again. Refuses methods
that need more of the teacher than a cache keeps, and data that has no sample ids of its own.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.core.progress import progress
from drumline.data.feed.batch import Batch
from drumline.data.feed.loader import Batches
from drumline.data.feed.sampler import Request
from drumline.distill.cache.fill import CHUNK, fill, spot_check
from drumline.distill.cache.format import Cache, open_cache
from drumline.distill.cache.key import make_key
from drumline.distill.cache.payload import Rule, decode
from drumline.distill.cache.rows import with_rows
from drumline.distill.teacher import Taught, Teacher
from drumline.parallel.world import World
from drumline.train import prepare
from drumline.train.stop import StopSign

KEPT = ("pooled",)
"""Taps that a cache can keep beside the logits."""


@dataclass(frozen=True)
class Stored:
    """A whole cache, ready to be trained from."""

    cache: Cache
    device: torch.device
    words: tuple[str, ...]

    def __call__(self, images: Tensor, batch: Batch) -> Taught:
        """What the teacher said of the batch's samples."""
        logits, pooled = decode(batch.extra, self.cache.key.rule)
        return Taught(logits, {} if pooled is None else {"pooled": pooled})

    def feed(self, batches: Batches, requests: Iterable[Request]) -> Batches:
        """The batches with their rows."""
        return with_rows(batches, requests, self.cache, self.device)


def refuse_uncacheable(recipe: Recipe, taps: tuple[str, ...], source: str) -> None:
    """Before anything is computed."""
    odd = [tap for tap in taps if tap not in KEPT]
    if odd:
        raise UserError(
            f"distill.cache: {', '.join(recipe.distill.method)} reads the teacher's {', '.join(odd)}, and a cache "
            "keeps logits and pooled features only (maps of every sample and epoch would fill any disk)",
            "leave out --distill.cache, or use a method of logits or pooled features: kd, dkd, dist, correlation, "
            "rkd, pkt, crd, srd",
        )
    if source == "synthetic":
        raise UserError(
            "distill.cache: synthetic data repeats a few batches and has no samples of its own",
            "leave out --distill.cache, or give real data",
        )


def store(
    recipe: Recipe, teacher: Teacher, identity: str, sets: prepare.Sets, plan: prepare.Plan, world: World
) -> Stored:
    """Opens the recipe's cache, fills what is missing of this run's epochs, compares a few rows with the teacher."""
    if Path(recipe.distill.cache).is_file():
        raise UserError(f"distill.cache = {recipe.distill.cache}: is a file", "give a folder, or a new name")
    normalise = prepare.normaliser(sets, recipe, world)
    rule = _rule(recipe, teacher, sets.transform.size, world)
    key = make_key(
        teacher=identity,
        source=sets.train,
        transform=sets.transform,
        mean=sets.mean,
        std=sets.std,
        seed=recipe.run.seed,
        rule=rule,
    )
    cache = open_cache(Path(recipe.distill.cache), key, world)
    epochs = range(math.ceil(plan.total / plan.per_epoch))
    missing = [(epoch, block) for epoch in epochs for block in cache.missing(epoch)]
    chunks = sum(-(-len(cache.samples(block)) // CHUNK) for _, block in missing[:: world.size])

    def said(images: Tensor) -> tuple[Tensor, Tensor | None]:
        logits, taps = teacher(normalise(images))
        return logits.to(rule.numbers), taps["pooled"].to(rule.numbers) if rule.pooled else None

    def shown(requests: Iterable[Request]) -> Batches:
        with closing(sets.feed(recipe.run.seed, requests, world.device)) as batches:
            text = "filling the teacher's cache"
            yield from progress(batches, text, chunks) if world.is_rank_zero and chunks else batches

    with StopSign(world) as stop:
        whole = fill(cache, epochs, said, shown, world, stopping=lambda: stop.asked)
    if not whole:
        stopped = UserError(
            f"stopped while filling {cache.folder}; the blocks filled so far are kept",
            "repeat the command to continue",
            code="stopped",
        )
        stopped.exit_code = 128 + signal.Signals[stop.signal or "SIGTERM"]
        raise stopped
    doubt = spot_check(
        cache, epochs, said, lambda requests: sets.feed(recipe.run.seed, requests, world.device), world
    )
    teacher.check()
    state = "read"
    if missing:
        state = f"{len(missing):,} of {cache.blocks * len(epochs):,} blocks filled, then read"
    kept = (
        f"{rule.top} largest logits (the rest share their probability at T = 1)" if rule.top else "all logits"
    )
    kept += " and pooled features" if rule.pooled else ""
    return Stored(
        cache,
        world.device,
        (f"teacher's outputs from {cache.folder}: {state}; {kept} of each sample", doubt),
    )


def _rule(recipe: Recipe, teacher: Teacher, size: int, world: World) -> Rule:
    """What a row keeps: in the type that the teacher gives, so that nothing is lost."""
    said = teacher(torch.zeros((2, 3, size, size), device=world.device))
    pooled = said.taps.get("pooled")
    kinds = {said.logits.dtype, *(() if pooled is None else (pooled.dtype,))}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32
    width = 0 if pooled is None else pooled.shape[1]
    return Rule(said.logits.shape[1], str(dtype).removeprefix("torch."), recipe.distill.cache_top, width)
