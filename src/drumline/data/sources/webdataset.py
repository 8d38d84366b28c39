"""WebDataset shards: uncompressed tars in which members share a key, `KEY.jpg` with `KEY.cls` or `KEY.json`.

Promises: shards are indexed, not streamed, so any sample can be read at any time, and epochs are ordered as for every
other source. Sample ids follow the names of the shards and the order of the members. A key ends at the first dot of a
file's name. An image without a label, or a label without an image, is left out and reported. A key that repeats in a
shard, a label that cannot be read, and a shard of a pattern that does not exist are rejected. Nothing is written to
disk.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.machine import raise_descriptor_limit
from drumline.data.classes import numbers
from drumline.data.reading import open_error, open_regular
from drumline.data.sources.base import (
    DatasetSpec,
    Fault,
    FaultyData,
    Images,
    Labels,
    MappedFiles,
    NoEvalSplit,
    NoTrainSplit,
)
from drumline.data.sources.divide import holdout_ids, reject_holdout
from drumline.data.sources.folder import EXTENSIONS
from drumline.data.sources.labels import SPLITS, TEST, TRAIN, VAL
from drumline.data.sources.packed import MANY_SHARDS
from drumline.data.sources.tar import Member, is_tar, members, open_archive

CLASS_NAMES = ("classnames.txt", "classes.txt")
"""Files next to the shards that name the classes, one per line, in the order of their numbers."""
LABEL_KEYS = ("label", "cls", "class", "target", "class_id", "label_name", "class_name")
"""Keys of the label in a .json member, in order of precedence."""
LARGEST_LABEL = 1 << 20
"""Maximum bytes of a .cls or .json member."""
_PEEKED = 256
"""Number of members that are read to recognise a tar."""
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def is_webdataset(path: Path) -> bool:
    """Whether a path is a WebDataset shard, a folder of them (or of `train/` and `val/` with them), or a pattern."""
    if not path.exists():
        return is_pattern(str(path))
    if path.is_file():
        return path.name.lower().endswith(".tar") and _has_keys(path)
    found = _in_folder(path)
    return bool(found) and _has_keys(found[0][0])


def is_class_tar(path: Path) -> bool:
    """Whether a path is a tar of class folders, by its name and because it is not a shard."""
    return is_tar(path) and not is_webdataset(path)


def is_pattern(path: str) -> bool:
    """Whether a path has braces to expand, as in `train-{000..099}.tar`."""
    return path.endswith(".tar") and _BRACES.search(path) is not None


def expand(pattern: str) -> list[str]:
    """The paths of a pattern: `{000..099}` counts, `{train,val}` lists."""
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    first, last = _RANGE.fullmatch(found[1]), found[1].split(",")
    if first is not None:
        low, high = first[1], first[2]
        last = [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    ends = expand(pattern[found.end() :])
    return [f"{pattern[: found.start()]}{each}{end}" for each, end in itertools.product(last, ends)]


def open_webdataset(spec: DatasetSpec) -> WebDatasetFiles:
    """The samples of a split: by `train`, `val` or `test` in shard names, or divided by `holdout` or `folds`."""
    where = Path(spec.path).expanduser()
    shards, remarks = _shards(spec.path)
    train, evaluation = shards.get(TRAIN, []), shards.get(VAL, [])
    if not train and not spec.whole:
        raise NoTrainSplit(f"{where} has no training shards", fix="name them train-000000.tar, ...")
    # The classes are those of the training shards.
    known = _index_of(train or evaluation, where)
    chosen = _index_of(evaluation, where) if evaluation and (spec.split == "eval" or not train) else known
    names = _class_names((train or evaluation)[0].parent, known)
    labels = _labels(chosen, names, str(where))
    rows = np.arange(len(labels), dtype=np.int64)
    if evaluation:
        reject_holdout(spec, str(where))
    elif spec.whole and where.is_dir() and None not in {split for _, split in _in_folder(where)}:
        raise NoEvalSplit(
            f"{where} has only training shards",
            fix=f"give the shards to score by name, for example data.path={train[0]}",
        )
    else:
        rows = holdout_ids(labels, spec, str(where))
    source = WebDatasetFiles(chosen, labels, names, rows)
    source.remarks = [fault for fault in (*remarks, *chosen.remarks) if fault.items]
    return source


class WebDatasetFiles(MappedFiles):
    """The images of shards. Each process that opens them reads all headers; `drumline pack` makes a set that opens at
    once."""

    def __init__(
        self, index: _Index, labels: Labels, classes: tuple[str, ...], rows: NDArray[np.int64]
    ) -> None:
        if len(index.files) > MANY_SHARDS:
            raise_descriptor_limit()
        parts, offsets, lengths = index.places[rows].T
        super().__init__("webdataset", labels[rows], classes, index.files, parts, offsets, lengths)
        self._index, self._rows = index, rows

    def names(self) -> bytes:
        index = self._index
        shards = "\0".join(file.name for file in index.files).encode("utf-8", "surrogateescape")
        return b"".join(
            (shards, index.places.tobytes(), index.names, index.ends.tobytes(), self._rows.tobytes())
        )

    def where(self, sample: int) -> str:
        return f"{self._index.files[self._parts[sample]]}:{self._name(sample)}"

    def sample_names(self, samples: NDArray[np.integer]) -> list[str]:
        return [
            f"{self._index.files[self._parts[each]].name}/{self._name(each)}" for each in samples.tolist()
        ]

    def _name(self, sample: int) -> str:
        row, ends = int(self._rows[sample]), self._index.ends
        start = int(ends[row - 1]) if row else 0
        return self._index.names[start : int(ends[row])].decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class _Index:
    """The locations of the samples in some shards, and remarks about their members."""

    files: list[Path]
    places: NDArray[np.int64]
    """(n, 3): shard, offset and length of each image."""
    names: bytes
    """The images' names, concatenated."""
    ends: NDArray[np.int64]
    labels: list[str]
    """The different labels, sorted."""
    codes: NDArray[np.int64]
    """The index of each sample's label in `labels`."""
    remarks: tuple[Fault, ...]


