"""Image files in class folders, in the order of torchvision's ImageFolder.

Promises: classes sorted by name; within a class, folders sorted by path and files by name, links followed; so
sample ids and labels equal ImageFolder's, except that hidden files and folders are left out. Empty classes,
stray images, broken links, loops, a split with other classes, and a folder above or beside the data (class folders
with splits in them, a label file whose labels are not the class folders) are rejected, with path and fix.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import LostError, UserError
from drumline.core.text import either, near
from drumline.data.reading import USERS, NotRegular, not_regular, open_error, patiently, read_whole
from drumline.data.sources.base import (
    NO_LABEL,
    DatasetSpec,
    EncodedDataset,
    Labels,
    NameBlock,
    NoEvalSplit,
    NoTrainSplit,
)
from drumline.data.sources.divide import holdout_ids, reject_holdout
from drumline.data.sources.label_file import ENDINGS, read_label_file

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
EVAL_FOLDERS = ("val", "valid", "validation", "test")
"""The first of these that exists beside `train` is the evaluation split."""
SPLIT_LIKE = ("train", "training", *EVAL_FOLDERS, "testing", "eval", "dev")


class FolderDataset(EncodedDataset):
    """Files on disk, from class folders or a label file. Holds one block of file names, not a million strings: 1.28
    million files take about 50 MB. Each process that reads it scans the folders itself, which takes some 1.4 s for as
    many."""

    def __init__(
        self,
        labels: Labels,
        classes: tuple[str, ...],
        files: Files,
        rows: NDArray[np.int64],
        others: Counter[str],
        name: str = "folder",
    ) -> None:
        super().__init__(name, labels, classes)
        self._files, self._rows, self.skipped = files, rows, others

    def read(self, sample: int) -> bytes:
        path = self.where(sample)
        try:
            return patiently(lambda: read_whole(path), path)
        except NotRegular as error:  # it was a file when the folders were scanned
            raise LostError(error.what, error.fix) from error

    def where(self, sample: int) -> str:
        return self._files.path(int(self._rows[sample]))

    def names(self) -> bytes:
        files = self._files
        folders = "\0".join(files.folders).encode("utf-8", "surrogateescape")
        return b"".join((folders, files.names.tobytes(), files.folder_of.tobytes(), self._rows.tobytes()))

    def sample_names(self, samples: NDArray[np.integer]) -> list[str]:
        return [self._files.path(row)[self._below :] for row in self._rows[samples].tolist()]

    @cached_property
    def _below(self) -> int:
        """Where in a path the set's own names begin."""
        return len(os.path.commonpath(self._files.folders).rstrip(os.sep)) + 1

    def sample_sizes(self, samples: NDArray[np.integer]) -> list[int]:
        return [_size(self.where(sample)) for sample in samples.tolist()]

    def file_paths(self, samples: NDArray[np.integer]) -> list[bytes]:
        return [os.fsencode(self._files.path(row)) for row in self._rows[samples].tolist()]


def open_folder(spec: DatasetSpec) -> FolderDataset:
    """The files of a split: `train/` and `val/` (or valid, validation, test) below the path, or class folders
    alone, divided by `holdout`."""
    path = str(Path(spec.path).expanduser())
    train_root, eval_root = _layout(path, spec.whole)
    if train_root == path:
        _reject_label_file(path)
    classes = _class_folders(train_root)
    if eval_root is None:
        if spec.split == "eval" and train_root == str(Path(path, "train")):
            _reject_misspelt(path, spec.divides)
            if spec.whole:
                raise NoEvalSplit(
                    f"{path} has a folder 'train' but no evaluation split",
                    fix=f"give the folder to score, for example data.path={train_root} for the training images",
                )
        elif spec.split == "eval" and not (spec.whole or spec.divides):
            _reject_part(path)
        files, labels, others = _scan(train_root, classes, classes)
        rows = holdout_ids(labels, spec, path)
        return FolderDataset(labels[rows], tuple(classes), files, rows, others)
    reject_holdout(spec, path)
    root, names = train_root, classes
    if spec.split == "eval":
        root, names = eval_root, _class_folders(eval_root)
        if extra := sorted(set(names) - set(classes)):
            raise UserError(
                f"{eval_root} has the class folder {extra[0]!r}, but {train_root} has none of that name",
                fix="use the same class names in both; the training split must have every class",
            )
    files, labels, others = _scan(root, names, classes)
    return FolderDataset(labels, tuple(classes), files, np.arange(len(labels)), others)


