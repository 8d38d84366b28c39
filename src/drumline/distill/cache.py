"""A teacher's outputs on disk: for each (epoch, sample) of one view of one set, a row of bytes (`payload.py`).

A view is a pure function of (seed, epoch, sample id), so a cache serves any student, batch and number of processes.
A folder holds `manifest.json` (the key: all that decides an output, and where it was computed) and for each epoch
`epoch-00003/block-0007.rows` with the rows of BLOCK samples in order of their ids, then `sha256.txt`, once all are
there. Promises: every file is written whole or not at all, and no byte of one is used before a checksum has covered
it. Refuses a folder with another key, naming what differs; a damaged file, naming it; mixed images.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.data.ahead import ahead
from drumline.data.loader import Batches
from drumline.data.order import Ids, Request
from drumline.data.sources import Source
from drumline.data.views import View
from drumline.distill.payload import Rule
from drumline.errors import UserError
from drumline.launch.world import World
from drumline.state.atomic import write_bytes, write_file, write_text
from drumline.state.environment import describe_environment

FORMAT = 1
BLOCK = 8192
"""Samples to a file."""
READY = 2
"""Batches of rows that wait for the step."""
SAME_BITS = "kernels that repeat"
MANIFEST, CHECKSUMS = "manifest.json", "sha256.txt"
_MAGIC = b"DRUMROWS"
_TRAILER = struct.Struct("<8sIIQQ")
_TRAILER_BYTES = _TRAILER.size + 32
_WORDS = {
    "teacher": "the teacher",
    "transform": "the view of the images",
    "source": "the data",
    "samples": "the number of samples",
    "labels_crc": "the checksum of the labels",
    "seed": "run.seed",
    "classes": "the teacher's number of classes",
    "top_k": "logits kept per sample (0: all)",
    "pooled": "pooled features kept per sample (0: none)",
    "dtype": "the type of the stored numbers",
    "format": "the format of the cache",
}
T = TypeVar("T")
Place = tuple[int, int]
"""Epoch and block."""


@dataclass(frozen=True)
class Key:
    """All that decides an output. Two runs with the same key may share a cache."""

    teacher: str
    """Names, SHA-256 of the weights, precision, and how several are made one; parts separated by `; `."""
    transform: str
    """Whatever decides pixels: `describe_view`."""
    source: str
    samples: int
    labels_crc: int
    seed: int
    classes: int
    top_k: int
    pooled: int
    dtype: str
    format: int = FORMAT

    @property
    def rule(self) -> Rule:
        """How a row is written."""
        return Rule(self.classes, self.dtype, self.top_k, self.pooled)


def make_key(
    *,
    teacher: str,
    source: Source,
    view: View,
    mean: Sequence[float],
    std: Sequence[float],
    seed: int,
    rule: Rule,
) -> Key:
    """The key of a teacher's outputs on a set. Refuses views that mix images."""
    if view.mixes:
        raise UserError(
            "distill.cache: mixed images depend on their neighbour in the batch (data.mixup, data.cutmix), and "
            "outputs are kept per sample",
            "leave out --distill.cache, or set data.mixup and data.cutmix to 0",
        )
    return Key(
        teacher=teacher,
        transform=describe_view(view, mean, std),
        source=source.name,
        samples=len(source),
        labels_crc=zlib.crc32(source.labels.tobytes()),
        seed=seed,
        classes=rule.classes,
        top_k=rule.top,
        pooled=rule.pooled,
        dtype=rule.dtype,
    )


def describe_view(view: View, mean: Sequence[float], std: Sequence[float]) -> str:
    """Everything of a view that decides what a teacher is shown, as text."""
    chosen = {item.name: getattr(view, item.name) for item in fields(view)}
    for mixed in ("mixup", "cutmix"):
        del chosen[mixed]
    if view.augment != "none":
        del chosen["eval_crop"]
    pixels = asdict(chosen.pop("augmentation"))
    # Six digits: measured statistics may differ in the last one from machine to machine.
    chosen |= pixels | {"mean": [float(f"{value:.6g}") for value in mean]}
    chosen |= {"std": [float(f"{value:.6g}") for value in std]}
    return "; ".join(f"{name}={value}" for name, value in chosen.items())


