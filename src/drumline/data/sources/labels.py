"""Image files that a label file names (`data.labels`): a CSV, TSV or Parquet table of paths, labels and splits.

Promises: classes are sorted by name, or by value if all labels are whole numbers; samples are sorted by class, folder
and file name. The order of the rows therefore does not matter, and a file that lists class folders gives the ids and
labels of the folder source. Nothing is dropped silently: files that do not exist, images with two labels or in two
splits, empty labels, unknown splits and evaluation classes without training samples are rejected, all in one error;
repeated rows, rows of an unused split, images without a row and labels that differ only in case are reported.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drumline.core.errors import UserError
from drumline.data.reading import USERS, open_error
from drumline.data.sources.base import (
    DatasetSpec,
    Fault,
    FaultyData,
    Labels,
    NoEvalSplit,
    NoTrainSplit,
)
from drumline.data.sources.divide import holdout_ids, reject_holdout
from drumline.data.sources.folder import EXTENSIONS, Files, FolderDataset
from drumline.data.sources.label_file import ENDINGS, LabelFile, Row, read_label_file

TRAIN, VAL, TEST = "train", "val", "test"
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "eval", "evaluation", "dev"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
"""The values of a split column, in any case. Evaluation uses val, or test if there are no val rows."""
_WHOLE = re.compile(r"[+-]?\d{1,18}(\.0+)?")
"""A label that is a number. With more digits, it is a name."""


def is_labels(path: Path) -> bool:
    """Whether a path is a label file by its name."""
    return path.suffix.lower() in ENDINGS and path.is_file()


def open_labels(spec: DatasetSpec) -> FolderDataset:
    """The samples of a split: those of the column, or of `holdout` and `folds` where there are no evaluation rows."""
    file, root = places(spec)
    table = _Table(read_label_file(file), file, root, walk=bool(spec.labels and spec.path))
    return table.dataset(spec)


def places(spec: DatasetSpec) -> tuple[Path, Path]:
    """The label file, and the folder that its paths are relative to: data.path, or the file's own folder. The folder
    is absolute, because rows may be absolute, too, or lead out of it."""
    path, file = Path(spec.path).expanduser(), Path(spec.labels).expanduser()
    root = path
    if not spec.labels:
        file, root = path, path.parent
    elif not spec.path:
        root = file.parent
    elif not path.is_dir():
        raise UserError(
            f"data.path {spec.path} is not a folder, but data.labels is set",
            fix="give the folder that the paths in the label file are relative to",
        )
    elif not file.exists() and (path / file).is_file():
        raise UserError(
            f"data.labels {spec.labels} does not exist here", fix=f"did you mean data.labels={path / file}?"
        )
    return file, Path(os.path.abspath(root))  # noqa: PTH100 (resolve() would follow links)


@dataclass(frozen=True, slots=True)
class _Image:
    folder: str
    name: str
    label: str
    line: int


class _Table:
    """The rows of a label file, checked and resolved."""

    def __init__(self, content: LabelFile, file: Path, root: Path, walk: bool) -> None:
        self.file, self.root, self.walk = file, root, walk
        self.has_splits = content.has_splits
        self._listings: dict[str, _Listing] = {}
        rows, unknown, unused = _by_split(content)
        faults = [
            self._lines("unknown-split", "rows with an unknown split (use train, val or test)", unknown)
        ]
        every = [row for part in rows.values() for row in part]
        faults.append(
            self._lines("no-label", "rows without a label", [(row, "") for row in every if not row.label])
        )
        faults.append(
            self._lines("no-path", "rows without a path", [(row, "") for row in every if not row.path])
        )
        self.images, repeated, resolving = self._resolve(
            {split: [row for row in part if row.label and row.path] for split, part in rows.items()}
        )
        faults += resolving
        trained = self.images[TRAIN] or self.images[VAL]
        names = {image.label for image in trained}
        self.classes, mapped, same = _class_names(names)
        faults.append(
            Fault(
                "two-names",
                "labels that are the same number, written differently",
                [(str(file), each) for each in same],
            )
        )
        strange = Counter(image.label for image in self.images[VAL] if image.label not in names)
        faults.append(
            Fault(
                "unknown-class",
                "classes with evaluation rows but no training rows",
                [(str(file), f"{name!r} (rows: {count:,})") for name, count in sorted(strange.items())],
            )
        )
        self._label_of = {name: number for number, each in enumerate(self.classes) for name in mapped[each]}
        dropped = self._lines(
            "repeated-row", "rows that repeat the image of an earlier row, dropped", repeated
        )
        if faults := [fault for fault in faults if fault.items]:
            nothing = (
                every and not any(self.images.values()) and [each.kind for each in faults] == ["missing"]
            )
            fix = {"fix": self._right_folder(every[0].path)} if nothing else {}
            raise FaultyData.of(str(file), faults, [dropped], **fix)
        self.remarks = (
            dropped,
            self._lines("left-out", "rows with the split test, left out because there are val rows", unused),
            self._unlisted(unused),
            Fault(
                "case",
                "labels that differ only in case",
                [(str(file), each) for each in _same_letters(names)],
            ),
        )

    def dataset(self, spec: DatasetSpec) -> FolderDataset:
        """The samples of the spec's split."""
        train, evaluation = self.images[TRAIN], self.images[VAL]
        if not train and not spec.whole:
            raise NoTrainSplit(f"{self.file} has no rows with the split train", fix="add training rows")
        if evaluation:
            reject_holdout(spec, str(self.file))
            return self._made(evaluation if spec.split == "eval" or not train else train, None)
        if spec.whole and self.has_splits:
            raise NoEvalSplit(
                f"{self.file} has only rows with the split train",
                fix="set the split of the rows to score to val, or remove the split column to score all rows",
            )
        return self._made(train, spec)

    def _made(self, images: list[_Image], divided: DatasetSpec | None) -> FolderDataset:
        key = sorted((self._label_of[each.label], each.folder, each.name) for each in images)
        labels: Labels = np.array([label for label, _, _ in key], np.int64)
        groups: list[tuple[str, list[str]]] = []
        last = (-1, "")
        for label, folder, name in key:
            if (label, folder) != last:
                groups.append((folder, []))
                last = (label, folder)
            groups[-1][1].append(name)
        rows = np.arange(len(labels), dtype=np.int64)
        if divided is not None:
            rows = holdout_ids(labels, divided, str(self.file))
        made = FolderDataset(labels[rows], self.classes, Files(groups), rows, Counter(), "labels")
        made.remarks = tuple(fault for fault in self.remarks if fault.items)
        return made

    def _lines(self, kind: str, what: str, rows: Iterable[tuple[Row, str]]) -> Fault:
        """A fault of whole rows."""
        items = [
            (f"{self.file}, line {row.line}", f"({row.path or 'no path'}{f', {detail}' if detail else ''})")
            for row, detail in rows
        ]
        return Fault(kind, what, items)

    def _resolve(
        self, rows: dict[str, list[Row]]
    ) -> tuple[dict[str, list[_Image]], list[tuple[Row, str]], list[Fault]]:
        """The images of each split, rows that repeat an image, and faults."""
        images: dict[str, list[_Image]] = {TRAIN: [], VAL: []}
        seen: dict[tuple[str, str], tuple[str, Row]] = {}
        repeated: list[tuple[Row, str]] = []
        missing: list[tuple[str, str]] = []
        two_labels: list[tuple[str, str]] = []
        two_splits: list[tuple[str, str]] = []
        unclear: list[tuple[str, str]] = []
        for split, part in rows.items():
            for row in part:
                folder, wanted = os.path.split(self._full(row.path))
                found = self._listing(folder).find(wanted)
                where = os.path.join(folder, wanted)  # noqa: PTH118 (a Path for each row costs more)
                if len(found) != 1:
                    reason = f"(line {row.line})" + (f" may be {' or '.join(found)}" if found else "")
                    (unclear if found else missing).append((where, reason))
                    continue
                key = (folder, found[0])
                first_split, first = seen.setdefault(key, (split, row))
                if first is row:
                    images[split].append(_Image(folder, found[0], row.label, row.line))
                elif first.label != row.label:
                    reason = f"is {first.label!r} in line {first.line} and {row.label!r} in line {row.line}"
                    two_labels.append((where, reason))
                elif first_split != split:
                    two_splits.append((where, f"is in both: lines {first.line} and {row.line}"))
                else:
                    repeated.append((row, f"same as line {first.line}"))
        faults = [
            Fault("missing", "files that do not exist", missing),
            Fault("ambiguous", "paths without an extension that may be several files", unclear),
            Fault("two-labels", "images with two labels", two_labels),
            Fault("two-splits", "images in both the training and the evaluation split", two_splits),
        ]
        return images, repeated, faults

    def _full(self, path: str) -> str:
        if os.sep == "/" and "\\" in path and "/" not in path:
            path = path.replace("\\", "/")
        return os.path.normpath(os.path.join(self.root, os.path.expanduser(path)))  # noqa: PTH111, PTH118

    def _right_folder(self, path: str) -> str:
        """The fix for rows of which no file exists: the folder below which the first one is found."""
        below = (Path(folder) for folder, _, _ in os.walk(self.root))
        for folder in (self.root.parent, *below):
            where, name = os.path.split(folder / path)
            if self._listing(where).find(name):
                return f"paths are relative to data.path: did you mean data.path={folder} data.labels={self.file}?"
        return f"paths are relative to data.path, here {self.root}: give the folder that they begin in"

    def _listing(self, folder: str) -> _Listing:
        if folder not in self._listings:
            self._listings[folder] = _Listing(folder)
        return self._listings[folder]

    def _unlisted(self, unused: list[tuple[Row, str]]) -> Fault:
        """Images without a row, in the folders of the rows and, if data.path is the folder of the images, in all
        folders below the common parent of these."""
        named: dict[str, set[str]] = {}
        for image in (image for part in self.images.values() for image in part):
            named.setdefault(image.folder, set()).add(image.name)
        top = os.path.commonpath(named)
        for row, _ in unused:
            folder, wanted = os.path.split(self._full(row.path))
            named.setdefault(folder, set()).update(self._listing(folder).find(wanted))
        folders = set(named)
        if self.walk and Path(top).is_relative_to(self.root):
            folders |= {folder for folder, _, _ in os.walk(top) if f"{os.sep}." not in folder[len(top) :]}
        items, count = [], 0
        for folder in sorted(folders):
            if rest := self._listing(folder).images() - named.get(folder, set()):
                items.append((folder, f"({len(rest):,}, such as {min(rest)})"))
                count += len(rest)
        return Fault("unlisted", "images without a row", items, count)


