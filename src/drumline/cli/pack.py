"""`drumline pack`: its words, its help, and what it prints.

Promises: every mistake of a line is told at once, with the nearest flag; the summary goes to stderr, and to stdout as
JSON when nobody reads there. Refuses unknown flags and values before anything is opened.
"""

from __future__ import annotations

import shlex
import sys
from collections import deque
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.config.toml import together
from drumline.core.errors import UserError
from drumline.core.result import print_result
from drumline.core.text import message

if TYPE_CHECKING:
    from drumline.data.sources import PackedFiles

HELP = """usage: drumline pack SOURCE OUT [--flags]

Turn a data set into a packed set: a few large files instead of many small ones, memory-mapped, with a checksum for
every sample. SOURCE is a folder of class folders, a .tar of them, an .npz, or a folder of idx or CIFAR files; both
splits are packed. Train on the result with data.path=OUT: same samples, same ids, same pixels.

Interrupted (Ctrl-C, kill, power), the same command goes on where it stopped. OUT appears when it is whole.
Samples whose headers cannot be read as images are kept as they are, counted and listed; `drumline verify OUT`
decodes every one.

flags:
  --source auto        what SOURCE is, where it cannot be told: folder, tar, packed, npz, idx, cifar10, cifar100,
                       digits, synthetic or package.module:factory
  --holdout 0          share set aside for evaluation, for data without a split of its own (as data.holdout)
  --raw                store decoded pixels instead of image files: same pixels, several times the size, no decoding
  --resize-short 0     resize images whose shorter side is longer than this to it (JPEG of quality 95, 4:4:4; pixels
                       with --raw). Smaller and quicker, but NOT pixel-equal to the originals
  --shard-mb 1024      MiB in a shard; sets of arrays (CIFAR, idx, npz) always are one file for each split
  --workers auto       processes that read and decode; what is written does not depend on it
  --force              replace a packed set at OUT, or an unfinished one of other data

examples:
  drumline pack photos photos.packed
  drumline pack imagenet.tar imagenet.packed --workers 16
  drumline pack photos photos.256 --resize-short 256
"""


@dataclass(frozen=True)
class Packed:
    """What a finished set amounts to."""

    folder: str
    train: int
    eval: int
    classes: int
    shards: int
    bytes: int
    bad: int
    """Samples that could not be read as images."""
    bad_samples: tuple[str, ...]
    """What was wrong with the first of them."""


def pack(words: list[str]) -> int:
    """Reads the words after `drumline pack` and does it."""
    if "-h" in words or "--help" in words:
        print(HELP, end="")
        return 0
    places, flags = _read(words)

    from drumline.core.machine import usable_cores
    from drumline.data.packed.format import Options
    from drumline.data.packed.write import pack_set, size_text

    workers = usable_cores() if flags["workers"] == "auto" else flags["workers"]
    options = Options(flags["resize_short"], flags["raw"], flags["shard_mb"], flags["holdout"])
    try:
        out = pack_set(flags["source"], places[0], Path(places[1]), options, workers, flags["force"], _say)
    except KeyboardInterrupt:
        _say("stopped; the same command goes on where it was")
        raise
    packed = summary(out)
    _say(
        f"{packed.folder}: {packed.train:,} train and {packed.eval:,} eval samples, {packed.classes:,} classes, "
        f"{packed.shards:,} shard(s), {size_text(packed.bytes)}"
    )
    if packed.bad:
        _say(f"{packed.bad:,} sample(s) cannot be read as images; they were kept as they are:")
        for line in packed.bad_samples:
            _say(f"  {line}")
        if packed.bad > len(packed.bad_samples):
            _say(f"  and {packed.bad - len(packed.bad_samples):,} more")
    print_result(asdict(packed))
    return 0