def describe_machine(world: World) -> dict[str, str]:
    """What may change the bits of an output though the key is the same."""
    threads = torch.get_num_threads()
    device = str(describe_environment(world, threads)["device"])
    if world.device.type == "cpu":
        device += f", {threads} thread{'s' if threads > 1 else ''}"
    repeat = world.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    kernels = SAME_BITS if repeat else "fastest kernels"
    return {"device": device, "torch": str(torch.__version__), "kernels": kernels}


@dataclass(frozen=True)
class Cache:
    """An open cache folder: where things lie in it, and how blocks are written and read."""

    folder: Path
    key: Key
    machine: dict[str, str]
    """Where it was begun: `describe_machine`."""

    @property
    def blocks(self) -> int:
        """Blocks to an epoch."""
        return -(-self.key.samples // BLOCK)

    def samples(self, block: int) -> range:
        """The sample ids of a block."""
        return range(block * BLOCK, min((block + 1) * BLOCK, self.key.samples))

    def epoch_folder(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:05d}"

    def path(self, epoch: int, block: int) -> Path:
        return self.epoch_folder(epoch) / f"block-{block:04d}.rows"

    def file_bytes(self, block: int) -> int:
        """Length of a block's file."""
        return len(self.samples(block)) * self.key.rule.row_bytes + _TRAILER_BYTES

    def missing(self, epoch: int) -> list[int]:
        """Blocks that are still to be filled."""
        return [block for block in range(self.blocks) if not self.path(epoch, block).exists()]

    def whole(self, epoch: int) -> bool:
        """Whether all of an epoch is there, checksums included."""
        return (self.epoch_folder(epoch) / CHECKSUMS).exists() and not self.missing(epoch)

    def write(self, epoch: int, block: int, rows: NDArray[np.uint8]) -> str:
        """Puts a block in place; the SHA-256 of its file."""
        assert rows.shape == (len(self.samples(block)), self.key.rule.row_bytes), rows.shape
        rows = np.ascontiguousarray(rows)
        digest = hashlib.sha256(rows.data)
        trailer = self._trailer(epoch, block) + digest.digest()
        digest.update(trailer)
        path = self.path(epoch, block)

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                file.write(rows.data)
                file.write(trailer)

        try:
            path.parent.mkdir(exist_ok=True)
            write_file(path, write)
        except OSError as error:
            raise unwritable(path, error) from error
        return digest.hexdigest()

    def read(self, epoch: int, block: int) -> tuple[NDArray[np.uint8], str]:
        """A block's rows, mapped from its file and verified, and the SHA-256 of the file."""
        path, expected = self.path(epoch, block), self.file_bytes(block)
        try:
            size = path.stat().st_size
            if size != expected:
                raise _damaged(path, f"{size:,} bytes, {expected:,} were written")
            content = np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise _damaged(path, error.strerror or str(error)) from error
        rows, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:].tobytes()
        if trailer[: _TRAILER.size] != self._trailer(epoch, block):
            raise _damaged(path, f"does not say that it is block {block} of epoch {epoch} of this cache")
        digest = hashlib.sha256(rows.data)
        if trailer[_TRAILER.size :] != digest.digest():
            raise _damaged(path, "its checksum does not match, the content has changed since it was written")
        digest.update(trailer)
        return rows.reshape(-1, self.key.rule.row_bytes), digest.hexdigest()

    def seal(self, epoch: int, sums: Sequence[str]) -> None:
        """Lists the SHA-256 of every block's file, in the form that `sha256sum -c` reads."""
        assert len(sums) == self.blocks, (len(sums), self.blocks)
        path = self.epoch_folder(epoch) / CHECKSUMS
        lines = (f"{line}\n" for line in (self._line(block, line) for block, line in enumerate(sums)))
        try:
            write_text(path, "".join(lines))
        except OSError as error:
            raise unwritable(path, error) from error

    def verified(self, epoch: int) -> Generator[NDArray[np.uint8], None, None]:
        """The rows of each block of an epoch in turn, each verified against its own checksum and the list's."""
        path = self.epoch_folder(epoch) / CHECKSUMS
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            raise UserError(
                f"distill.cache = {self.folder}: epoch {epoch} is not filled ({path.name} is missing)",
                "start the run again: it fills what is missing first",
            ) from None
        except OSError as error:
            raise _damaged(path, error.strerror or str(error)) from error
        if len(lines) != self.blocks + 1 or lines[-1]:
            raise _damaged(path, f"does not list {self.blocks} blocks")
        for block in range(self.blocks):
            rows, found = self.read(epoch, block)
            if lines[block] != self._line(block, found).encode():
                raise _damaged(path, f"does not match {self.path(epoch, block).name}, which is sound")
            yield rows

    def _trailer(self, epoch: int, block: int) -> bytes:
        return _TRAILER.pack(_MAGIC, epoch, block, self.key.rule.row_bytes, len(self.samples(block)))

    def _line(self, block: int, sha256: str) -> str:
        return f"{sha256}  block-{block:04d}.rows"


