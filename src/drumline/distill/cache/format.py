"""A teacher's outputs on disk: for each (epoch, sample) of one view of one set, a row of bytes (`payload.py`).

A view is a pure function of (seed, epoch, sample id), so a cache serves any student, batch and number of processes.
A folder holds `manifest.json` (the key, `key.py`, and where it was filled) and for each epoch
`epoch-00003/block-0007.rows` with the rows of BLOCK samples in order of their ids, then `sha256.txt`, once all are
there. Promises: every file is written whole or not at all, and no byte of one is used before a checksum has covered
it. One run at a time writes to a folder. Refuses a folder with another key, naming what differs; one that another
run is filling; a damaged file, naming it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.core.files import CorruptError, write_file, write_text
from drumline.core.lock import exclusive
from drumline.core.sealed import read_sealed, write_sealed
from drumline.data.feed.sampler import Ids
from drumline.distill.cache.key import WORDS, Key
from drumline.parallel.world import World
from drumline.state.provenance import device_name

BLOCK = 8192
"""Samples to a file."""
SAME_BITS = "kernels that repeat"
MANIFEST, CHECKSUMS, LOCK = "manifest.json", "sha256.txt", "filling.lock"
_MAGIC = b"DRUMROWS"
_TRAILER = struct.Struct("<8sIIQQ")
_TRAILER_BYTES = _TRAILER.size + 32
T = TypeVar("T")
Place = tuple[int, int]
"""Epoch and block."""


def describe_machine(world: World) -> dict[str, str]:
    """What may change the bits of an output though the key is the same."""
    threads = torch.get_num_threads()
    device = device_name(world.device)
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

    def block_of(self, samples: Ids) -> Ids:
        """Which block each sample is in."""
        return samples // BLOCK

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


def sole_filler(folder: Path) -> AbstractContextManager[None]:
    """Keeps other runs from writing to a folder, also on other machines that share it."""
    held = UserError(
        f"distill.cache = {folder}: is being filled by another run", "wait for it, or give another folder"
    )
    return exclusive(folder / LOCK, held)


def from_first(world: World, work: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank; a refusal of rank 0 is everybody's."""
    found: T | None = None
    refusal: tuple[str, str] | None = None
    if world.is_rank_zero:
        try:
            found = work()
        except UserError as error:
            refusal = error.what, error.fix
    found, refusal = world.broadcast_object((found, refusal))
    if refusal is not None:
        raise UserError(*refusal)
    return found


def refuse_if_any(world: World, odd: str, fix: str) -> None:
    """Raises on every rank when one of them found something odd, in the words of the first that did."""
    for rank, words in enumerate(world.all_gather_object(odd)):
        if words:
            raise UserError(f"rank {rank}: {words}" if world.size > 1 else words, fix)


def unwritable(path: Path, error: OSError) -> UserError:
    """What to say when the disk refuses."""
    return UserError(
        f"distill.cache: cannot write {path}: {error.strerror or error}",
        "make room, or give a folder that can be written with --distill.cache; blocks that are filled stay, and "
        "the same command goes on with the others",
    )


def _begin(folder: Path, key: Key, world: World) -> None:
    """Checks the folder, and writes the manifest where there is none."""
    try:
        there = [path for path in folder.iterdir() if _counts(path)] if folder.exists() else []
        if not (folder / MANIFEST).exists():
            if there:
                raise UserError(
                    f"distill.cache = {folder}: holds something else ({there[0].name}, no {MANIFEST})",
                    "give an empty or new folder with --distill.cache",
                )
            folder.mkdir(parents=True, exist_ok=True)
            with sole_filler(folder):
                # Looked for again: another run may have been first.
                if not (folder / MANIFEST).exists():
                    write_sealed(folder / MANIFEST, {"key": asdict(key), "machine": describe_machine(world)})
    except OSError as error:
        raise unwritable(folder, error) from error
    _read_manifest(folder, key)


def _counts(path: Path) -> bool:
    """Whether a file is more than what a killed run leaves behind."""
    return path.suffix != ".tmp" and path.name != LOCK


def _read_manifest(folder: Path, key: Key) -> dict[str, str]:
    """The machine that a manifest names, when it is sound and has this key."""
    path, another = folder / MANIFEST, "give another folder with --distill.cache, or delete this one"
    try:
        content = read_sealed(path, newest=1)
        stored, machine = dict(content["key"]), dict(content["machine"])
    except OSError as error:
        raise UserError(f"distill.cache: {path}: {error.strerror or error}", another) from error
    except CorruptError as reason:
        raise UserError(f"distill.cache: {reason}", another) from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"distill.cache: {path}: not the manifest of a cache", another) from None
    wanted = asdict(key)
    odd = [
        f"{WORDS.get(name, name)}: {' → '.join(_differing(stored.get(name), wanted.get(name)))}"
        for name in {**wanted, **stored}
        if stored.get(name) != wanted.get(name)
    ]
    if odd:
        raise UserError(f"distill.cache = {folder}: was filled for something else. {'. '.join(odd)}", another)
    return {str(name): str(value) for name, value in machine.items()}


def _differing(stored: object, wanted: object) -> tuple[str, str]:
    """Two values in words; of two texts in parts only the parts that differ."""
    old, new = str(stored).split("; "), str(wanted).split("; ")
    gone, come = [part for part in old if part not in new], [part for part in new if part not in old]
    return "; ".join(gone) or "nothing", "; ".join(come) or "nothing"


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"distill.cache: {path}: {reason}", "delete this file: it will be made again")
