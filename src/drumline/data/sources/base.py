"""What every data source gives: images or file bytes, labels, class names, by sample id.

Promises: a sample id is a position in its source and means the same image for ever; a `DatasetSpec` is all a
loader process needs to open the source itself; splits depend on positions alone, never on a seed.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.text import printable
from drumline.data.image.limits import MAX_BYTES, check_bytes
from drumline.data.reading import open_regular, refused

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class DatasetSpec:
    """A plain, picklable description of a source. Processes open the source from it, so that no data travels
    through process start."""

    source: str
    """`folder`, `tar`, `packed`, `idx`, `cifar10`, `cifar100`, `npz`, `digits`, `synthetic` or
    `package.module:factory`; never `auto`, which `detect_source` resolves."""
    path: str
    split: Literal["train", "eval"]
    holdout: float = 0.0
    """Share set aside for evaluation, for data without a split of its own."""
    whole: bool = False
    """Use every sample if the data does not have both splits, as `drumline eval` does."""


class ArrayDataset:
    """A whole set of equally large images, in memory or memory-mapped.

    `images` is (N, H, W, C) uint8 with C 1 or 3, `labels` (N,) int64. Read samples through `take`: a source
    may hold fewer images than samples (`PooledDataset`).
    """

    def __init__(self, name: str, images: Images, labels: Labels, classes: tuple[str, ...]) -> None:
        assert images.dtype == np.uint8, images.dtype
        assert images.ndim == 4, images.shape
        assert images.shape[3] in (1, 3), images.shape
        assert labels.dtype == np.int64, labels.dtype
        assert len(labels) > 0
        assert 0 <= labels.min() <= labels.max() < len(classes)
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
        """Fresh, contiguous images of these samples, in this order: (n, H, W, C) uint8."""
        return np.ascontiguousarray(self.images[ids])

    def _check_length(self) -> None:
        assert len(self.images) == len(self.labels), (len(self.images), len(self.labels))


class PooledDataset(ArrayDataset):
    """Sample i shows image i mod len(images): a set of any length in little memory."""

    def take(self, ids: NDArray[np.integer]) -> Images:
        return super().take(np.asarray(ids) % len(self.images))

    def _check_length(self) -> None:
        assert 0 < len(self.images) <= len(self.labels)


class EncodedDataset(ABC):
    """A set of image files: `read` gives a sample's bytes, `where` its path for messages."""

    skipped: Mapping[str, int] = MappingProxyType({})
    """How many files beside the images are not taken for images, by their endings."""

    def __init__(self, name: str, labels: Labels, classes: tuple[str, ...]) -> None:
        assert labels.dtype == np.int64, labels.dtype
        assert len(labels) > 0
        assert 0 <= labels.min() <= labels.max() < len(classes)
        self.name, self.labels, self.classes = name, labels, classes

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, sample: int) -> bytes:
        """The encoded image. Content that cannot be used is a `UserError`; a system that fails, after some patience,
        is a `LostError` (`reading.py`). Both name the sample."""

    @abstractmethod
    def where(self, sample: int) -> str:
        """The path (or another name) that tells a person which sample this is."""

    def names(self) -> bytes:
        """Whatever names the samples, in their order, for `digest`."""
        return b""

    def digest(self) -> str:
        """Which samples these are, and in which order: equal where ids and labels mean the same files."""
        return hashlib.blake2b(self.labels.tobytes() + self.names(), digest_size=16).hexdigest()

    def sample_names(self, samples: NDArray[np.integer]) -> list[str]:
        """Which file each sample is, below the root of the set; empty texts where there are no names."""
        return [""] * len(samples)

    def sample_sizes(self, samples: NDArray[np.integer]) -> list[int]:
        """Bytes of each sample as it is stored; -1 where that is not known."""
        return [-1] * len(samples)

    def decoded(self, sample: int) -> Images | None:
        """The pixels of a sample that is stored as such, (H, W, C); None where `read` has to be decoded."""
        return None


def describe_skipped(source: EncodedDataset) -> str:
    """What was passed over, in words, or nothing."""
    endings = sorted(source.skipped.items(), key=lambda each: (-each[1], each[0]))
    if not endings:
        return ""
    some = ", ".join(f"{printable(ending)} {number:,}" for ending, number in endings[:5])
    number = sum(source.skipped.values())
    files = (
        "1 file that is not an image by its ending and is"
        if number == 1
        else f"{number:,} files that are not images by their endings and are"
    )
    return f"{files} passed over: {some}{', ...' if len(endings) > 5 else ''}"


