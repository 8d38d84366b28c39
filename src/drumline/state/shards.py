"""Checkpoints in pieces: every process of a sharded run writes its own, and rank 0 makes one checkpoint of them.

A group of tensors (`model`, `optimizer`, ...) lies in `GROUP.shard-R-of-W.safetensors`, one file for each of the W
processes: of a sharded tensor, file R has the R-th share of its rows; what is not sharded is whole in file 0. The
manifest lists all files as ever, and the full shapes of what is sharded. Promises: as with plain checkpoints, a
folder under its final name is whole; the hash of the state is that of the joined tensors, so it is the same in any
layout; joining needs the memory of one tensor. While it is written, each process leaves a receipt beside its pieces
(what it wrote, or why it could not), and rank 0 waits for all of them: every process must see the folder.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.core.files import CorruptError, read_small, rename_folder, write_text
from drumline.state.fingerprint import state_sha256
from drumline.state.manifest import (
    FORMAT_SHARDED,
    SHARD,
    Manifest,
    Position,
    Sharding,
    shard_name,
)
from drumline.state.tensors import Entry, Tensors, read_tensors, tensor_index, write_tensors

RECEIPT_LIMIT = 16 << 20
POLL_SECONDS = 0.1
PATIENCE_S = 120.0
"""How long nothing may have been written before the missing pieces are given up."""
_RECEIPT = "receipt-{rank}.json"


@dataclass(frozen=True)
class TensorShard:
    """A tensor of a sharded state as one process holds it."""

    tensor: torch.Tensor
    full: tuple[int, ...] | None
    """Shape of the tensor that it has rows of; None: it is whole."""


LocalGroups = dict[str, dict[str, TensorShard]]


def shard_rows(rows: int, rank: int, world: int) -> tuple[int, int]:
    """The first of a rank's rows and the first after them: equal shares, rounded up, so that the last ones may have
    fewer or none. It is how FSDP shards."""
    each = -(-rows // world)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


def is_shard(file: Path) -> bool:
    """Whether a file is a part of a checkpoint in pieces."""
    return SHARD.fullmatch(file.name) is not None


def write_shards(temporary: Path, rank: int, world: int, groups: LocalGroups) -> None:
    """On every rank: its pieces from host tensors, then its receipt. What goes wrong stands in the receipt, for
    rank 0, and is raised. Blocking: call it off the training thread."""
    try:
        files, full = {}, {}
        for group, pieces in groups.items():
            name = shard_name(group, rank, world)
            size, sha256 = write_tensors(
                temporary / name, {tensor: piece.tensor for tensor, piece in pieces.items()}
            )
            files[name] = {"bytes": size, "sha256": sha256}
            full[group] = {
                tensor: list(piece.full) for tensor, piece in pieces.items() if piece.full is not None
            }
    except BaseException as error:
        # A full disk has no room for the receipt either; then rank 0 waits in vain.
        with suppress(OSError):
            _leave_receipt(temporary, rank, {"failed": f"rank {rank}: {error}"})
        raise
    _leave_receipt(temporary, rank, {"files": files, "full": full})


def seal_shards(
    temporary: Path,
    world: int,
    position: Position,
    recipe: str,
    environment: dict[str, Any],
    *,
    whole: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    patience_s: float = PATIENCE_S,
) -> Path:
    """On rank 0, after its own `write_shards`: waits for the others, adds groups that are `whole` (host tensors),
    writes the manifest and puts the checkpoint in place; gives its path. Raises OSError when a rank could not write,
    or pieces are missing and the folder has not grown for `patience_s`. Whatever is raised, nothing is left."""
    try:
        receipts = _receipts(temporary, world, patience_s)
        shapes = receipts[0]["full"]
        if any(receipt["full"] != shapes for receipt in receipts):
            raise OSError("the processes wrote pieces of different states")
        files: dict[str, dict[str, Any]] = {
            name: entry for receipt in receipts for name, entry in receipt["files"].items()
        }
        for group, tensors in (whole or {}).items():
            size, sha256 = write_tensors(temporary / f"{group}.safetensors", tensors)
            files[f"{group}.safetensors"] = {"bytes": size, "sha256": sha256}
        layout = Sharding(world, shapes)
        groups: dict[str, Mapping[str, torch.Tensor]] = {
            group: _OnDisk(temporary, group, layout)
            for group in shapes  # of one tensor at a time
        }
        manifest = Manifest(
            FORMAT_SHARDED,
            position,
            files,
            state_sha256({**groups, **(whole or {})}),
            recipe,
            environment,
            layout,
        )
        manifest.write(temporary)
        for rank in range(world):
            (temporary / _RECEIPT.format(rank=rank)).unlink()
        final = temporary.with_name(f"step-{position.step}")
        rename_folder(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def read_shards(folder: Path, manifest: Manifest, group: str) -> Tensors:
    """The joined tensors of a group, from bytes that have the hashes of the manifest. Raises `CorruptError`."""
    layout = manifest.sharding
    assert layout is not None
    parts = []
    for rank in range(layout.count):
        name = shard_name(group, rank, layout.count)
        expected = manifest.files[name]
        parts.append(read_tensors(folder / name, expected["bytes"], expected["sha256"]))
    joined: Tensors = {}
    for name in _names(folder, group, layout, parts):
        held = [part.pop(name) for part in parts if name in part]
        full = layout.shapes[group].get(name)
        joined[name] = held[0] if full is None else torch.cat(held)
    return joined


class _OnDisk(Mapping[str, torch.Tensor]):
    """The tensors of a group that has just been written, each read and joined when it is asked for."""

    def __init__(self, folder: Path, group: str, layout: Sharding) -> None:
        self.layout, self.group = layout, group
        files = [folder / shard_name(group, rank, layout.count) for rank in range(layout.count)]
        self.indices = [tensor_index(file) for file in files]
        self.names = _names(folder, group, layout, [index.entries for index in self.indices])

    def __getitem__(self, name: str) -> torch.Tensor:
        held = [index.read(name) for index in self.indices if name in index.entries]
        return held[0] if name not in self.layout.shapes[self.group] else torch.cat(held)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _names(
    folder: Path,
    group: str,
    layout: Sharding,
    parts: Sequence[Mapping[str, torch.Tensor] | Mapping[str, Entry]],
) -> list[str]:
    """All names of a group, when every piece has just the rows that are its own. Raises `CorruptError`."""
    sharded = layout.shapes[group]
    for rank, part in enumerate(parts):
        where = folder / shard_name(group, rank, layout.count)
        if missing := sorted(set(sharded) - set(part)):
            raise CorruptError(f"{where}: its piece of {missing[0]!r} is missing")
        if rank and (odd := sorted(set(part) - set(sharded))):
            raise CorruptError(f"{where}: holds {odd[0]!r}, which is not sharded")
        for name, shape in sharded.items():
            first, last = shard_rows(shape[0], rank, layout.count)
            if part[name].shape != (last - first, *shape[1:]) or part[name].dtype != parts[0][name].dtype:
                raise CorruptError(f"{where}: its piece of {name!r} has shape {tuple(part[name].shape)}")
    return sorted(parts[0])


def _leave_receipt(temporary: Path, rank: int, content: dict[str, Any]) -> None:
    write_text(temporary / _RECEIPT.format(rank=rank), json.dumps(content))


def _receipts(temporary: Path, world: int, patience_s: float) -> list[dict[str, Any]]:
    """What every rank wrote, when all have. One that failed is not waited past."""
    found: dict[int, dict[str, Any]] = {}
    size, since = -1, time.monotonic()
    while True:
        for rank in range(world):
            path = temporary / _RECEIPT.format(rank=rank)
            if rank not in found and path.exists():
                found[rank] = json.loads(read_small(path, RECEIPT_LIMIT))
                if "failed" in found[rank]:
                    raise OSError(found[rank]["failed"])
        if len(found) == world:
            return [found[rank] for rank in range(world)]
        grown = sum(entry.stat().st_size for entry in temporary.glob("*.safetensors"))
        if grown > size:
            size, since = grown, time.monotonic()
        if time.monotonic() - since > patience_s:
            late = sorted(set(range(world)) - set(found))
            raise OSError(
                f"rank(s) {late} have not written their pieces to {temporary}: do all processes see that folder?"
            )
        time.sleep(POLL_SECONDS)
