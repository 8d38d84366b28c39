"""Are all processes started alike, and on the same data? (Whether they still hold the same model: `witness.py`.)

Promises: a rank that differs is named, with the fields in which it does, and nobody trains on. What may differ
between machines (paths, workers, interfaces) is left alone.
"""

from __future__ import annotations

import zlib

from drumline.errors import UserError
from drumline.launch.world import World
from drumline.recipe import Recipe
from drumline.recipe_file import differing_fields, dump_recipe
from drumline.state.environment import arithmetic, device_name
from drumline.state.folder import UNSET
from drumline.train.prepare import Sets

OF_THE_MACHINE = frozenset(
    (
        "run.dir",
        "data.path",
        "data.workers",
        "data.pool",
        "data.decode",
        "model.weights",
        "distill.teacher_weights",
        "distill.cache",
        "parallel.processes",
        "parallel.node_rank",
        "parallel.rendezvous",
        "parallel.interface",
        "parallel.threads",
        "parallel.timeout",
    )
)
"""Fields that each machine may set for itself."""


def check_recipes(recipe: Recipe, world: World) -> None:
    """Compares every rank's recipe with rank 0's."""
    if world.size == 1:
        return
    mine = dump_recipe(recipe)
    _refuse_if_any(
        world,
        [
            f"{name} = {value!r} here, {theirs!r} on rank 0"
            for name, value, theirs in different_fields(world.share(mine), mine)
        ],
        "another recipe",
        "start the same command on each machine",
    )


def check_arithmetic(recipe: Recipe, world: World) -> None:
    """In strict mode, compares what decides the bits of a computation: each rank computes shards of its own, and the
    result may not depend on which."""
    if world.size == 1 or not recipe.run.strict:
        return
    mine = {"device": device_name(world.device), **arithmetic(world.device)}
    first: dict[str, str] = world.share(mine)
    odd = [
        f"{name} = {mine.get(name, UNSET)} here, {first.get(name, UNSET)} on rank 0"
        for name in sorted({*mine, *first})
        if mine.get(name) != first.get(name)
    ]
    _refuse_if_any(
        world,
        odd,
        "other arithmetic",
        "run.strict promises the same bits on every rank: give all machines the same kind of device, software and "
        "settings, or leave out --run.strict",
    )


def check_data(sets: Sets, world: World) -> None:
    """Compares the number of samples and their labels."""
    if world.size == 1:
        return
    numbers = [[len(source), zlib.crc32(source.labels.tobytes())] for source in (sets.train, sets.eval)]
    theirs = world.share(numbers)
    names = ("training", "evaluation")
    odd = [
        f"{mine[0]:,} {name} samples here, {first[0]:,} on rank 0"
        + (" (other labels)" if mine[0] == first[0] else "")
        for name, mine, first in zip(names, numbers, theirs, strict=True)
        if mine != first
    ]
    _refuse_if_any(world, odd, "other data", "give every machine the same data (data.path)")


def different_fields(first: str, mine: str) -> list[tuple[str, object, object]]:
    """Fields of two recipe texts that may not differ within a run, with my value and the first's."""
    return [
        (name, value, theirs)
        for name, theirs, value in differing_fields(first, mine)
        if name not in OF_THE_MACHINE
    ]


def _refuse_if_any(world: World, odd: list[str], what: str, fix: str) -> None:
    """Every rank learns whether any of them differs, so all of them stop."""
    counts = world.gather([len(odd)])
    ranks = [rank for rank, (count,) in enumerate(counts) if count]
    if not ranks:
        return
    details = f": {'; '.join(odd)}" if odd else ""
    raise UserError(f"rank(s) {ranks} were started with {what} than rank 0{details}", fix)