@dataclass
class _Group:
    """The members of a key."""

    image: Member | None = None
    cls: Member | None = None
    json: Member | None = None


@dataclass
class _Odd:
    """Problems in shards: where, and what."""

    repeated: list[tuple[str, str]] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    incomplete: list[tuple[str, str]] = field(default_factory=list)
    scattered: list[tuple[str, str]] = field(default_factory=list)


def _index_of(files: list[Path], where: Path) -> _Index:
    """The index of shards. Cached, because both splits need that of the training shards."""
    stats = [file.stat() for file in files]
    return _index(tuple(files), tuple((each.st_size, each.st_mtime_ns) for each in stats), where)


@lru_cache(maxsize=2)
def _index(files: tuple[Path, ...], _: tuple[tuple[int, int], ...], where: Path) -> _Index:
    """Reads the headers of all shards, and the labels."""
    odd, found = _Odd(), list[tuple[str, str, tuple[int, int, int]]]()
    for part, file in enumerate(files):
        archive = open_archive(file)
        for key, group in _groups(archive, file, odd).items():
            held = group.cls or group.json
            if group.image is None or held is None:
                missing = "has no label" if group.image else "has no image"
                odd.incomplete.append((f"{file}:{key}", missing))
                continue
            label, why = _label(archive, held)
            if why:
                odd.unreadable.append((f"{file}:{held.name}", why))
            found.append((label, group.image.name, (part, group.image.offset, group.image.length)))
    remarks = (
        Fault("incomplete", "keys without an image or without a label, left out", odd.incomplete),
        Fault(
            "scattered",
            "keys whose members are not next to each other, which streaming readers cannot use",
            odd.scattered,
        ),
    )
    faults: tuple[Fault, ...] = (
        Fault("repeated-key", "keys with several images, or several labels of one kind", odd.repeated),
        Fault("no-label", "labels that cannot be read", odd.unreadable),
    )
    if faults := tuple(fault for fault in faults if fault.items):
        raise FaultyData.of(str(where), faults, [fault for fault in remarks if fault.items])
    if not found:
        raise UserError(
            f"{files[0]} has no image with a label",
            fix="a sample is KEY.jpg (or .jpeg, .png, ...) with KEY.cls (a number or a name) or KEY.json "
            f"(with one of {', '.join(LABEL_KEYS[:4])})",
        )
    labels, names, places = zip(*found, strict=True)
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    different = sorted(set(labels))
    code = {label: number for number, label in enumerate(different)}
    return _Index(
        files=list(files),
        places=np.array(places, np.int64),
        names=b"".join(encoded),
        ends=np.cumsum([len(name) for name in encoded], dtype=np.int64),
        labels=different,
        codes=np.array([code[label] for label in labels], np.int64),
        remarks=remarks,
    )


def _groups(archive: Images, file: Path, odd: _Odd) -> dict[str, _Group]:
    """The members of each key, in the order of the keys."""
    groups: dict[str, _Group] = {}
    last, scattered = "", set[str]()
    for member, key, kind in _sample_members(archive, str(file)):
        if key != last and key in groups:
            scattered.add(key)
        group, last = groups.setdefault(key, _Group()), key
        if getattr(group, kind) is not None:
            odd.repeated.append((f"{file}:{key}", f"(again as {member.name})"))
        elif member.kind != "file":
            odd.unreadable.append((f"{file}:{member.name}", f"is a {member.kind}, not a file"))
        else:
            setattr(group, kind, member)
    odd.scattered += [(f"{file}:{key}", "") for key in sorted(scattered)]
    return groups


