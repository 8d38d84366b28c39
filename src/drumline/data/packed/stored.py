"""A sample as it is packed: the unchanged file or its pixels, in full size or with the short side resized.

Promises: the result depends on the sample and the options alone, not on the number of processes. A bad image never
fails: it is stored unchanged, with width and height 0.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
from PIL import Image

from drumline.core.errors import LostError, UserError
from drumline.core.processes import WorkerKilled, map_in_processes
from drumline.data.image.decode import FORMATS, MAX_PIXELS, TooLarge, check_file, decode
from drumline.data.image.jpeg import read_header
from drumline.data.image.resize import resize
from drumline.data.packed.format import PackOptions, SampleKind, StoredSample
from drumline.data.sources import ArrayDataset, Dataset, DatasetSpec, open_same
from drumline.data.sources.base import Images
from drumline.data.sources.packed import PackedFiles

JPEG_QUALITY = 95
"""Of resized images, with full colour resolution (4:4:4)."""
CHUNK = 16
"""Samples handed to a process at a time."""


def store(source: Dataset, sample: int, options: PackOptions) -> StoredSample:
    """A sample as it is packed. Never fails on a bad image; a file that cannot be read at all is a `LostError`."""
    if isinstance(source, ArrayDataset):
        return _raw(_shortened(source.take(np.array([sample]))[0], options.resize_short))
    if isinstance(source, PackedFiles) and source.kinds[sample] >= SampleKind.RGB:
        source.check(sample)
        return _raw(_shortened(source.pixels(sample), options.resize_short), int(source.orientations[sample]))
    data = source.read(sample)
    kept = as_it_is(data)
    shrinks = 0 < options.resize_short < min(kept.width, kept.height)
    if kept.width == 0 or not (options.raw or shrinks):
        return kept
    try:
        image = decode(data, source.where(sample))
    except UserError:
        return replace(kept, kind=SampleKind.OTHER, width=0, height=0, orientation=0)
    orientation = _orientation(image)
    if orientation is None:
        return kept
    pixels = _shortened(np.asarray(image), options.resize_short)
    return _raw(pixels, orientation) if options.raw else _jpeg(pixels, orientation)


def as_it_is(data: bytes) -> StoredSample:
    """An image file as it is: only its header is read. Width and height are 0 if it is not a readable image."""
    kind, width, height, orientation = SampleKind.OTHER, 0, 0, 0
    try:
        check_file(data, "")
    except TooLarge:
        return StoredSample(data, kind, width, height, orientation, zlib.crc32(data))
    header = read_header(data)
    if header is not None and header.precision == 8:
        kind, width, height, orientation = SampleKind.JPEG, header.width, header.height, header.orientation
    else:
        with suppress(Exception):  # a damaged file makes Pillow raise nearly anything
            width, height = Image.open(io.BytesIO(data), formats=FORMATS).size
    if width * height > MAX_PIXELS:
        kind, width, height, orientation = SampleKind.OTHER, 0, 0, 0
    return StoredSample(data, kind, width, height, orientation, zlib.crc32(data))


def stored_samples(
    source: Dataset, spec: DatasetSpec, options: PackOptions, first: int, workers: int
) -> Generator[StoredSample]:
    """The samples from `first` on, in order, made by this process or by `workers` others, which open `spec`."""
    if workers == 1:
        for sample in range(first, len(source)):
            yield store(source, sample, options)
        return
    assert not isinstance(source, ArrayDataset)
    chunks = (range(start, min(start + CHUNK, len(source))) for start in range(first, len(source), CHUNK))
    work = partial(_store_chunk, spec, source.digest(), options)
    try:
        with closing(map_in_processes(work, chunks, workers, preload=__name__)) as results:
            for stored in results:
                yield from stored
    except WorkerKilled as error:
        raise LostError(
            "a packing process was killed",
            fix="if memory ran out, run the same command again with fewer --workers; it continues where it stopped",
        ) from error


def _raw(pixels: Images, orientation: int = 1) -> StoredSample:
    height, width, channels = pixels.shape
    data = pixels.tobytes()
    return StoredSample(
        data,
        SampleKind.RGB if channels == 3 else SampleKind.GREY,
        width,
        height,
        orientation,
        zlib.crc32(data),
    )


def _jpeg(pixels: Images, orientation: int) -> StoredSample:
    image, file = Image.fromarray(pixels), io.BytesIO()
    exif = Image.Exif()
    if orientation != 1:
        exif[0x0112] = orientation
    image.save(file, "JPEG", quality=JPEG_QUALITY, subsampling=0, exif=exif)
    return as_it_is(file.getvalue())


def _shortened(pixels: Images, short: int) -> Images:
    """The shorter side at `short` pixels, where it is longer: the sizes that evaluation would resize to."""
    height, width, _ = pixels.shape
    if not 0 < short < min(width, height):
        return pixels
    size = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    return resize(pixels, size)


def _orientation(image: Image.Image) -> int | None:
    """The orientation that `decode` applies with exif="apply"; None if it would fail."""
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # damaged EXIF data makes Pillow raise nearly anything
        return None
    return value if value in range(2, 9) else 1


def _store_chunk(spec: DatasetSpec, digest: str, options: PackOptions, samples: range) -> list[StoredSample]:
    source = _opened(spec, digest)
    return [store(source, sample, options) for sample in samples]


@lru_cache(maxsize=1)
def _opened(spec: DatasetSpec, digest: str) -> Dataset:
    """The dataset in this process, opened for its first chunk."""
    return open_same(spec, digest)