def open_cache(folder: Path, key: Key, world: World) -> Cache:
    """The cache at a folder, begun there if the folder is new or empty. All ranks call it; rank 0 writes."""
    from_first(world, lambda: _begin(folder, key, world))
    odd, machine = "", {}
    try:
        machine = _read_manifest(folder, key)
    except UserError as error:
        odd = error.what
    refuse_if_any(world, odd, "several machines need a common folder: give one that each of them sees")
    return Cache(folder, key, machine)


@dataclass(frozen=True)
class CachedRows:
    """The rows of batches, for training."""

    cache: Cache
    pin: bool = False
    """Into page-locked memory, to be copied to a GPU without waiting."""

    def for_requests(self, requests: Iterable[Request]) -> Generator[Tensor, None, None]:
        """(n, row_bytes) uint8 of each request, in order, made ahead by a thread. An epoch is verified before its
        first row is given out: block by block, one between two requests of the epoch before. Close it to end it."""
        return ahead(self._rows(requests), READY)

    def _rows(self, requests: Iterable[Request]) -> Generator[Tensor, None, None]:
        opened: dict[int, _Epoch] = {}
        for request in requests:
            now, later = request.epoch, request.epoch + 1
            opened = {epoch: opened.get(epoch) or _Epoch(self.cache, epoch) for epoch in (now, later)}
            yield opened[now].rows(request.samples, self.pin)
            opened[later].verify_early()


def with_rows(batches: Batches, requests: Iterable[Request], cache: Cache, device: torch.device) -> Batches:
    """The batches, each with its samples' rows on the device as `extra`. `requests` are those that the batches are
    made from, as an iterable of their own. Closing it closes `batches`."""
    source = CachedRows(cache, pin=device.type == "cuda")
    with closing(batches), closing(source.for_requests(requests)) as stored:
        for batch, rows in zip(batches, stored, strict=True):
            assert len(rows) == len(batch.labels), (len(rows), len(batch.labels))
            yield batch._replace(extra=rows.to(device, non_blocking=True))