def open_unlabelled_folder(root: Path) -> FolderDataset:
    """All images below a folder, in the order of their paths, without labels."""
    others: Counter[str] = Counter()
    files = Files(sorted(_walk(str(root), others)))
    rows = np.arange(len(files.folder_of), dtype=np.int64)
    if not len(rows):
        kinds = f"; its files end in {_some(sorted(others))}" if others else ""
        raise UserError(f"{root} has no images{kinds}", fix=f"add images ({' '.join(EXTENSIONS)})")
    return FolderDataset(np.full(len(rows), NO_LABEL), (), files, rows, others)


class Files:
    """Paths as folders and names: path i is folders[folder_of[i]] / names[i]."""

    def __init__(self, folders: Sequence[tuple[str, list[str]]]) -> None:
        self.folders = [folder for folder, _ in folders]
        counts = [len(names) for _, names in folders]
        self.folder_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self.names = NameBlock(name for _, names in folders for name in names)

    def path(self, row: int) -> str:
        return f"{self.folders[self.folder_of[row]]}{os.sep}{self.names[row]}"


def _layout(path: str, whole: bool) -> tuple[str, str | None]:
    """The folder that holds the training classes, and the one of the evaluation classes if there is one. With
    `whole`, an evaluation split alone is enough."""
    folders = [entry.name for entry in _entries(path) if entry.is_dir()]
    evaluation = next((name for name in EVAL_FOLDERS if name in folders), None)
    train = str(Path(path, "train"))
    if "train" in folders and not _entries(train):
        raise UserError(f"{train} is empty", fix="store the images of each class as train/CLASS/IMAGE")
    # A class may be called "train" (CIFAR-100 has one): then it holds images, and no split lies beside it.
    if "train" in folders and (evaluation or any(entry.is_dir() for entry in _entries(train))):
        return train, str(Path(path, evaluation)) if evaluation else None
    for name in folders:
        if name.lower() in SPLIT_LIKE and any(entry.is_dir() for entry in _entries(str(Path(path, name)))):
            if whole and evaluation:
                return str(Path(path, evaluation)), None
            raise NoTrainSplit(
                f"{path} has a folder {name!r} that looks like a split, but no folder 'train' with classes",
                fix="name the two splits train and val; or, if it is a class, rename that class",
            )
    return path, None


def _reject_misspelt(path: str, divides: bool) -> None:
    """Rejects a folder beside `train` with a misspelt name of an evaluation split, which would be ignored."""
    for entry in _entries(path):
        meant = near(entry.name, EVAL_FOLDERS)
        if meant and entry.is_dir() and any(inner.is_dir() for inner in _entries(entry.path)):
            kind = UserError if divides else NoEvalSplit
            raise kind(
                f"{path} has no evaluation split: is {entry.name!r} meant to be {meant[0]}?",
                fix=f"rename it to {meant[0]}{' and remove data.holdout' if divides else ''}, or move it elsewhere"
                + ("" if divides else " and add --data.holdout 0.1"),
            )


def _reject_part(path: str) -> None:
    """Rejects the folder of a training split whose evaluation split lies beside it."""
    here = Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would follow links)
    beside = [name for name in EVAL_FOLDERS if here.name == "train" and here.with_name(name).is_dir()]
    if beside:
        above = Path(path).parent if Path(path).name == "train" else here.parent
        raise NoEvalSplit(
            f"{path} has no evaluation split, but {beside[0]!r} lies beside it",
            fix=f"did you mean data.path={above}? To set a part of the training images aside instead, add "
            "--data.holdout 0.1",
        )


def _reject_label_file(path: str) -> None:
    """Rejects a folder in which a label file, and not the names of the folders, says what the images are."""
    entries = _entries(path)
    folders = {entry.name for entry in entries if entry.is_dir()}
    for entry in sorted(entries, key=lambda each: each.name):
        if not entry.name.lower().endswith(ENDINGS) or not entry.is_file():
            continue
        try:
            rows = read_label_file(Path(entry.path)).rows
        except UserError:
            continue  # a table of something else
        if not any(row.label in folders for row in rows):
            raise UserError(
                f"{path} has the label file {entry.name!r}, and its labels are not the names of the folders",
                fix=f"did you mean data.labels={entry.path}? If the folders are the classes, move the file elsewhere",
            )


