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
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.machine import raise_descriptor_limit
from drumline.data.classes import numbers
from drumline.data.reading import open_error, open_regular
from drumline.data.sources.base import (
    MAX_CLASSES,
    DatasetSpec,
    Fault,
    FaultyData,
    Images,
    Labels,
    MappedFiles,
    NameBlock,
    NoEvalSplit,
    NoTrainSplit,
)
from drumline.data.sources.divide import holdout_ids, reject_holdout
from drumline.data.sources.folder import EXTENSIONS
from drumline.data.sources.labels import TRAIN, VAL
from drumline.data.sources.packed import MANY_SHARDS
from drumline.data.sources.shards import find_shards, is_pattern, shards_in
from drumline.data.sources.tar import Member, is_tar, members, open_archive

CLASS_NAMES = ("classnames.txt", "classes.txt")
"""Files next to the shards that name the classes, one per line, in the order of their numbers."""
LABEL_KEYS = ("label", "cls", "class", "target", "class_id", "label_name", "class_name")
"""Keys of the label in a .json member, in order of precedence."""
LARGEST_LABEL = 1 << 20
"""Maximum bytes of a .cls or .json member."""
_PEEKED = 256
"""Number of members that are read to recognise a tar."""
_NUMBER = re.compile(r"\d{1,18}")
"""A label that is a number. With more digits, it is a name."""


def is_webdataset(path: Path) -> bool:
    """Whether a path is a WebDataset shard, a folder of them (or of `train/` and `val/` with them), or a pattern."""
    if not path.exists():
        return is_pattern(str(path))
    if path.is_file():
        return path.name.lower().endswith(".tar") and _has_keys(path)
    found = shards_in(path)
    return bool(found) and _has_keys(found[0][0])


def is_class_tar(path: Path) -> bool:
    """Whether a path is a tar of class folders, by its name, and because it is not a shard or may be both."""
    return is_tar(path) and (not is_webdataset(path) or _has_folders(path))


def open_webdataset(spec: DatasetSpec) -> WebDatasetFiles:
    """The samples of a split: by `train`, `val` or `test` in shard names, or divided by `holdout` or `folds`."""
    where = Path(spec.path).expanduser()
    shards, remarks = find_shards(spec.path)
    train, evaluation = shards.get(TRAIN, []), shards.get(VAL, [])
    if not train and not spec.whole:
        raise NoTrainSplit(f"{where} has no training shards", fix="name them train-000000.tar, ...")
    # The classes are those of the training shards.
    known = _index_of(train or evaluation, where)
    chosen = _index_of(evaluation, where) if evaluation and (spec.split == "eval" or not train) else known
    numbered = all(map(_NUMBER.fullmatch, known.labels))
    names = _class_names((train or evaluation)[0].parent, known, numbered)
    labels = _labels(chosen, names, numbered, str(where))
    rows = np.arange(len(labels), dtype=np.int64)
    if evaluation:
        reject_holdout(spec, str(where))
    elif spec.whole and where.is_dir() and None not in {split for _, split in shards_in(where)}:
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
        return b"".join((shards, index.places.tobytes(), index.names.tobytes(), self._rows.tobytes()))

    def where(self, sample: int) -> str:
        file, name = self._member(sample)
        return f"{file}:{name}"

    def sample_names(self, samples: NDArray[np.integer]) -> list[str]:
        members = map(self._member, samples.tolist())
        return [f"{file.name}/{name}" for file, name in members]

    def _member(self, sample: int) -> tuple[Path, str]:
        return self._index.files[self._parts[sample]], self._index.names[int(self._rows[sample])]


@dataclass(frozen=True)
class _Index:
    """The locations of the samples in some shards, and remarks about their members."""

    files: list[Path]
    places: NDArray[np.int64]
    """(n, 3): shard, offset and length of each image."""
    names: NameBlock
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


_indexes: WeakValueDictionary[tuple[tuple[Path, int, int], ...], _Index] = WeakValueDictionary()
"""Those of open data sets: the evaluation split needs that of the training shards, too."""


def _index_of(files: list[Path], where: Path) -> _Index:
    """The index of shards."""
    stats = [file.stat() for file in files]
    key = tuple((file, each.st_size, each.st_mtime_ns) for file, each in zip(files, stats, strict=True))
    index = _indexes.get(key)
    if index is None:
        index = _indexes[key] = _index(files, where)
    return index


def _index(files: list[Path], where: Path) -> _Index:
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
    different = sorted(set(labels))
    code = {label: number for number, label in enumerate(different)}
    return _Index(
        files=files,
        places=np.array(places, np.int64),
        names=NameBlock(names),
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
    except (ValueError, RecursionError):
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


def _class_names(folder: Path, index: _Index, numbered: bool) -> tuple[str, ...]:
    """The classes: from the file next to the shards, the names in the labels, or numbers."""
    most = max(map(int, index.labels)) if numbered else 0
    file = next((folder / name for name in CLASS_NAMES if (folder / name).is_file()), None)
    if file is None:
        if most >= MAX_CLASSES:
            raise UserError(f"{folder}: the shards have the label {most}", fix="number the classes 0 to K-1")
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


def _labels(index: _Index, names: tuple[str, ...], numbered: bool, where: str) -> Labels:
    """The number of each sample's class."""
    number = {name: place for place, name in enumerate(names)}
    if numbered:
        known = [label for label in index.labels if _NUMBER.fullmatch(label)]
        number = {label: int(label) for label in known if int(label) < len(names)}
    if unknown := [label for label in index.labels if label not in number]:
        some = ", ".join(repr(label) for label in unknown[:3])
        raise UserError(
            f"{where}: {len(unknown)} of the labels are not classes of the training shards or of the list of class "
            f"names: {some}",
            fix="use the same classes in all shards; the training shards must have every class",
        )
    return np.array([number[label] for label in index.labels], np.int64)[index.codes]


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


def _has_folders(file: Path) -> bool:
    """Whether the images of a tar lie in several folders, as those of classes do."""
    first = ""
    try:
        for member, _, kind in _sample_members(open_archive(file), str(file)):
            folder = member.name.removeprefix("./").rpartition("/")[0]
            if kind == "image" and (not folder or folder != (first := first or folder)):
                return bool(folder)
    except UserError:  # opening it says what is wrong
        pass
    return False
