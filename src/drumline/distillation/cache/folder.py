"""A teacher cache on disk: one row of bytes (`rows.py`) for each epoch and sample of a data set, under a key.

A folder holds `manifest.json` (the key, and the machine that filled it). For each epoch it holds
`epoch-00003/block-0007.rows`, the rows of BLOCK samples in the order of their ids, and, once all blocks exist,
`sha256.txt`. Promises: files are written atomically, and no byte is used before its checksum has been verified. One
run at a time writes to a folder. Rejects a folder with a different key, naming the difference; a folder that a
different run is filling; a damaged file, naming it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.files import CorruptError, read_sealed, write_file, write_sealed, write_text
from drumline.core.lock import exclusive
from drumline.data.feed.sampler import Ids
from drumline.distillation.cache.rows import Rule
from drumline.parallel.world import World
from drumline.state.provenance import device_name

FORMAT = 1
LABELS = {
    "teacher": "the teacher",
    "transform": "the image transform",
    "source": "the data",
    "samples": "the number of samples",
    "labels_crc": "the checksum of the labels",
    "content": "the images",
    "seed": "run.seed",
    "classes": "the teacher's number of classes",
    "top_k": "logits stored per sample (0: all)",
    "pooled": "pooled features stored per sample (0: none)",
    "dtype": "the type of the stored numbers",
    "format": "the format of the cache",
}
"""What messages call each field."""


@dataclass(frozen=True)
class Key:
    """Everything that determines an output."""

    teacher: str
    """Names, SHA-256 of the weights, precision, and how an ensemble is combined, separated by `; `."""
    transform: str
    """Everything that determines pixels: `describe_transform`."""
    source: str
    samples: int
    labels_crc: int
    content: str
    """`content_of`"""
    seed: int
    classes: int
    top_k: int
    pooled: int
    dtype: str
    format: int = FORMAT

    @property
    def rule(self) -> Rule:
        """The format of a row."""
        return Rule(self.classes, self.dtype, self.top_k, self.pooled)

    def serving(self, stored: Mapping[str, Any], formerly: str = "") -> Key:
        """This key, with the features that a cache of the key `stored` has beyond those that are wanted, and with
        the teacher as earlier revisions identified it. Features may have widened the type of the numbers, which
        changes no value."""
        key = replace(self, teacher=formerly) if formerly and stored.get("teacher") == formerly else self
        if self.pooled or not isinstance(stored.get("pooled"), int):
            return key
        wider = stored.get("dtype") == "float32"
        return replace(key, pooled=stored["pooled"], dtype="float32" if wider else self.dtype)


BLOCK = 8192
"""Samples per file."""
DETERMINISTIC = "kernels that repeat"
"""Deterministic kernels, as manifests record them. Stored, so the text must not change."""
SHARED_FOLDER = "use a folder that all machines share for distill.cache"
"""The fix if a rank does not see what rank 0 sees."""
MANIFEST, CHECKSUMS, LOCK = "manifest.json", "sha256.txt", "filling.lock"
_MAGIC = b"DRUMROWS"
_TRAILER = struct.Struct("<8sIIQQ")
_TRAILER_BYTES = _TRAILER.size + 32
T = TypeVar("T")
Place = tuple[int, int]
"""Epoch and block."""


def describe_machine(world: World) -> dict[str, str]:
    """What may change the bits of an output although the key is the same."""
    threads = torch.get_num_threads()
    device = device_name(world.device)
    if world.device.type == "cpu":
        device += f", {threads} thread{'s' if threads > 1 else ''}"
    repeat = world.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    kernels = DETERMINISTIC if repeat else "fastest kernels"
    return {"device": device, "torch": str(torch.__version__), "kernels": kernels}


@dataclass(frozen=True)
class Cache:
    """An open cache folder: its paths, and how blocks are written and read."""

    folder: Path
    key: Key
    machine: dict[str, str]
    """The machine that created it: `describe_machine`."""

    @property
    def blocks(self) -> int:
        """Blocks per epoch."""
        return -(-self.key.samples // BLOCK)

    def samples(self, block: int) -> range:
        """The sample ids of a block."""
        return range(block * BLOCK, min((block + 1) * BLOCK, self.key.samples))

    def block_of(self, samples: Ids) -> Ids:
        """The block of each sample."""
        return samples // BLOCK

    def epoch_folder(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:05d}"

    def path(self, epoch: int, block: int) -> Path:
        return self.epoch_folder(epoch) / f"block-{block:04d}.rows"

    def file_bytes(self, block: int) -> int:
        """The size of a block's file."""
        return len(self.samples(block)) * self.key.rule.row_bytes + _TRAILER_BYTES

    def missing(self, epoch: int) -> list[int]:
        """The blocks that are not filled yet."""
        return [block for block in range(self.blocks) if not self.path(epoch, block).exists()]

    def whole(self, epoch: int) -> bool:
        """Whether an epoch is complete, including its checksums."""
        return (self.epoch_folder(epoch) / CHECKSUMS).exists() and not self.missing(epoch)

    def write(self, epoch: int, block: int, rows: NDArray[np.uint8]) -> str:
        """Writes a block and returns the SHA-256 of its file."""
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
        """A block's rows, memory-mapped and verified, and the SHA-256 of the file."""
        path, expected = self.path(epoch, block), self.file_bytes(block)
        try:
            size = path.stat().st_size
            if size != expected:
                raise _damaged(path, f"has {size:,} bytes instead of {expected:,}")
            content = np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise _damaged(path, error.strerror or str(error)) from error
        rows, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:].tobytes()
        if trailer[: _TRAILER.size] != self._trailer(epoch, block):
            raise _damaged(path, f"is not block {block} of epoch {epoch} of this cache")
        digest = hashlib.sha256(rows.data)
        if trailer[_TRAILER.size :] != digest.digest():
            raise _damaged(path, "its checksum does not match: the content has changed since it was written")
        digest.update(trailer)
        return rows.reshape(-1, self.key.rule.row_bytes), digest.hexdigest()

    def seal(self, epoch: int, sums: Sequence[str]) -> None:
        """Writes the SHA-256 of every block's file, in the format of `sha256sum -c`."""
        assert len(sums) == self.blocks, (len(sums), self.blocks)
        path = self.epoch_folder(epoch) / CHECKSUMS
        lines = (f"{line}\n" for line in (self._line(block, line) for block, line in enumerate(sums)))
        try:
            write_text(path, "".join(lines))
        except OSError as error:
            raise unwritable(path, error) from error

    def verified(self, epoch: int) -> Generator[NDArray[np.uint8], None, None]:
        """Yields the rows of each block of an epoch, verified against the block's checksum and the list."""
        path = self.epoch_folder(epoch) / CHECKSUMS
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            raise UserError(
                f"distill.cache = {self.folder}: epoch {epoch} is not filled ({path.name} is missing)",
                "repeat the command: it fills what is missing first",
            ) from None
        except OSError as error:
            raise _damaged(path, error.strerror or str(error)) from error
        if len(lines) != self.blocks + 1 or lines[-1]:
            raise _damaged(path, f"does not list {self.blocks} blocks")
        for block in range(self.blocks):
            rows, found = self.read(epoch, block)
            if lines[block] != self._line(block, found).encode():
                raise _damaged(path, f"does not match {self.path(epoch, block).name}, which is intact")
            yield rows

    def _trailer(self, epoch: int, block: int) -> bytes:
        return _TRAILER.pack(_MAGIC, epoch, block, self.key.rule.row_bytes, len(self.samples(block)))

    def _line(self, block: int, sha256: str) -> str:
        return f"{sha256}  block-{block:04d}.rows"


