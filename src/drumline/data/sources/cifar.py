"""CIFAR-10 and CIFAR-100 as published: the Python version (pickles) and the binary version.

Promises: pickles are read without running anything in them; every file's size and labels are checked; sample
order is that of the files (data_batch_1 to 5). Refuses missing or damaged files by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drumline.core.errors import UserError
from drumline.data.reading import read_whole, refused
from drumline.data.sources.base import ArrayDataset, DatasetSpec, Images, Labels
from drumline.data.sources.plain_pickle import PlainArray, read_plain_pickle, text

PIXELS = 3 * 32 * 32
MAX_FILE = 256 << 20
"""The largest file of the published sets has 155 MB."""
_AGAIN = "download the file again from the data set's authors"


def open_cifar(spec: DatasetSpec) -> ArrayDataset:
    """The images of a split. The path is the folder with the files, or the one that holds
    `cifar-10-batches-py` and so on; the Python version wins where both are."""
    edition, folder = _found(spec.source, spec.path)
    names = edition.train_files if spec.split == "train" else edition.eval_files
    parts = [_read(_present(folder / name), edition) for name in names]
    planes = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([part_labels for _, part_labels in parts])
    images = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return ArrayDataset(spec.source, images, labels, _class_names(folder, edition))


def has_cifar(source: str, path: str) -> bool:
    """Whether a path holds any version of `cifar10` or `cifar100`."""
    return any(_locate(edition, path) is not None for edition in _EDITIONS[source])


@dataclass(frozen=True)
class _Edition:
    """One published form of the data set."""

    folder: str
    train_files: tuple[str, ...]
    eval_files: tuple[str, ...]
    names_file: str
    classes: int
    label_key: str = ""
    """Where a pickle keeps the labels; empty for the binary version."""
    names_key: str = ""
    label_bytes: int = 1
    """Binary version: bytes before the pixels; the last one is the label (CIFAR-100: coarse, fine)."""


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_EDITIONS: dict[str, tuple[_Edition, ...]] = {
    "cifar10": (
        _Edition(
            "cifar-10-batches-py", _BATCHES, ("test_batch",), "batches.meta", 10, "labels", "label_names"
        ),
        _Edition(
            "cifar-10-batches-bin",
            tuple(f"{name}.bin" for name in _BATCHES),
            ("test_batch.bin",),
            "batches.meta.txt",
            10,
        ),
    ),
    "cifar100": (
        _Edition("cifar-100-python", ("train",), ("test",), "meta", 100, "fine_labels", "fine_label_names"),
        _Edition(
            "cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt", 100, label_bytes=2
        ),
    ),
}


def _locate(edition: _Edition, path: str) -> Path | None:
    """The folder with this edition's files: any of them counts, so that a missing one is named later."""
    base = Path(path).expanduser()
    for folder in (base, base / edition.folder):
        if any((folder / name).is_file() for name in (*edition.train_files, *edition.eval_files)):
            return folder
    return None


def _found(source: str, path: str) -> tuple[_Edition, Path]:
    for edition in _EDITIONS[source]:
        if folder := _locate(edition, path):
            return edition, folder
    wanted = " or ".join(edition.folder for edition in _EDITIONS[source])
    raise UserError(
        f"{path} has no {source} files", fix=f"give the folder that holds {wanted}, or that folder itself"
    )


def _present(file: Path) -> Path:
    if not file.is_file():
        raise UserError(f"{file} is missing", fix="unpack the whole archive of the data set")
    return file


def _read(file: Path, edition: _Edition) -> tuple[Images, Labels]:
    """Pixels (n, 3072), colour planes after one another, and labels of one file."""
    data = _bytes(file)
    pixels, labels = (
        _from_pickle(data, file, edition) if edition.label_key else _from_binary(data, file, edition)
    )
    if len(labels) != len(pixels):
        raise UserError(f"{file} has {len(labels)} labels for {len(pixels)} images", fix=_AGAIN)
    if labels.min() < 0 or labels.max() >= edition.classes:
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"{file} contains the label {worst}, not 0 to {edition.classes - 1}", fix=_AGAIN)
    return pixels, labels


def _from_pickle(data: bytes, file: Path, edition: _Edition) -> tuple[Images, Labels]:
    batch = read_plain_pickle(data, str(file))
    stored, labels = batch.get("data"), batch.get(edition.label_key)
    if not isinstance(stored, PlainArray) or labels is None:
        keys = ", ".join(sorted(batch)) or "nothing"
        raise UserError(f"{file} lacks 'data' or {edition.label_key!r}; it holds {keys}", fix=_AGAIN)
    pixels = stored.integers(f"{file}: 'data'")
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != PIXELS or len(pixels) == 0:
        raise UserError(
            f"{file}: 'data' is {pixels.dtype} of shape {pixels.shape}, not uint8 of shape (n, {PIXELS})",
            fix=_AGAIN,
        )
    if isinstance(labels, PlainArray):
        numbers = labels.integers(f"{file}: {edition.label_key!r}").reshape(-1)
    elif isinstance(labels, list) and all(type(label) is int and abs(label) < 1 << 31 for label in labels):
        numbers = np.array(labels, dtype=np.int64)
    else:
        raise UserError(f"{file}: {edition.label_key!r} is not a list of whole numbers", fix=_AGAIN)
    return pixels.astype(np.uint8, copy=False), numbers.astype(np.int64)


def _from_binary(data: bytes, file: Path, edition: _Edition) -> tuple[Images, Labels]:
    record = edition.label_bytes + PIXELS
    if len(data) == 0 or len(data) % record:
        raise UserError(f"{file} has {len(data)} bytes, not a multiple of {record}", fix=_AGAIN)
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    return records[:, edition.label_bytes :], records[:, edition.label_bytes - 1].astype(np.int64)


def _class_names(folder: Path, edition: _Edition) -> tuple[str, ...]:
    """Names from the file beside the data, or numbers where that file is absent."""
    file = folder / edition.names_file
    if not file.is_file():
        return tuple(str(number) for number in range(edition.classes))
    if edition.names_key:
        stored = read_plain_pickle(_bytes(file), str(file)).get(edition.names_key)
        names = [text(name) for name in stored] if isinstance(stored, list) else []
    else:
        names = [line.strip() for line in text(_bytes(file)).splitlines() if line.strip()]
    if len(set(names)) != edition.classes or len(names) != edition.classes:
        raise UserError(
            f"{file} does not name {edition.classes} different classes", fix=f"{_AGAIN}, or remove it"
        )
    return tuple(names)


def _bytes(file: Path) -> bytes:
    try:
        return read_whole(file, MAX_FILE)
    except OSError as error:
        raise refused(file, error) from error
