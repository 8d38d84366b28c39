"""How many samples BatchNorm sees at once, and what that means for a run.

Promises: a run whose BatchNorm would see one value per channel ends before its first step and names the field that
decides it, and a remedy; one whose BatchNorm sees few samples warns at the start. In stages the layout itself warns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.config.layouts import STAGED
from drumline.config.recipe import Recipe
from drumline.config.rules import shard_count
from drumline.core.errors import UserError
from drumline.core.text import counted
from drumline.data.feed.sampler import bounds, rank_slice
from drumline.parallel.norm import WorldNorm
from drumline.parallel.pipeline.norm import FEW
from drumline.parallel.world import World
from drumline.train.staged import prepare_shape

_ONE_VALUE = "more than 1 value per channel when training"
"""Of torch's message."""


@dataclass(frozen=True)
class Piece:
    """The smallest part of a global batch that goes through the model at once."""

    samples: int
    why: str
    fix: str


@contextmanager
def one_value_refused(recipe: Recipe, world: World) -> Iterator[None]:
    """Explains torch's refusal to train BatchNorm on one value per channel."""
    try:
        yield
    except ValueError as error:
        cause: BaseException | None = error
        while cause is not None and _ONE_VALUE not in str(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        piece = smallest(recipe, world)
        found = re.search(r"Size\(\[([\d, ]+)\]\)", str(cause))
        given = f", {found[1].replace(', ', ' x ')}" if found else ""
        what = f"BatchNorm cannot train on one value per channel (a sample of 1 x 1 pixels{given})"
        if piece.samples > 1:
            raise UserError(what, "let the model give its BatchNorm layers more than one sample") from error
        raise UserError(f"{piece.why}: {what}", piece.fix) from error


def few_samples(recipe: Recipe, module: nn.Module, world: World) -> str:
    """A warning where BatchNorm has few samples to normalise by; else nothing."""
    if recipe.parallel.layout in STAGED:
        return ""
    norms = sum(
        part.training and isinstance(part, _BatchNorm) and not isinstance(part, WorldNorm | nn.SyncBatchNorm)
        for part in module.modules()
    )
    piece = smallest(recipe, world)
    if not norms or piece.samples >= FEW:
        return ""
    samples = counted(piece.samples, "sample")
    return (
        f"WARNING: {piece.why}: BatchNorm ({counted(norms, 'layer')}) computes its statistics from {samples}, which "
        f"is noisy; {piece.fix}"
    )


def smallest(recipe: Recipe, world: World) -> Piece:
    """As the recipe spreads the global batch over shards, stages or processes."""
    batch, processes, micro = recipe.data.batch, world.size, recipe.train.accumulate
    unit = 2 if recipe.data.mixup or recipe.data.cutmix else 1
    if recipe.run.strict:
        shards = shard_count(recipe)
        samples = batch // shards
        return Piece(
            samples,
            f"run.shards = {shards} makes shards of {samples} of data.batch = {batch}",
            "use fewer --run.shards, a larger --data.batch, or --train.sync_bn",
        )
    if (shape := prepare_shape(recipe, world)) is not None:
        samples = _least(batch, shape.replicas, shape.micro_batches, unit)
        return Piece(
            samples,
            f"parallel.micro_batches = {shape.micro_batches} makes micro-batches of {samples} of data.batch = "
            f"{batch}",
            "use fewer --parallel.micro_batches, a larger --data.batch, or --parallel.batchnorm frozen",
        )
    if recipe.parallel.layout == "dp" and world.device.type == "cuda":
        processes = torch.cuda.device_count()
    samples = _least(batch, processes, micro, unit)
    if micro > 1:
        return Piece(
            samples,
            f"train.accumulate = {micro} makes micro-batches of {samples} of data.batch = {batch}",
            "use a smaller --train.accumulate, or a larger --data.batch",
        )
    if processes > 1:
        return Piece(
            samples,
            f"with data.batch = {batch}, one of {processes} processes gets only {counted(samples, 'sample')}",
            "use a larger --data.batch, fewer processes, or --train.sync_bn",
        )
    return Piece(
        samples,
        f"data.batch = {batch}",
        f"use a larger --data.batch ({FEW} or more), or a model without BatchNorm",
    )


def _least(batch: int, parts: int, micro: int, unit: int) -> int:
    """Samples of the smallest micro-batch of the smallest part."""
    own = min(
        (rank_slice(batch, part, parts, unit) for part in range(parts)),
        key=lambda each: each.stop - each.start,
    )
    cuts = bounds(own.stop - own.start, micro, unit)
    return min(last - first for first, last in pairwise(cuts))