class MappedFiles(EncodedDataset):
    """Image files inside a few large files, memory-mapped: sample i is `lengths[i]` bytes from `offsets[i]` on in
    file `parts[i]`. Whoever opens one has checked that every sample lies inside its file. A file that is made
    shorter while it is mapped ends the process (SIGBUS): nothing may write to it then."""

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
        """The stored bytes of a sample, not copied and not checked; not to be written to."""
        start = int(self._offsets[sample])
        return self._maps[self._parts[sample]][start : start + int(self.lengths[sample])]

    def pointers(self, ids: NDArray[np.integer]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Address and length of each sample's stored bytes, for native code; they hold while the source lives."""
        return self._addresses[ids], self.lengths[ids]

    def sound_jpegs(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of these samples native code may try as JPEG files: those of a size that is read at all."""
        within: NDArray[np.bool_] = self.lengths[ids] <= MAX_BYTES
        return within

    def read_ahead(self, ids: NDArray[np.integer]) -> None:
        """Has the system begin to read these samples from disk; returns at once."""
        for part, start, length in zip(
            self._parts[ids].tolist(), self._offsets[ids].tolist(), self.lengths[ids].tolist(), strict=True
        ):
            memory = self._maps[part].base
            if length and isinstance(memory, memoryview) and isinstance(memory.obj, mmap.mmap):
                first = start - start % mmap.PAGESIZE
                memory.obj.madvise(mmap.MADV_WILLNEED, first, start + length - first)


Dataset = ArrayDataset | EncodedDataset


class NoEvalSplit(UserError):
    """The data has no evaluation split, and none was asked to be made."""


class NoTrainSplit(UserError):
    """The data has an evaluation split but no training split."""


def map_file(file: Path) -> Images:
    """A whole file as read-only bytes, loaded by the system as they are touched."""
    try:
        with open_regular(file) as stream:
            if stream.seek(0, 2) == 0:  # what is empty cannot be mapped
                return np.empty(0, dtype=np.uint8)
            return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except OSError as error:
        raise refused(file, error) from error


def holdout_mask(labels: Labels, share: float) -> NDArray[np.bool_]:
    """True for the samples that a holdout of `share` sets aside for evaluation.

    The rule: within each class of n samples, those with the n x share (rounded half up) smallest hashes of
    their position; at least one and at most n - 1, so that a class of two or more is on both sides and a
    class of one only trains. A hash rather than every k-th, because file names often have a period (views of
    an object, frames of a clip) and a regular choice would take the same view each time.
    """
    assert 0 < share < 1, share
    labels = np.asarray(labels, dtype=np.int64)
    fraction = Fraction(repr(float(share))).limit_denominator(1_000_000)
    counts = np.bincount(labels)
    wanted = (2 * counts * fraction.numerator + fraction.denominator) // (2 * fraction.denominator)
    wanted = np.minimum(np.maximum(wanted, 1), np.maximum(counts - 1, 0))
    order = np.lexsort((_hash(np.arange(len(labels), dtype=np.uint64)), labels))
    rank_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    mask = np.zeros(len(labels), dtype=np.bool_)
    mask[order] = rank_in_class < wanted[labels[order]]
    return mask


def holdout_ids(labels: Labels, spec: DatasetSpec, where: str) -> NDArray[np.int64]:
    """Positions, in rising order, that belong to the spec's split of a set that has no split of its own."""
    if spec.holdout == 0:
        if spec.split == "train" or spec.whole:
            return np.arange(len(labels), dtype=np.int64)
        raise NoEvalSplit(
            f"{where} has no evaluation split, and data.holdout is 0",
            fix="add --data.holdout 0.1 to set a tenth aside, or give the data an evaluation split",
        )
    mask = holdout_mask(labels, spec.holdout)
    ids = np.flatnonzero(mask if spec.split == "eval" else ~mask).astype(np.int64)
    if len(ids) == 0:
        raise UserError(
            f"{where}: data.holdout {spec.holdout:g} leaves nothing to evaluate, each class has one sample",
            fix="add samples, or give the data an evaluation split",
        )
    return ids


def refuse_holdout(spec: DatasetSpec, where: str) -> None:
    """A holdout beside a split of the data's own would be silently ignored, so it is refused."""
    if spec.holdout:
        raise UserError(
            f"data.holdout is {spec.holdout:g}, but {where} has an evaluation split of its own",
            fix="remove data.holdout",
        )


def channel_statistics(source: ArrayDataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over all samples, with 255 as 1.

    Exact integer sums, rounded once at the end: the same bits on every machine and for every chunk size.
    """
    whole, rest = divmod(len(source), len(source.images))
    total, squares = _sums(source.images)
    if whole > 1 or rest:
        total_rest, squares_rest = _sums(source.images[:rest])
        total = [whole * a + b for a, b in zip(total, total_rest, strict=True)]
        squares = [whole * a + b for a, b in zip(squares, squares_rest, strict=True)]
    height, width, _ = source.shape
    n = len(source) * height * width
    spread = [n * square - value * value for value, square in zip(total, squares, strict=True)]
    if not all(spread):
        raise UserError(
            f"{source.name}: channel {spread.index(0)} has the same value in every pixel of every image, so "
            "it cannot be normalised by its deviation",
            fix="set data.mean and data.std yourself, for example 0.5 and 0.5",
        )
    mean = tuple(value / (n * 255) for value in total)
    std = tuple(math.sqrt(value / (n * n * 255 * 255)) for value in spread)
    return mean, std


def _sums(images: Images) -> tuple[list[int], list[int]]:
    """Per channel: the sum of the values and the sum of their squares."""
    channels = images.shape[3]
    total, squares = [0] * channels, [0] * channels
    chunk = max(1, CHUNK_BYTES // math.prod(images.shape[1:]))
    for start in range(0, len(images), chunk):
        part = images[start : start + chunk].reshape(-1, channels).astype(np.uint16)
        for channel in range(channels):
            values = part[:, channel]
            total[channel] += int(values.sum(dtype=np.uint64))
            squares[channel] += int((values * values).sum(dtype=np.uint64))
    return total, squares


def _hash(positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function: a bijection of 64-bit numbers without visible order."""
    x = positions + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
