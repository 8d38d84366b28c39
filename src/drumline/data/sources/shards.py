"""Which files are the shards of a data set: a .tar, a pattern such as `train-{000..099}.tar`, or a folder of them.

Promises: shards come in the order of their names. The split of a shard is a word in its name, or the name of its
folder. A pattern with shards that do not exist is rejected; missing numbers in a series are reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import islice, pairwise, product
from pathlib import Path

from drumline.core.errors import UserError
from drumline.data.sources.base import Fault
from drumline.data.sources.labels import SPLITS, TEST, TRAIN, VAL

MAX_SHARDS = 100_000
"""Most shards that a pattern may expand to."""
_LISTED = 1000
"""Most missing shards that are listed for a series."""
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")


def is_pattern(path: str) -> bool:
    """Whether a path has braces to expand, as in `train-{000..099}.tar`."""
    return path.endswith(".tar") and _BRACES.search(path) is not None


def expand(pattern: str) -> list[str]:
    """The paths of a pattern: `{000..099}` counts, `{train,val}` lists."""
    # Splitting alternates between what is outside braces and what is inside them.
    parts = [_choices(part) if at % 2 else [part] for at, part in enumerate(_BRACES.split(pattern))]
    if math.prod(map(len, parts)) > MAX_SHARDS:
        raise UserError(
            f"data.path {pattern} expands to more than {MAX_SHARDS:,} shards",
            fix="use a pattern of shards that exist, or the folder that holds them",
        )
    return ["".join(each) for each in product(*parts)]


def find_shards(path: str) -> tuple[dict[str | None, list[Path]], list[Fault]]:
    """The shards of each split in the order of their names, and remarks about missing ones. Without splits, all are
    training shards."""
    place = Path(path).expanduser()
    if is_pattern(path) and not place.exists():
        files = [Path(each).expanduser() for each in expand(path)]
        if missing := [str(file) for file in files if not file.is_file()]:
            rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise UserError(
                f"data.path {path}: {len(missing)} of {len(files)} shards do not exist: "
                f"{', '.join(missing[:3])}{rest}",
                fix="copy them, or use a pattern of shards that exist",
            )
        found = [(file, _split_of(file.stem)) for file in files]
    elif place.is_file():
        found = [(place, _split_of(place.stem))]
    else:
        found = shards_in(place)
    if not place.is_dir() and len({split for _, split in found}) == 1:
        found = [(file, None) for file, _ in found]  # shards that are given by name are the whole data
    kinds = {kind for _, kind in found}
    if not found or (None in kinds and len(kinds) > 1):
        odd = next((file.name for file, kind in found if kind is None), "")
        what = f"{odd} has no split in its name, but others have" if odd else "has no .tar shards"
        raise UserError(f"{place}: {what}", fix="name the shards train-000000.tar, ..., val-000000.tar, ...")
    by_split: dict[str | None, list[Path]] = {}
    for file, kind in found:
        by_split.setdefault(kind, []).append(file)
    evaluation = by_split.get(VAL) or by_split.get(TEST, [])
    left_out = by_split.get(TEST, []) if VAL in by_split else []
    shards = {TRAIN: by_split.get(TRAIN, []) or by_split.get(None, []), VAL: evaluation}
    remarks = [
        Fault(
            "missing-shard",
            "shards that are missing in a numbered series",
            [(each, "") for each in _gaps([f for f, _ in found])],
        ),
        Fault(
            "left-out",
            "test shards, left out because there are val shards",
            [(str(f), "") for f in left_out],
        ),
    ]
    return {split: files for split, files in shards.items() if files}, remarks


def shards_in(folder: Path) -> list[tuple[Path, str | None]]:
    """The shards of a folder, or of its subfolders with the names of splits, each with its split."""
    files = _tars(folder)
    if files:
        return [(file, _split_of(file.stem)) for file in files]
    inner = sorted(each for each in folder.iterdir() if each.is_dir() and each.name.lower() in SPLITS)
    return [(file, SPLITS[each.name.lower()]) for each in inner for file in _tars(each)]


def _choices(braces: str) -> list[str]:
    counted = _RANGE.fullmatch(braces)
    if counted is None:
        return braces.split(",")
    low, high = int(counted[1]), int(counted[2])
    return [str(number).zfill(len(counted[1])) for number in range(low, min(high, low + MAX_SHARDS) + 1)]


def _tars(folder: Path) -> list[Path]:
    entries = sorted(folder.iterdir())
    return [each for each in entries if each.name.endswith(".tar") and each.name[0] != "." and each.is_file()]


def _split_of(name: str) -> str | None:
    """The split that a name contains as a word: `imagenet-train-0001` belongs to train."""
    return next((SPLITS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLITS), None)


def _gaps(files: list[Path]) -> list[str]:
    """Names that are missing between the first and the last number of each series."""
    series: dict[tuple[str, int], list[int]] = {}
    for file in files:
        if found := re.fullmatch(r"(.*?)(\d+)", str(file.with_suffix(""))):
            series.setdefault((found[1], len(found[2])), []).append(int(found[2]))
    return [
        f"{start}{number:0{width}}.tar"
        for (start, width), there in sorted(series.items())
        for number in islice(_missing(sorted(there)), _LISTED)
    ]


def _missing(numbers: list[int]) -> Iterator[int]:
    for before, after in pairwise(numbers):
        yield from range(before + 1, after)