def summary(out: Path) -> Packed:
    """What lies in a finished set."""
    import numpy as np

    from drumline.data.packed.format import RECORD, SPLITS, index_file, read_manifest
    from drumline.data.sources import DatasetSpec, PackedFiles, open_dataset

    manifest = read_manifest(out)
    parts = [(split, part) for split in SPLITS if (part := manifest.split(split))]
    bad, told = 0, list[str]()
    for split, _ in parts:
        records = np.fromfile(index_file(out, split), dtype=RECORD)
        unreadable = np.flatnonzero(records["width"] == 0)
        bad += len(unreadable)
        if len(unreadable) and len(told) < _LISTED:
            source = open_dataset(DatasetSpec("packed", str(out), split))
            assert isinstance(source, PackedFiles)
            told += [_complaint(source, sample) for sample in unreadable[: _LISTED - len(told)].tolist()]
    return Packed(
        folder=str(out),
        train=manifest.train.samples,
        eval=manifest.eval.samples if manifest.eval else 0,
        classes=len(manifest.classes),
        shards=sum(len(part.shards) for _, part in parts),
        bytes=sum(file.stat().st_size for file in out.iterdir()),
        bad=bad,
        bad_samples=tuple(told),
    )


_LISTED = 20
_DEFAULTS: dict[str, Any] = {
    "source": "auto",
    "holdout": 0.0,
    "raw": False,
    "resize_short": 0,
    "shard_mb": 1024,
    "workers": "auto",
    "force": False,
}
_EXAMPLES = {"source": "folder", "holdout": "0.1", "resize_short": "256", "shard_mb": "1024", "workers": "8"}


def _say(text: str) -> None:
    print(message(text), file=sys.stderr, flush=True)


def _read(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """SOURCE and OUT, and every flag's value."""
    places: list[str] = []
    flags = dict(_DEFAULTS)
    mistakes: list[UserError] = []
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        try:
            if word.startswith("-"):
                name, value = _flag(word, waiting)
                flags[name] = value
            else:
                places.append(word)
        except UserError as mistake:
            mistakes.append(mistake)
    if len(places) != 2 and not mistakes:
        given = f"it was given {shlex.join(places)}" if places else "it was given neither"
        mistakes.append(
            UserError(
                f"pack takes SOURCE and OUT; {given}", fix="for example drumline pack photos photos.packed"
            )
        )
    if mistakes:
        raise together(mistakes)
    return places, flags


def _flag(word: str, waiting: deque[str]) -> tuple[str, Any]:
    spelled, equals, text = word.partition("=")
    name = spelled.removeprefix("--").replace("-", "_")
    if name not in _DEFAULTS or not spelled.startswith("--"):
        known, meant = [key.replace("_", "-") for key in _DEFAULTS], spelled.lstrip("-").replace("_", "-")
        near = [key for key in known if meant and key.startswith(meant)] or get_close_matches(
            meant, known, n=1
        )
        fix = f"did you mean --{near[0]}?" if near else "`drumline pack --help` lists the flags"
        raise UserError(f"{spelled}: pack has no such flag", fix=fix)
    if isinstance(_DEFAULTS[name], bool):
        if equals:
            raise UserError(f"{word}: takes no value", fix=f"write {spelled}, or leave it out")
        return name, True
    if not equals:
        if not waiting or waiting[0].startswith("--"):
            raise UserError(f"{word}: needs a value", fix=f"for example {word} {_EXAMPLES[name]}")
        text = waiting.popleft()
    return name, _value(name, text, spelled)


def _value(name: str, text: str, spelled: str) -> Any:
    if name == "source" or (name == "workers" and text == "auto"):
        return text
    fix = f"for example {spelled} {_EXAMPLES[name]}"
    if name == "holdout":
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise UserError(f"{spelled} {text}: expected a number from 0 to below 1", fix=fix)
        return share
    least = 0 if name == "resize_short" else 1
    most = {"shard_mb": 1 << 20, "workers": 1024}.get(name, 65535)
    if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most):
        raise UserError(f"{spelled} {text}: expected a whole number from {least} to {most}", fix=fix)
    return int(text)


def _complaint(source: PackedFiles, sample: int) -> str:
    from drumline.data.image.decode import decode

    try:
        decode(source.read(sample), source.where(sample))
    except UserError as error:
        return error.what
    return f"{source.where(sample)} has a header that cannot be read"
