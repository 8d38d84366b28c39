"""Packed sets, as `drumline pack` writes them: the samples of the source they were packed from, under the same ids.

Promises: nothing is copied or decoded on opening; sets of arrays come back as arrays, sets of files as files, so that
training treats them as it would the source. A process checks each sample's checksum when it first reads it (26 us for
110 KB, 2 % of decoding it, and nothing in later epochs); arrays up to 1 GiB are checked as they are opened.
Damaged sets are rejected by file and sample.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from drumline.core.errors import UserError
from drumline.core.machine import raise_descriptor_limit
from drumline.data.image.decode import check_bytes
from drumline.data.packed.format import (
    PackedManifest,
    SampleKind,
    read_index,
    read_manifest,
    read_names,
    shard_file,
)
from drumline.data.sources.base import (
    ArrayDataset,
    DatasetSpec,
    Images,
    MappedFiles,
    map_file,
)
from drumline.data.sources.divide import holdout_ids, reject_holdout

SplitName = Literal["train", "eval"]
CHECKED_ON_OPENING = 1 << 30
"""Bytes of an array up to which its checksums are checked as it is opened: a quarter of a second at most."""
MANY_SHARDS = 256
"""A mapped shard holds a descriptor; a process often may have no more than 1,024."""


def open_packed(spec: DatasetSpec) -> PackedFiles | PackedArrays:
    """The samples of a split. Without an evaluation split of its own the set is divided by `holdout`."""
    root = Path(spec.path).expanduser()
    manifest = read_manifest(root)
    if manifest.eval is not None:
        reject_holdout(spec, str(root))
    split: SplitName = spec.split if manifest.eval is not None else "train"
    records = read_index(root, manifest, split)
    rows = None
    if manifest.eval is None:
        ids = holdout_ids(records["label"].astype(np.int64), spec, str(root))
        rows = ids if len(ids) < len(records) else None
    if manifest.holds == "arrays":
        return PackedArrays(root, manifest, split, records, rows)
    return PackedFiles(root, manifest, split, records, rows)


class PackedFiles(MappedFiles):
    """Image files, or their pixels, in shards. `read` always gives an image file, so `decode` takes any sample; where
    `kinds` is RGB, `pixels` gives the same pixels without decoding."""

    def __init__(
        self,
        root: Path,
        manifest: PackedManifest,
        split: SplitName,
        records: NDArray[np.void],
        rows: NDArray[np.int64] | None,
    ) -> None:
        part = manifest.split(split)
        assert part is not None
        if len(part.shards) > MANY_SHARDS:
            raise_descriptor_limit()
        kept = records if rows is None else records[rows]
        super().__init__(
            manifest.source,
            kept["label"].astype(np.int64),
            manifest.classes,
            [shard_file(root, split, number) for number in range(len(part.shards))],
            kept["shard"],
            kept["offset"],
            kept["length"],
        )
        self.widths, self.heights = kept["width"].astype(np.int32), kept["height"].astype(np.int32)
        self.kinds, self.orientations = kept["kind"].copy(), kept["orientation"].copy()
        """`SampleKind` and EXIF orientation of each sample. Width 0: it could not be read when it was packed."""
        self.crcs = kept["crc"].copy()
        self._checked = np.zeros(len(kept), dtype=np.bool_)
        self._root, self._split = root, split
        ends = records["name_end"].astype(np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        self._name_starts, self._name_ends = (starts, ends) if rows is None else (starts[rows], ends[rows])
        self._names = read_names(root, manifest, split)

    def read(self, sample: int) -> bytes:
        """An image file. Raw pixels become one that needs no decoding."""
        check_bytes(int(self.lengths[sample]), self.where(sample))
        self.check(sample)
        data = super().read(sample)
        return data if self.kinds[sample] < SampleKind.RGB else self._as_file(sample, data)

    def where(self, sample: int) -> str:
        return f"{self._root}:{self._name(sample) or f'sample {sample}'}"

    def sample_names(self, samples: NDArray[np.integer]) -> list[str]:
        return [self._name(sample) for sample in samples.tolist()]

    def _name(self, sample: int) -> str:
        start, end = int(self._name_starts[sample]), int(self._name_ends[sample])
        # Names may be any bytes; what is not UTF-8 is shown as \xff.
        return self._names[start:end].decode("utf-8", "backslashreplace")

    def pixels(self, sample: int) -> Images:
        """The stored (height, width, channels) of a raw sample: not copied, not checked, not turned by EXIF."""
        assert self.kinds[sample] >= SampleKind.RGB, self.kinds[sample]
        channels = 3 if self.kinds[sample] == SampleKind.RGB else 1
        return self.view(sample).reshape(int(self.heights[sample]), int(self.widths[sample]), channels)

    def decoded(self, sample: int) -> Images | None:
        """Raw pixels, checked. None for samples that EXIF may rotate: `read` keeps their orientation."""
        if self.kinds[sample] < SampleKind.RGB or self.orientations[sample] > 1:
            return None
        self.check(sample)
        return self.pixels(sample)

    def check(self, sample: int) -> None:
        """Rejects a sample whose bytes do not match their checksum."""
        if not self.sound(np.array([sample]))[0]:
            raise self._damaged(sample)

    def sound(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether the bytes of these samples match their checksums, for readers that use `pointers`."""
        for i in ids[~self._checked[ids]].tolist():
            self._checked[i] = zlib.crc32(self.view(i).data) == self.crcs[i]
        return self._checked[ids]

    def sound_jpegs(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Those that are JPEG files and whose bytes still have their checksums."""
        jpegs = (self.kinds[ids] == SampleKind.JPEG) & super().sound_jpegs(ids)
        jpegs[jpegs] = self.sound(ids[jpegs])
        return jpegs

    def _as_file(self, sample: int, data: bytes) -> bytes:
        width, height = int(self.widths[sample]), int(self.heights[sample])
        colour = self.kinds[sample] == SampleKind.RGB
        if self.orientations[sample] <= 1:
            return b"P%d\n%d %d\n255\n" % (6 if colour else 5, width, height) + data
        # A portable pixmap cannot store an orientation; a PNG can.
        image = Image.frombytes("RGB" if colour else "L", (width, height), data)
        image.getexif()[0x0112] = int(self.orientations[sample])
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=0, exif=image.getexif())
        return file.getvalue()

    def _damaged(self, sample: int) -> UserError:
        shard = shard_file(self._root, self._split, int(self._parts[sample]))
        return UserError(
            f"{self.where(sample)} has changed since it was packed: the checksum of the {self.lengths[sample]} bytes "
            f"from {self._offsets[sample]} on in {shard} does not match",
            fix="restore that shard from a copy, or pack the source again",
        )


class PackedArrays(ArrayDataset):
    """Equally large images as one memory-mapped array. `images` cannot be written to; `take` gives copies."""

    def __init__(
        self,
        root: Path,
        manifest: PackedManifest,
        split: SplitName,
        records: NDArray[np.void],
        rows: NDArray[np.int64] | None,
    ) -> None:
        first = records[0]
        height, width, length = int(first["height"]), int(first["width"]), int(first["length"])
        regular = (
            (records["kind"] == first["kind"])
            & (records["width"] == width)
            & (records["height"] == height)
            & (records["offset"] == np.arange(len(records), dtype=np.uint64) * np.uint64(length))
        )
        shard = shard_file(root, split, 0)
        if first["kind"] < SampleKind.RGB or not regular.all() or records["shard"].any():
            raise UserError(
                f"{root}: the {split} split is marked as an array, but sample "
                f"{int(np.argmin(regular))} does not fit into one",
                fix="pack the source again",
            )
        stored = map_file(shard)[: len(records) * length]
        self._root, self._split = root, split
        self._stored, self._length, self._crcs = stored, length, records["crc"].copy()
        if len(stored) <= CHECKED_ON_OPENING:
            self.check()
        images = stored.reshape(len(records), height, width, 3 if first["kind"] == SampleKind.RGB else 1)
        labels = records["label"].astype(np.int64)
        if rows is not None:
            images, labels = images[rows], labels[rows]
        super().__init__(manifest.source, images, labels, manifest.classes)

    def check(self) -> None:
        """Compares every image of the split with its checksum."""
        for sample in damaged_parts(self._stored, self._length, self._crcs):
            raise UserError(
                f"{shard_file(self._root, self._split, 0)}: image {sample} ({self._length} bytes from "
                f"{sample * self._length} on) has changed since it was packed: its checksum does not match",
                fix="restore that file from a copy, or pack the source again",
            )


def damaged_parts(stored: Images, length: int, crcs: NDArray[np.uint32]) -> Iterator[int]:
    """Which of equally long parts do not match their checksums."""
    view = stored.data
    for number, crc in enumerate(crcs.tolist()):
        if zlib.crc32(view[number * length : (number + 1) * length]) != crc:
            yield number