def _sample_members(archive: Images, where: str) -> Iterator[tuple[Member, str, str]]:
    """The members of samples, each with its key and its kind: image, cls or json."""
    for member in members(archive, where):
        folder, _, name = member.name.rpartition("/")
        stem, _, ending = name.partition(".")
        ending = ending.lower()
        kind = "image" if f".{ending}" in EXTENSIONS else ending
        if member.kind != "folder" and stem and kind in ("image", "cls", "json"):
            yield member, f"{folder}/{stem}".lstrip("/"), kind


def _label(archive: Images, member: Member) -> tuple[str, str]:
    """The label in a .cls or .json member, or the reason why there is none."""
    if member.length > LARGEST_LABEL:
        return "", f"has {member.length:,} bytes"
    data = archive[member.offset : member.offset + member.length].tobytes()
    try:
        text = data.decode("utf-8-sig").strip()
        found = _from_json(json.loads(text)) if member.name.lower().endswith(".json") else text
    except ValueError:
        return "", "is not JSON" if member.name.lower().endswith(".json") else "is not UTF-8 text"
    if found.startswith("-") and found[1:].isdecimal():
        return "", f"is {found}, but labels count from 0"
    if not found:
        return "", "is empty" if not text else f"has none of {', '.join(LABEL_KEYS)}"
    return found, ""


def _from_json(value: object) -> str:
    found = (
        next((value[key] for key in LABEL_KEYS if key in value), None) if isinstance(value, dict) else value
    )
    return str(found).strip() if isinstance(found, int | str) and not isinstance(found, bool) else ""


def _class_names(folder: Path, index: _Index) -> tuple[str, ...]:
    """The classes: from the file next to the shards, the names in the labels, or numbers."""
    numbered = all(label.isdecimal() for label in index.labels)
    most = max(map(int, index.labels)) if numbered else 0
    file = next((folder / name for name in CLASS_NAMES if (folder / name).is_file()), None)
    if file is None:
        return numbers(most + 1) if numbered else tuple(index.labels)
    try:
        with open_regular(file) as stream:
            lines = (stream.readall() or b"").decode("utf-8-sig").splitlines()
    except OSError as error:
        raise open_error(file, error) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text", fix="save it in UTF-8") from error
    names = [line.strip() for line in lines if line.strip()]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{file} names {twice[0]!r} twice", fix="give each class a different name")
    if numbered and most >= len(names):
        raise UserError(
            f"{file} has {len(names)} names, but the labels go up to {most}",
            fix="write a line for each class, in the order of the numbers from 0",
        )
    return tuple(names)


def _labels(index: _Index, names: tuple[str, ...], where: str) -> Labels:
    """The number of each sample's class."""
    number = {name: place for place, name in enumerate(names)}
    if all(label.isdecimal() for label in index.labels):
        number = {label: int(label) for label in index.labels if int(label) < len(names)}
    if unknown := [label for label in index.labels if label not in number]:
        some = ", ".join(repr(label) for label in unknown[:3])
        raise UserError(
            f"{where}: {len(unknown)} of the labels are not classes of the training shards or of the list of class "
            f"names: {some}",
            fix="use the same classes in all shards; the training shards must have every class",
        )
    return np.array([number[label] for label in index.labels], np.int64)[index.codes]


def _shards(path: str) -> tuple[dict[str | None, list[Path]], list[Fault]]:
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
        found = _in_folder(place)
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


def _in_folder(folder: Path) -> list[tuple[Path, str | None]]:
    """The shards of a folder, or of its subfolders with the names of splits, each with its split."""
    files = _tars(folder)
    if files:
        return [(file, _split_of(file.stem)) for file in files]
    inner = sorted(each for each in folder.iterdir() if each.is_dir() and each.name.lower() in SPLITS)
    return [(file, SPLITS[each.name.lower()]) for each in inner for file in _tars(each)]


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
        for number in sorted(set(range(min(there), max(there))) - set(there))[:1000]
    ]


def _has_keys(file: Path) -> bool:
    """Whether a tar begins like a shard: with an image and a label of the same key."""
    try:
        archive = open_archive(file)
        found: dict[str, set[str]] = {}
        for member, key, kind in itertools.islice(_sample_members(archive, str(file)), _PEEKED):
            if kind != "json" or not _label(archive, member)[1]:
                found.setdefault(key, set()).add(kind)
    except UserError:  # the tar source reports what is wrong
        return False
    return any(kind == "cls" for kinds in found.values() for kind in kinds) or any(
        kinds == {"image", "json"} for kinds in found.values()
    )