def _reject_nested(root: str, found: dict[str, list[tuple[str, list[str]]]]) -> None:
    """Rejects class folders that are data sets themselves: they hold folders named as splits, with class folders of
    images. Each then has a depth of two or more below the class folder."""
    meant: dict[str, str] = {}
    for name, folders in found.items():
        for folder, images in folders if len(folders) > 1 else ():
            parts = Path(folder).relative_to(root).parts
            at = next((at for at, part in enumerate(parts[1:-1], 1) if part.lower() in SPLIT_LIKE), 0)
            if at and images:
                meant.setdefault(name, str(Path(root, *parts[:at])))
                break
    if meant:
        name, inner = next(iter(meant.items()))
        raise UserError(
            f"{root} is above the data: its folder {name!r} is not a class but holds a data set with splits: {inner}",
            fix=f"did you mean {either([f'data.path={each}' for each in list(meant.values())[:3]])}?",
        )


def _class_folders(root: str) -> list[str]:
    """Sorted names of the class folders. Rejects images that belong to none."""
    classes: list[str] = []
    images: list[str] = []
    for entry in _entries(root):
        if _is_folder(entry):
            classes.append(entry.name)
        elif entry.name.lower().endswith(EXTENSIONS):
            images.append(entry.name)
    if images and not classes:
        raise UserError(
            f"{root} holds images ({_some(images)}) but no class folders",
            fix="put the images of each class into a folder of its own: CLASS/IMAGE",
        )
    if not classes:
        raise UserError(
            f"{root} has no class folders",
            fix="give the folder that holds train/CLASS/IMAGE and val/CLASS/IMAGE, or CLASS/IMAGE",
        )
    if images:
        raise UserError(
            f"{root} has images beside its class folders ({_some(images)}); they belong to no class",
            fix="move them into a class folder or out of the data",
        )
    return sorted(classes)


def _scan(root: str, names: list[str], classes: list[str]) -> tuple[Files, Labels, Counter[str]]:
    """All images of the class folders `names`, labelled by their place among `classes`; and other files' endings."""
    folders: list[tuple[str, list[str]]] = []
    labels: list[NDArray[np.int64]] = []
    number = {name: i for i, name in enumerate(classes)}
    others: Counter[str] = Counter()
    unknowns: dict[str, Counter[str]] = {name: Counter() for name in names}
    walked = {name: sorted(_walk(str(Path(root, name)), unknowns[name])) for name in names}
    _reject_nested(root, walked)
    for name, found in walked.items():
        unknown = unknowns[name]
        count = sum(len(images) for _, images in found)
        if count == 0:
            kinds = f"; its files end in {_some(sorted(unknown))}" if unknown else ""
            raise UserError(
                f"class {name!r} has no images: {Path(root, name)}{kinds}",
                fix=f"add images ({' '.join(EXTENSIONS)}) or remove the folder",
            )
        folders += found
        labels.append(np.full(count, number[name], dtype=np.int64))
        others += unknown
    return Files(folders), np.concatenate(labels), others


def _walk(top: str, unknown: Counter[str]) -> Iterator[tuple[str, list[str]]]:
    """Every folder from `top` down with its sorted image names; notes other files' endings in `unknown`."""
    pending: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    while pending:
        folder, above = pending.pop()
        entries = _entries(folder)
        status = Path(folder).stat()
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            raise UserError(f"{folder} is a link to a folder that contains it", fix="remove that link")
        images: list[str] = []
        for entry in entries:
            known = entry.name.lower().endswith(EXTENSIONS)
            if known and entry.is_file(follow_symlinks=False):  # nearly always, and without a system call
                images.append(entry.name)
            elif _is_folder(entry):
                pending.append((entry.path, above | {identity}))
            elif not known:
                unknown[file_ending(entry.name)] += 1
            elif entry.is_file():
                images.append(entry.name)
            else:
                raise not_regular(entry.path, entry.stat().st_mode)
        yield folder, sorted(images)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is left out by its name: a hidden one, or what macOS adds to its archives."""
    return name.startswith(".") or name == "__MACOSX"


def file_ending(name: str) -> str:
    """The ending of a file's name, or the name if it has none."""
    return Path(name).suffix.lower() or name


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """What a folder holds, without hidden entries."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not is_hidden(entry.name)]
    except OSError as error:
        if isinstance(error, NotADirectoryError):
            raise UserError(
                f"{folder} is a file, not a folder", fix="give the folder that holds the class folders"
            ) from error
        raise open_error(folder, error) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder or a link to one. Rejects a broken link."""
    if entry.is_symlink():
        try:
            return stat.S_ISDIR(entry.stat().st_mode)
        except OSError as error:
            if error.errno not in USERS:
                raise
            raise UserError(
                f"{entry.path} is a broken link to {Path(entry.path).readlink()} ({error.strerror})",
                fix="restore the target or remove the link",
            ) from error
    return entry.is_dir()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 (a Path object for each sample costs more than the call)
    except OSError:
        return -1  # reading it will say why


def _some(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