def from_first(world: World, work: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank; a refusal of rank 0 is everybody's."""
    found: T | None = None
    refusal: tuple[str, str] | None = None
    if world.first:
        try:
            found = work()
        except UserError as error:
            refusal = error.what, error.fix
    found, refusal = world.share((found, refusal))
    if refusal is not None:
        raise UserError(*refusal)
    return found


def refuse_if_any(world: World, odd: str, fix: str) -> None:
    """Raises on every rank when one of them found something odd, in the words of the first that did."""
    for rank, words in enumerate(world.collect(odd)):
        if words:
            raise UserError(f"rank {rank}: {words}" if world.size > 1 else words, fix)


def unwritable(path: Path, error: OSError) -> UserError:
    """What to say when the disk refuses."""
    return UserError(
        f"distill.cache: cannot write {path}: {error.strerror or error}",
        "make room, or give a folder that can be written with --distill.cache; blocks that are filled stay, and "
        "the same command goes on with the others",
    )


class _Epoch:
    """An epoch's blocks, mapped one after the other, each verified before."""

    def __init__(self, cache: Cache, epoch: int) -> None:
        self._cache, self._epoch = cache, epoch
        self._to_come = cache.verified(epoch)
        self._blocks: list[NDArray[np.uint8]] = []
        self._put_off = False

    def verify_early(self) -> None:
        """One block more. What is wrong is told when the epoch is needed; it may not be."""
        if self._put_off or len(self._blocks) == self._cache.blocks:
            return
        try:
            self._blocks.append(next(self._to_come))
        except UserError:
            self._put_off, self._blocks = True, []
            self._to_come = self._cache.verified(self._epoch)

    def rows(self, samples: Ids, pin: bool) -> Tensor:
        """The rows of these samples, in their order."""
        if len(self._blocks) < self._cache.blocks:
            self._blocks.extend(self._to_come)
        rows = torch.empty((len(samples), self._cache.key.rule.row_bytes), dtype=torch.uint8, pin_memory=pin)
        into, of_block = rows.numpy(), samples // BLOCK
        order = np.argsort(of_block, kind="stable")
        cuts = np.searchsorted(of_block[order], np.arange(len(self._blocks) + 1))
        for block, (first, last) in enumerate(pairwise(cuts.tolist())):
            if first < last:
                where = order[first:last]
                into[where] = self._blocks[block][samples[where] - block * BLOCK]
        return rows


def _begin(folder: Path, key: Key, world: World) -> None:
    """Checks the folder, and writes the manifest where there is none."""
    try:
        there = [path for path in folder.iterdir() if path.suffix != ".tmp"] if folder.exists() else []
        if (folder / MANIFEST).exists():
            _read_manifest(folder, key)
            return
        if there:
            raise UserError(
                f"distill.cache = {folder}: holds something else ({there[0].name}, no {MANIFEST})",
                "give an empty or new folder with --distill.cache",
            )
        folder.mkdir(parents=True, exist_ok=True)
        content = _sealed({"key": asdict(key), "machine": describe_machine(world)})
        write_bytes(folder / MANIFEST, content)
    except OSError as error:
        raise unwritable(folder, error) from error


def _read_manifest(folder: Path, key: Key) -> dict[str, str]:
    """The machine that a manifest names, when it is sound and has this key."""
    path, another = folder / MANIFEST, "give another folder with --distill.cache, or delete this one"
    try:
        text = path.read_bytes()
        content = json.loads(text)
    except OSError as error:
        raise UserError(f"distill.cache: {path}: {error.strerror or error}", another) from error
    except ValueError as error:
        raise UserError(f"distill.cache: {path}: unreadable ({error})", another) from error
    # The text, not its meaning: 1E3 for 1000 has changed too.
    if not isinstance(content, dict) or _sealed({k: v for k, v in content.items() if k != "seal"}) != text:
        raise UserError(f"distill.cache: {path}: its checksum does not match", another)
    stored, wanted = content.get("key", {}), asdict(key)
    odd = [
        f"{_WORDS.get(name, name)}: {' → '.join(_differing(stored.get(name), wanted.get(name)))}"
        for name in {**wanted, **stored}
        if stored.get(name) != wanted.get(name)
    ]
    if odd:
        raise UserError(f"distill.cache = {folder}: was filled for something else. {'. '.join(odd)}", another)
    return {str(name): str(value) for name, value in content["machine"].items()}


def _differing(stored: object, wanted: object) -> tuple[str, str]:
    """Two values in words; of two texts in parts only the parts that differ."""
    old, new = str(stored).split("; "), str(wanted).split("; ")
    gone, come = [part for part in old if part not in new], [part for part in new if part not in old]
    return "; ".join(gone) or "nothing", "; ".join(come) or "nothing"


def _sealed(content: dict[str, Any]) -> bytes:
    """JSON with the SHA-256 of itself."""

    def text(part: dict[str, Any]) -> str:
        return json.dumps(part, indent=1, sort_keys=True)

    return text({**content, "seal": hashlib.sha256(text(content).encode()).hexdigest()}).encode()


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"distill.cache: {path}: {reason}", "delete this file: it will be made again")