class _Listing:
    """The names in a folder; empty if it cannot be listed because it does not exist."""

    def __init__(self, folder: str) -> None:
        self.names: set[str] = set()
        self._stems: dict[str, list[str]] | None = None
        try:
            with os.scandir(folder) as entries:
                self.names = {entry.name for entry in entries if not entry.is_dir()}
        except OSError as error:
            if error.errno not in USERS:
                raise
            if isinstance(error, PermissionError):
                raise open_error(folder, error) from error

    def images(self) -> set[str]:
        return {name for name in self.names if name.lower().endswith(EXTENSIONS) and not name.startswith(".")}

    def find(self, wanted: str) -> list[str]:
        """The file of that name, or the files that have it as their name without the extension."""
        if wanted in self.names:
            return [wanted]
        if self._stems is None:
            self._stems = {}
            for name in sorted(self.images()):
                self._stems.setdefault(os.path.splitext(name)[0], []).append(name)  # noqa: PTH122
        return self._stems.get(wanted, [])


def _by_split(
    content: LabelFile,
) -> tuple[dict[str, list[Row]], list[tuple[Row, str]], list[tuple[Row, str]]]:
    """The training and evaluation rows, rows with an unknown split, and rows that are left out."""
    if not content.has_splits:
        return {TRAIN: content.rows, VAL: []}, [], []
    rows: dict[str, list[Row]] = {TRAIN: [], VAL: [], TEST: []}
    unknown = []
    for row in content.rows:
        split = SPLITS.get(row.split.lower())
        if split is None:
            unknown.append((row, f"split {row.split!r}"))
        else:
            rows[split].append(row)
    test = rows.pop(TEST)
    if rows[VAL]:
        return rows, unknown, [(row, "") for row in test]
    return {TRAIN: rows[TRAIN], VAL: test}, unknown, []


def _same_letters(labels: set[str]) -> list[str]:
    """The labels that are equal except for upper and lower case, as `Tench and tench`."""
    groups: dict[str, list[str]] = {}
    for label in sorted(labels):
        groups.setdefault(label.casefold(), []).append(label)
    return [" and ".join(group) for group in groups.values() if len(group) > 1]


def _class_names(labels: set[str]) -> tuple[tuple[str, ...], dict[str, list[str]], list[str]]:
    """Class names in order, the labels of each, and numbers that are written in two ways. `3.0`, as spreadsheets
    write it, is 3; `007` keeps its zeros."""
    if not labels or not all(_WHOLE.fullmatch(label) for label in labels):
        return tuple(sorted(labels)), {label: [label] for label in labels}, []
    mapped: dict[str, list[str]] = {}
    for label in sorted(labels):
        mapped.setdefault(label.partition(".")[0], []).append(label)
    numbers = Counter(int(name) for name in mapped)
    same = [name for name in sorted(mapped) if numbers[int(name)] > 1]
    return tuple(sorted(mapped, key=lambda name: (int(name), name))), mapped, same
