"""What every dataset has: images or file bytes, labels and class names, by sample id.

Promises: a sample id is a position in its dataset and always means the same image. A `DatasetSpec` is all that a
loader process needs to open the dataset itself.
"""

from __future__ import annotations

import hashlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.text import printable
from drumline.data.image.decode import MAX_BYTES, check_bytes
from drumline.data.reading import open_error, open_regular

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
MAX_CLASSES = 1_000_000
NO_LABEL = -1
"""The label of an image without one."""


@dataclass(frozen=True)
class DatasetSpec:
    """A plain, picklable description of a dataset. Processes open the dataset from it, so no data travels when they
    start."""

    source: str
    """A name in the table `SOURCES`, or `package.module:factory`; never `auto`, which `detect_source` resolves."""
    path: str
    split: Literal["train", "eval"]
    holdout: float = 0.0
    """Fraction set aside for evaluation, for data without an evaluation split."""
    whole: bool = False
    """Use every sample if the data does not have both splits, as `drumline eval` does."""
    labels: str = ""
    """A file with the paths, labels and splits of the images."""
    folds: int = 0
    """Folds of a cross-validation, instead of `holdout`; fold number `fold` is for evaluation."""
    fold: int = 0
    split_seed: int = 0
    """Seed of the division by `holdout` or `folds`."""
    unlabelled: str = ""
    """A folder or tar of images without labels, to add to the split."""

    @property
    def divides(self) -> bool:
        """Whether to take evaluation samples from the training samples."""
        return self.holdout > 0 or self.folds > 0


class Fault(NamedTuple):
    """One kind of problem or remark about a data set."""

    kind: str
    """For `drumline verify`."""
    what: str
    """What the items are: "files that do not exist"."""
    items: Sequence[tuple[str, str]]
    """Where, and what: `a.jpg`, `is in no row`."""
    number: int = 0
    """The count, if one item stands for several."""

    def __str__(self) -> str:
        shown = ", ".join(
            f"{printable(where)} {printable(reason)}".strip() for where, reason in self.items[:3]
        )
        rest = len(self.items) - 3
        count = self.number or len(self.items)
        return f"{self.what}: {count:,} ({shown}{f' and {rest:,} more' if rest > 0 else ''})"


class FaultyData(UserError):
    """Data that cannot be used, with all its faults."""

    faults: tuple[Fault, ...] = ()

    @staticmethod
    def of(
        where: str,
        faults: Sequence[Fault],
        remarks: Sequence[Fault] = (),
        fix: str = "correct these; `drumline verify` lists all of them",
    ) -> FaultyData:
        """The error about these faults. `remarks` are only for `drumline verify`."""
        error = FaultyData(f"{where} cannot be used: {'; '.join(map(str, faults))}", fix, "faulty-data")
        error.faults = (*faults, *remarks)
        return error


class ArrayDataset:
    """Images of one size, in memory or memory-mapped.

    `images` is (N, H, W, C) uint8 with C 1 or 3, `labels` (N,) int64. Read samples through `take`: a dataset
    may hold fewer images than samples (`PooledDataset`).
    """

    def __init__(self, name: str, images: Images, labels: Labels, classes: tuple[str, ...]) -> None:
        assert images.dtype == np.uint8, images.dtype
        assert images.ndim == 4, images.shape
        assert images.shape[3] in (1, 3), images.shape
        assert labels.dtype == np.int64, labels.dtype
        assert len(labels) > 0
        assert NO_LABEL <= labels.min() <= labels.max() < len(classes)
        self.name, self.images, self.labels, self.classes = name, images, labels, classes
        self._check_length()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""
        _, height, width, channels = self.images.shape
        return height, width, channels

    def take(self, ids: NDArray[np.integer]) -> Images:
        """A contiguous copy of these samples, in this order: (n, H, W, C) uint8."""
        return np.ascontiguousarray(self.images[ids])

    @property
    def labelled(self) -> ArrayDataset:
        """Without the images that have no label, which come last."""
        count = int(np.count_nonzero(self.labels != NO_LABEL))
        if count == len(self):
            return self
        return ArrayDataset(self.name, self.images[:count], self.labels[:count], self.classes)

    def _check_length(self) -> None:
        assert len(self.images) == len(self.labels), (len(self.images), len(self.labels))


class PooledDataset(ArrayDataset):
    """Sample i shows image i mod len(images): a dataset of any length in little memory."""

    def take(self, ids: NDArray[np.integer]) -> Images:
        return super().take(np.asarray(ids) % len(self.images))

    def _check_length(self) -> None:
        assert 0 < len(self.images) <= len(self.labels)