def open_cache(folder: Path, key: Key, world: World, formerly: str = "") -> Cache:
    """Opens the cache in a folder; creates it if the folder is new or empty. It may store pooled features that `key`
    does not ask for, and identify the teacher as earlier revisions did (`formerly`). All ranks call it; rank 0
    writes."""
    from_rank_zero(world, lambda: _create(folder, key, world, formerly))
    wrong, machine = "", dict[str, str]()
    try:
        key, machine = _read_manifest(folder, key, formerly)
    except UserError as error:
        wrong = error.what
    raise_if_any(world, wrong, SHARED_FOLDER)
    return Cache(folder, key, machine)


def sole_filler(folder: Path) -> AbstractContextManager[None]:
    """Keeps other runs from writing to a folder, even on other machines that share it."""
    held = UserError(
        f"distill.cache = {folder}: a different run is filling it", "wait for it, or use a different folder"
    )
    return exclusive(folder / LOCK, held)


def from_rank_zero(world: World, work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and returns its result, or raises its `UserError`, on every rank."""
    result: T | None = None
    failure: tuple[str, str, str] | None = None
    if world.is_rank_zero:
        try:
            result = work()
        except UserError as error:
            failure = error.what, error.fix, error.code
    result, failure = world.broadcast_object((result, failure))
    if failure is not None:
        raise UserError(*failure)
    return result


def raise_if_any(world: World, wrong: str, fix: str) -> None:
    """Raises on every rank if any of them passes something wrong, with the message of the first that does."""
    for rank, message in enumerate(world.all_gather_object(wrong)):
        if message:
            raise UserError(f"rank {rank}: {message}" if world.size > 1 else message, fix)


def unwritable(path: Path, error: OSError) -> UserError:
    """The error for a path that cannot be written."""
    return UserError(
        f"distill.cache: cannot write {path}: {error.strerror or error}",
        "free disk space, or use a writable folder for distill.cache; to continue with the missing blocks, repeat "
        "the command",
    )


def _create(folder: Path, key: Key, world: World, formerly: str) -> None:
    """Checks the folder, and writes the manifest if there is none."""
    try:
        existing = [path for path in folder.iterdir() if _is_content(path)] if folder.exists() else []
        if not (folder / MANIFEST).exists():
            if existing:
                raise UserError(
                    f"distill.cache = {folder}: not a cache (it has {existing[0].name}, but no {MANIFEST})",
                    "use an empty or new folder for distill.cache",
                )
            folder.mkdir(parents=True, exist_ok=True)
            with sole_filler(folder):
                # Checked again: a different run may have written it.
                if not (folder / MANIFEST).exists():
                    write_sealed(folder / MANIFEST, {"key": asdict(key), "machine": describe_machine(world)})
    except OSError as error:
        raise unwritable(folder, error) from error
    _read_manifest(folder, key, formerly)


def _is_content(path: Path) -> bool:
    """Whether a file is more than a leftover of a killed run."""
    return path.suffix != ".tmp" and path.name != LOCK


def _read_manifest(folder: Path, key: Key, formerly: str) -> tuple[Key, dict[str, str]]:
    """The key and the machine in the manifest. Raises if the manifest is damaged, or if its key does not serve
    `key`."""
    path, fix = folder / MANIFEST, "use a different folder for distill.cache, or delete this one"
    try:
        content = read_sealed(path, newest=1)
        stored, machine = dict(content["key"]), dict(content["machine"])
    except OSError as error:
        raise UserError(f"distill.cache: {path}: {error.strerror or error}", fix) from error
    except CorruptError as reason:
        raise UserError(f"distill.cache: {reason}", fix) from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"distill.cache: {path}: not the manifest of a cache", fix) from None
    key = key.serving(stored, formerly)
    wanted = asdict(key)
    changes = [
        f"{LABELS.get(name, name)}: {' → '.join(_differing(stored.get(name), wanted.get(name)))}"
        for name in {**wanted, **stored}
        if stored.get(name) != wanted.get(name)
    ]
    if changes:
        raise UserError(
            f"distill.cache = {folder}: was filled with different settings. {'. '.join(changes)}", fix
        )
    return key, {str(name): str(value) for name, value in machine.items()}


def _differing(stored: object, wanted: object) -> tuple[str, str]:
    """Two values as text; of texts with several parts, only the parts that differ."""
    old, new = str(stored).split("; "), str(wanted).split("; ")
    gone, come = [part for part in old if part not in new], [part for part in new if part not in old]
    return "; ".join(gone) or "nothing", "; ".join(come) or "nothing"


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"distill.cache: {path}: {reason}", "delete this file; the next run fills it again")
