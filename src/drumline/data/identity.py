"""Digests that identify the samples of a source: names, sizes and labels of all, contents of some. Ranks compare them
with each other, and a resumed run compares them with its checkpoint.

Promises: depends on what the data is, not on where it lies; the same on every machine that has the same data.
Names and labels of all samples are covered, and sizes of up to `SIZES` image files per set (all if they are known
without asking the file system); contents of `CONTENTS` samples, chosen by the seed, or of a whole small array. So a
file whose bytes alone differ, at the same size, is found if it is one of those chosen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from drumline.core.errors import UserError
from drumline.core.text import printable
from drumline.data.sources.base import ArrayDataset, Dataset, MappedFiles

BLOCK = 1024
"""Samples per digest."""
SIZES = 1 << 15
"""Files of a set whose sizes are compared."""
CONTENTS = 64
"""Samples of a set whose contents are compared."""
ARRAY_BYTES = 32 << 20
"""Of a set of arrays, more samples are compared, up to this many bytes."""

UNREADABLE = "unreadable"
"""Instead of a digest."""

Entry = list[str | int]
"""Name, size and label of a sample; the size is -1 where it is not known."""


@dataclass(frozen=True)
class Identity:
    """Identifies a set of samples."""

    samples: int
    blocks: list[str]
    chosen: list[int]
    contents: list[str]
    """Digests of the contents of the chosen samples."""

    def summary(self) -> dict[str, str | int]:
        """A few plain values to store with a checkpoint."""
        return {
            "samples": self.samples,
            "entries": _digest("".join(self.blocks).encode()),
            "chosen": _digest(repr(self.chosen).encode()),
            "contents": _digest("".join(self.contents).encode()),
        }


def identify(source: Dataset, seed: int) -> Identity:
    """The identity of a source. Reads the chosen samples."""
    return Identity(len(source), block_digests(source), *content_digests(source, seed))


def changed_samples(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes how two summaries differ; empty if they are equal."""
    if then.get("samples") != now["samples"]:
        return f"{now['samples']:,} samples, previously {printable(str(then.get('samples'))[:20])}"
    if then.get("entries") != now["entries"]:
        return "sample names, sizes, labels or order differ"
    if then.get("chosen") != now["chosen"]:  # with a different seed
        return ""
    return "sample contents differ" if then.get("contents") != now["contents"] else ""


def block_digests(source: Dataset) -> list[str]:
    """A digest of the entries of every `BLOCK` samples."""
    blocks = range(-(-len(source) // BLOCK))
    return [_digest(repr(_columns(source, block)).encode()) for block in blocks]


def block_entries(source: Dataset, block: int) -> list[Entry]:
    """What is compared of each sample of a block, in order."""
    return [list(entry) for entry in zip(*_columns(source, block), strict=True)]


def _columns(source: Dataset, block: int) -> tuple[list[str], list[int], list[int]]:
    """Names, sizes and labels of a block's samples."""
    ids = np.arange(block * BLOCK, min((block + 1) * BLOCK, len(source)))
    labels: list[int] = source.labels[ids].tolist()
    if isinstance(source, ArrayDataset):
        return [""] * len(ids), [-1] * len(ids), labels
    asked = len(ids)
    if not isinstance(source, MappedFiles):
        asked = min(len(ids), max(1, SIZES * BLOCK // len(source)))
    return source.sample_names(ids), [*source.sample_sizes(ids[:asked]), *[-1] * (len(ids) - asked)], labels


def content_digests(source: Dataset, seed: int) -> tuple[list[int], list[str]]:
    """Ids of samples chosen by the seed, and a digest of each one's stored content."""
    count = CONTENTS
    if isinstance(source, ArrayDataset):
        count = max(count, ARRAY_BYTES // max(1, int(np.prod(source.shape))))
    ids = chosen(len(source), count, seed)
    return ids, [_content(source, sample) for sample in ids]


def chosen(samples: int, count: int, seed: int) -> list[int]:
    """Ids of `count` samples, in order; all of them if there are no more."""
    return sorted(Random(seed).sample(range(samples), min(samples, count)))


def first_difference(mine: Sequence[Entry], theirs: Sequence[Entry], start: int) -> str:
    """Describes the first sample in which two lists of entries differ; `start` is the id of their first one."""
    for offset, (here, there) in enumerate(zip(mine, theirs, strict=False)):
        if list(here) != list(there):
            return f"sample {start + offset:,} is {_words(here, there)}, on rank 0 {_words(there, here)}"
    if len(mine) == len(theirs):
        return ""
    longer, where = (mine, "here") if len(mine) > len(theirs) else (theirs, "on rank 0")
    extra = longer[min(len(mine), len(theirs))]
    return f"sample {start + min(len(mine), len(theirs)):,} is only {where}: {_words(extra, extra)}"


def _words(entry: Entry, other: Entry) -> str:
    """The name of a sample, and what else differs."""
    name, size, label = entry
    parts = [f"'{printable(str(name))}'" if name else "an image"]
    if entry[0] == other[0] and size != other[1]:
        parts.append(f"of {size:,} bytes")
    if label != other[2] or entry is other:
        parts.append(f"with label {label}")
    return " ".join(parts)


def _content(source: Dataset, sample: int) -> str:
    if isinstance(source, ArrayDataset):
        return _digest(source.take(np.array([sample])).tobytes())
    try:
        return _digest(source.read(sample))
    except UserError:
        return UNREADABLE


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