class EncodedDataset(ABC):
    """Image files: `read` gives a sample's bytes, `where` its path for messages."""

    skipped: Mapping[str, int] = MappingProxyType({})
    """How many files are not images, by extension."""
    remarks: Sequence[Fault] = ()
    """Remarks about files that were left out or look suspicious."""

    def __init__(self, name: str, labels: Labels, classes: tuple[str, ...]) -> None:
        assert labels.dtype == np.int64, labels.dtype
        assert len(labels) > 0
        assert NO_LABEL <= labels.min() <= labels.max() < len(classes)
        self.name, self.labels, self.classes = name, labels, classes

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, sample: int) -> bytes:
        """The encoded image. Raises a `UserError` for content that cannot be used, and a `LostError` if the system
        still fails after several tries (`reading.py`). Both name the sample."""

    @abstractmethod
    def where(self, sample: int) -> str:
        """The path, or another name, of a sample for messages."""

    def names(self) -> bytes:
        """The names of the samples, in their order, for `digest`."""
        return b""

    def digest(self) -> str:
        """Identifies the samples and their order: equal if ids and labels mean the same files."""
        return hashlib.blake2b(self.labels.tobytes() + self.names(), digest_size=16).hexdigest()

    def sample_names(self, samples: NDArray[np.integer]) -> list[str]:
        """The path of each sample below the root of the dataset; empty if it has none."""
        return [""] * len(samples)

    def sample_sizes(self, samples: NDArray[np.integer]) -> list[int]:
        """The stored size of each sample in bytes; -1 if it is not known."""
        return [-1] * len(samples)

    def file_paths(self, samples: NDArray[np.integer]) -> Sequence[bytes] | None:
        """The file of each sample, as the system writes its path; None if not every sample is a file of its own."""
        return None

    def decoded(self, sample: int) -> Images | None:
        """The pixels, (H, W, C), of a sample that is stored decoded; None if `read` must be decoded."""
        return None


def describe_skipped(source: EncodedDataset) -> str:
    """Which files were skipped, as text; empty if none."""
    endings = sorted(source.skipped.items(), key=lambda each: (-each[1], each[0]))
    if not endings:
        return ""
    some = ", ".join(f"{printable(ending)} {number:,}" for ending, number in endings[:5])
    number = sum(source.skipped.values())
    files = "1 file that is not an image" if number == 1 else f"{number:,} files that are not images"
    return f"{files}, by extension: {some}{', ...' if len(endings) > 5 else ''}"


