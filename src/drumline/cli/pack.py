"""`drumline pack`: write a data set as a few large files.

The summary goes to stderr and, as JSON, to stdout if that is not a terminal.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.config.learning import AutoInt, Fraction, SourceName
from drumline.config.limits import Range
from drumline.core.errors import UserError
from drumline.core.text import counted, message, print_result

if TYPE_CHECKING:
    from drumline.data.sources.packed import PackedFiles


@dataclass(frozen=True)
class Options:
    """The arguments of `drumline pack`."""

    data: str
    """The data set."""
    out: str
    """The folder to write."""
    labels: str = ""
    """A .csv, .tsv or .parquet file with the labels of the images in DATA (as data.labels)."""
    source: SourceName = "auto"
    """What DATA is, if that cannot be detected."""
    holdout: Fraction = 0.0
    """Fraction to set aside for evaluation, for data without an evaluation split (as data.holdout)."""
    raw: bool = False
    """Store decoded pixels instead of image files: same pixels, several times the size, no decoding."""
    resize_short: Annotated[int, Range(0, 65535)] = 0
    """Resize images to this short side if theirs is longer (as JPEG of quality 95, 4:4:4; as pixels with --raw).
    Smaller and faster, but NOT pixel-equal to the originals. 0: off."""
    shard_mb: Annotated[int, Range(1, 1 << 20)] = 1024
    """MiB per shard. Sets of arrays (CIFAR, idx, npz) always have one file per split."""
    workers: Annotated[AutoInt, Range(1, 1024)] = "auto"
    """Processes that read and decode. The result does not depend on it. `auto`: one per core."""
    force: bool = False
    """Replace a packed set at OUT, or an unfinished one of other data."""


COMMAND = Command(
    name="pack",
    usage="DATA OUT [options]",
    about="""
        Turn a data set into a packed set: a few large files instead of many small ones,
        memory-mapped, with a checksum for every sample. DATA is a folder of class folders,
        a .tar of them, a label file or a folder with --labels, an .npz, or a folder of idx or
        CIFAR files; both splits are packed.
        Train on the result with data.path=OUT: same samples, same ids, same pixels.

        After an interruption (Ctrl-C, kill, power failure), the same command continues where
        it stopped. OUT appears when it is complete. Samples whose headers cannot be read as
        images are kept as they are, counted and listed; `drumline verify OUT` decodes all.
    """,
    options=Options,
    examples="""
  drumline pack photos photos.packed
  drumline pack imagenet.tar imagenet.packed --workers 16
  drumline pack photos photos.256 --resize-short 256
""",
)


@dataclass(frozen=True)
class Packed:
    """A finished set in numbers."""

    folder: str
    train: int
    eval: int
    classes: int
    shards: int
    bytes: int
    bad: int
    """Samples that could not be read as images."""
    bad_samples: tuple[str, ...]
    """What is wrong with the first of them."""


def main(argv: list[str]) -> int:
    asked = read_options(argv, Options, "pack")

    from drumline.core.machine import usable_cores
    from drumline.data.packed.format import PackOptions
    from drumline.data.packed.write import pack_set, size_text

    workers = usable_cores() if asked.workers == "auto" else asked.workers
    options = PackOptions(asked.resize_short, asked.raw, asked.shard_mb, asked.holdout)
    try:
        out = pack_set(
            asked.source, asked.data, Path(asked.out), options, workers, asked.force, _say, asked.labels
        )
    except KeyboardInterrupt:
        _say("stopped; the same command continues where it was")
        raise
    packed = summary(out)
    _say(
        f"{packed.folder}: {packed.train:,} train and {packed.eval:,} eval samples, {packed.classes:,} classes, "
        f"{counted(packed.shards, 'shard')}, {size_text(packed.bytes)}"
    )
    if packed.bad:
        _say(f"{counted(packed.bad, 'sample')} cannot be read as images and kept as they are:")
        for line in packed.bad_samples:
            _say(f"  {line}")
        if packed.bad > len(packed.bad_samples):
            _say(f"  and {packed.bad - len(packed.bad_samples):,} more")
    print_result(asdict(packed))
    return 0


def summary(out: Path) -> Packed:
    """A finished set in numbers."""
    import numpy as np

    from drumline.data.packed.format import RECORD, SPLITS, index_file, read_manifest
    from drumline.data.sources import DatasetSpec, open_dataset
    from drumline.data.sources.packed import PackedFiles

    manifest = read_manifest(out)
    parts = [(split, part) for split in SPLITS if (part := manifest.split(split))]
    bad, faults = 0, list[str]()
    for split, _ in parts:
        records = np.fromfile(index_file(out, split), dtype=RECORD)
        unreadable = np.flatnonzero(records["width"] == 0)
        bad += len(unreadable)
        if len(unreadable) and len(faults) < _LISTED:
            source = open_dataset(DatasetSpec("packed", str(out), split))
            assert isinstance(source, PackedFiles)
            faults += [_fault(source, sample) for sample in unreadable[: _LISTED - len(faults)].tolist()]
    return Packed(
        folder=str(out),
        train=manifest.train.samples,
        eval=manifest.eval.samples if manifest.eval else 0,
        classes=len(manifest.classes),
        shards=sum(len(part.shards) for _, part in parts),
        bytes=sum(file.stat().st_size for file in out.iterdir()),
        bad=bad,
        bad_samples=tuple(faults),
    )


_LISTED = 20


def _say(text: str) -> None:
    print(message(text), file=sys.stderr, flush=True)


def _fault(source: PackedFiles, sample: int) -> str:
    from drumline.data.image.decode import decode

    try:
        decode(source.read(sample), source.where(sample))
    except UserError as error:
        return error.what
    return f"{source.where(sample)} has a header that cannot be read"
