"""Checks at the start that all ranks have the same recipe, code and data. (`guards/run/fingerprints.py` checks later
that they hold the same model.)

Promises: every rank stops with the same message, which names a rank that differs and the first difference. Fields
that may differ between machines (`PerMachine` in config/recipe.py) are not compared. Differences that can only change
bits (processors, variables that steer libraries) are warnings, and errors in strict mode.
"""

from __future__ import annotations

from typing import Any

from drumline import native
from drumline.config.fields import recipe_fields
from drumline.config.recipe import Recipe
from drumline.config.toml import differing_fields, dump_recipe
from drumline.core.errors import UserError
from drumline.core.machine import host_name
from drumline.core.text import printable
from drumline.data.classes import Classes
from drumline.data.identity import (
    BLOCK,
    UNREADABLE,
    Identity,
    block_entries,
    first_difference,
    identify,
)
from drumline.data.sources import Dataset, EncodedDataset
from drumline.parallel.world import World
from drumline.state.provenance import changed_environment, describe_environment, software
from drumline.training.sets import Sets


def check_recipes(recipe: Recipe, world: World) -> None:
    """Compares every rank's recipe with rank 0's."""
    if world.size == 1:
        return
    mine = dump_recipe(recipe)
    _reject_if_any(
        world,
        [
            f"{name} is {value}, not {theirs}"
            for name, value, theirs in different_fields(world.broadcast_object(mine), mine)
        ],
        "a different recipe",
        "start the same command on each machine",
    )


def check_software(recipe: Recipe, world: World) -> list[str]:
    """Compares the code and the libraries of every rank with rank 0's. Returns warnings about the bits."""
    if world.size == 1:
        return []
    mine = software(recipe)
    first: dict[str, str] = world.broadcast_object(mine)
    odd = [
        f"{name} is {value}, not {first.get(name)}"
        for name, value in mine.items()
        if value != first.get(name)
    ]
    _reject_if_any(
        world, odd, "different software", "install the same versions, and copy the same code, on each machine"
    )
    here: dict[str, Any] = describe_environment(world.device, world.size, world.backend, threads=0)
    odd = changed_environment(world.broadcast_object(here), here, recipe.run.strict)
    if recipe.run.strict:
        _reject_if_any(
            world,
            odd,
            "a different set-up",
            "run.strict promises the same bits on every rank: give all machines the same device, software and "
            "settings, or leave out --run.strict",
        )
    ours = native.describe()
    if (theirs := world.broadcast_object(ours)) != ours:
        odd.append(f"native part: {theirs} -> {ours}")  # a warning: the pixels are the same
    return [
        f"WARNING: rank {rank} on {host} has a different set-up from rank 0, so the bits depend on which machine "
        f"computes what: {'; '.join(differences)}"
        for rank, (host, differences) in enumerate(world.all_gather_object([host_name(), odd]))
        if differences
    ]


def check_data(sets: Sets, seed: int, world: World) -> dict[str, dict[str, str | int]]:
    """Compares classes, names, sizes and labels of all samples, and the contents of some, between ranks. Returns
    the identity of each set, for checkpoints."""
    found = {}
    for side, source in (("training", sets.train), ("evaluation", sets.eval)):
        mine = identify(source, seed)
        found[side] = mine.summary()
        if world.size == 1:
            continue
        for odd in (_other_samples(source, mine, world), _other_contents(source, mine, world)):
            _reject_if_any(
                world,
                [f"{side} set: {odd}"] if odd else [],
                "different data",
                "give every machine the same data (data.path): copy it again from one machine",
            )
    return found


def _other_samples(source: Dataset, identity: Identity, world: World) -> str:
    """The first difference between this rank's list of samples and rank 0's. Every rank calls it."""
    digests = identity.blocks
    (count, names), first = (
        world.broadcast_object([len(source), Classes.of(source).names]),
        world.broadcast_object(digests),
    )
    pairs = enumerate(zip(digests, first, strict=False))
    # If one list is the beginning of the other, they differ after it.
    block = next((number for number, (a, b) in pairs if a != b), min(len(digests), len(first)))
    alike = digests == first
    blocks = [int(number) for (number,) in world.all_gather_floats([-1 if alike else block])]
    wanted = next((number for number in blocks if number >= 0), None)
    if wanted is None and all(world.all_gather_object(tuple(names) == source.classes)):
        return ""
    theirs = world.broadcast_object(_entries(source, wanted))
    if not alike:
        where = first_difference(_entries(source, block), theirs, block * BLOCK) if block == wanted else ""
        counts = "" if count == len(source) else f"{len(source):,} samples, not {count:,}"
        return "; ".join(filter(None, (counts, where))) or "different samples"
    if tuple(names) != source.classes:
        differ = ((a, b) for a, b in zip(source.classes, names, strict=False) if a != b)
        here, there = next(differ, ("", ""))
        return f"a class is '{printable(here)}', not '{printable(there)}'"
    return ""


def _entries(source: Dataset, block: int | None) -> list[Any]:
    return [] if block is None else block_entries(source, block)


def _other_contents(source: Dataset, identity: Identity, world: World) -> str:
    """The first of the chosen samples whose content is not rank 0's. Every rank calls it."""
    first: list[str] = world.broadcast_object(identity.contents)
    for sample, here, there in zip(identity.chosen, identity.contents, first, strict=False):
        if here != there:
            name = printable(source.where(sample)) if isinstance(source, EncodedDataset) else "its pixels"
            how = "cannot be read here" if here == UNREADABLE else "differs from rank 0"
            return f"sample {sample:,} ({name}) {how}"
    return ""


def different_fields(first: str, mine: str) -> list[tuple[str, str, str]]:
    """Fields of two recipe texts that must not differ within a run, with my value and the first one's."""
    return [
        (name, value, theirs)
        for name, theirs, value in differing_fields(first, mine)
        if recipe_fields()[name].per_machine is None
    ]


def _reject_if_any(world: World, odd: list[str], what: str, fix: str) -> None:
    """Stops all ranks with the same message if any of them differs from rank 0."""
    every: list[list[Any]] = world.all_gather_object([host_name(), odd])
    ranks = [rank for rank, (_, differences) in enumerate(every) if differences]
    if not ranks:
        return
    host, differences = every[ranks[0]]
    others = f" (and so do ranks {', '.join(map(str, ranks[1:]))})" if ranks[1:] else ""
    raise UserError(
        f"rank {ranks[0]} on {host} has {what} from rank 0{others}: {'; '.join(differences)}", fix
    )