class MappedFiles(EncodedDataset):
    """Image files inside a few large, memory-mapped files: sample i is `lengths[i]` bytes at `offsets[i]` of file
    `parts[i]`. The caller has checked that every sample is inside its file. If a file is truncated while it is
    mapped, the process ends (SIGBUS)."""

    def __init__(
        self,
        name: str,
        labels: Labels,
        classes: tuple[str, ...],
        files: Sequence[Path],
        parts: NDArray[np.integer],
        offsets: NDArray[np.integer],
        lengths: NDArray[np.integer],
    ) -> None:
        super().__init__(name, labels, classes)
        self._maps = [map_file(file) for file in files]
        self._parts, self._offsets = parts.astype(np.int32), offsets.astype(np.int64)
        self.lengths = lengths.astype(np.int64)
        bases = np.array([mapped.ctypes.data for mapped in self._maps], dtype=np.uint64)
        self._addresses = bases[self._parts] + self._offsets.astype(np.uint64)

    def read(self, sample: int) -> bytes:
        check_bytes(int(self.lengths[sample]), self.where(sample))
        return self.view(sample).tobytes()

    def sample_sizes(self, samples: NDArray[np.integer]) -> list[int]:
        return self.lengths[samples].tolist()

    def view(self, sample: int) -> Images:
        """The stored bytes of a sample: neither copied nor checked. Do not write to them."""
        start = int(self._offsets[sample])
        return self._maps[self._parts[sample]][start : start + int(self.lengths[sample])]

    def pointers(self, ids: NDArray[np.integer]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Address and length of each sample's stored bytes, for native code; valid while the dataset exists."""
        return self._addresses[ids], self.lengths[ids]

    def sound_jpegs(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of these samples native code may decode as JPEG files: those within the size limit."""
        within: NDArray[np.bool_] = self.lengths[ids] <= MAX_BYTES
        return within

    def read_ahead(self, ids: NDArray[np.integer]) -> None:
        """Asks the system to start reading these samples from disk. Returns at once."""
        for part, start, length in zip(
            self._parts[ids].tolist(), self._offsets[ids].tolist(), self.lengths[ids].tolist(), strict=True
        ):
            memory = self._maps[part].base
            if length and isinstance(memory, memoryview) and isinstance(memory.obj, mmap.mmap):
                first = start - start % mmap.PAGESIZE
                memory.obj.madvise(mmap.MADV_WILLNEED, first, start + length - first)


class NameBlock:
    """Names in one block of bytes: a million of them are not a million strings."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._block, self._ends = (
            b"".join(encoded),
            np.cumsum([len(name) for name in encoded], dtype=np.int64),
        )

    def __getitem__(self, row: int) -> str:
        start = int(self._ends[row - 1]) if row else 0
        return self._block[start : int(self._ends[row])].decode("utf-8", "surrogateescape")

    def tobytes(self) -> bytes:
        return self._block + self._ends.tobytes()


Dataset = ArrayDataset | EncodedDataset


def known_labels(dataset: Dataset) -> Labels:
    """The labels of the samples that have one."""
    return dataset.labels[dataset.labels != NO_LABEL]


class NoEvalSplit(UserError):
    """The data has no evaluation split, and data.holdout is 0."""


class NoTrainSplit(UserError):
    """The data has an evaluation split but no training split."""


def map_file(file: Path) -> Images:
    """A whole file as read-only bytes, loaded by the system on access."""
    try:
        with open_regular(file) as stream:
            if stream.seek(0, 2) == 0:  # an empty file cannot be mapped
                return np.empty(0, dtype=np.uint8)
            return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except OSError as error:
        raise open_error(file, error) from error


def image_array(images: NDArray[Any], what: str) -> Images:
    """Images as contiguous (N, H, W, C). Takes NHW, NHWC and NCHW."""
    if images.dtype != np.uint8:
        convert = (
            "for values from 0 to 1: np.clip(np.rint(x * 255), 0, 255).astype(np.uint8)"
            if images.dtype.kind == "f"
            else "after making sure that all values are from 0 to 255: x.astype(np.uint8)"
        )
        raise UserError(f"{what} is {images.dtype}, but images must be uint8", fix=f"convert them, {convert}")
    shape = images.shape
    if images.ndim not in (3, 4):
        raise UserError(
            f"{what} has the shape {shape}, which is not a stack of images",
            fix="reshape it to (N, H, W) or (N, H, W, C)",
        )
    if 0 in shape:
        raise UserError(f"{what} is empty: its shape is {shape}", fix="give at least one image")
    if images.ndim == 3:
        return np.ascontiguousarray(images[..., None])
    last, first = shape[3] in (1, 3), shape[1] in (1, 3)
    if last and first:
        raise UserError(
            f"{what} has the shape {shape}, which may be NHWC or NCHW",
            fix="drop the axis of a single channel, or pad the images so that no side is 1 or 3",
        )
    if not last and not first:
        raise UserError(
            f"{what} has the shape {shape}: no axis of 1 or 3 channels, neither last nor second",
            fix="give grey or RGB images as (N, H, W), (N, H, W, 3) or (N, 3, H, W)",
        )
    return np.ascontiguousarray(images if last else images.transpose(0, 2, 3, 1))


def label_array(labels: NDArray[Any], count: int, what: str) -> Labels:
    """Labels as (N,) int64. Takes (N,) and (N, 1) integers that are not negative."""
    if labels.ndim == 2 and labels.shape[1] > 1 and labels.shape[0] == count:
        raise UserError(
            f"{what} has the shape {labels.shape}: one row of numbers for each image, not one label",
            fix="for one-hot rows use labels.argmax(axis=1)",
        )
    if labels.size == 0:
        raise UserError(f"{what} is empty", fix="give at least one sample")
    if labels.dtype.kind not in "iu":
        raise UserError(
            f"{what} is {labels.dtype}, but labels must be integers",
            fix="number the classes from 0: labels = np.unique(labels, return_inverse=True)[1]",
        )
    if labels.ndim not in (1, 2) or labels.size != len(labels):
        raise UserError(
            f"{what} has the shape {labels.shape}, which is not one label for each image",
            fix="reshape it to (N,)",
        )
    if len(labels) != count:
        raise UserError(
            f"{what} has {len(labels)} labels for {count} images",
            fix="make both equally long; one of them may be cut off or from another split",
        )
    if labels.min() < 0 or labels.max() >= MAX_CLASSES:
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"{what} contains the label {worst}", fix="number the classes 0 to K-1")
    return labels.reshape(-1).astype(np.int64)


def numbered_classes(labels: Labels, what: str) -> tuple[str, ...]:
    """Names `0` to `K-1` for training labels that use every number up to K-1."""
    counts = np.bincount(labels)
    if not counts.all():
        missing = int(np.flatnonzero(counts == 0)[0])
        raise UserError(
            f"{what} goes up to {len(counts) - 1}, but no sample has the label {missing}",
            fix="number the classes 0 to K-1: labels = np.unique(labels, return_inverse=True)[1], "
            "over training and evaluation labels together",
        )
    return tuple(str(number) for number in range(len(counts)))


def within_classes(labels: Labels, classes: tuple[str, ...], what: str) -> Labels:
    """The labels, none of them beyond the classes."""
    if labels.max() >= len(classes):
        raise UserError(
            f"{what} contains the label {labels.max()}, but there are {len(classes)} classes (0 to "
            f"{len(classes) - 1}) in the training data",
            fix="use the same numbering of classes for training and evaluation",
        )
    return labels
