"""Sharded checkpoints: every process writes its own shards, and rank 0 joins them into one checkpoint.

A group of tensors (`model`, `optimizer`, ...) is stored as `GROUP.shard-R-of-W.safetensors`, one file for each of W
processes. File R has the R-th slice of the rows of each sharded tensor; tensors that are not sharded are in file 0.
The manifest lists all files, and the full shapes of sharded tensors. Promises: a folder under its final name is
complete. The hash of the state is that of the joined tensors, so it does not depend on the layout, and computing it
needs the memory of one tensor. Each process leaves a receipt beside its shards (what it wrote, or why it failed), and
rank 0 waits for all receipts: every process must see the folder.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from drumline.state.tensors import Entry, Tensors, read_tensors, snapshot_to_host, tensor_index, write_tensors

RECEIPT_LIMIT = 16 << 20
POLL_SECONDS = 0.1
PATIENCE_S = 120.0
"""How long to wait for missing shards while the folder does not grow."""
_RECEIPT = "receipt-{rank}.json"


@dataclass(frozen=True)
class TensorShard:
    """The rows of a tensor that one process holds."""

    tensor: torch.Tensor
    full: tuple[int, ...] | None
    """The shape of the whole tensor; None if this is the whole tensor."""


LocalGroups = dict[str, dict[str, TensorShard]]


def shard_rows(rows: int, rank: int, world: int) -> tuple[int, int]:
    """The first row of a rank's slice, and the first row after it. Slices are equal and rounded up, so that the last
    ones may be smaller or empty, as in FSDP."""
    each = -(-rows // world)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


def is_shard(file: Path) -> bool:
    """Whether a file is a shard, by its name."""
    return SHARD.fullmatch(file.name) is not None


def write_shards(temporary: Path, rank: int, world: int, groups: LocalGroups) -> None:
    """Writes this rank's shards, from host tensors, and then its receipt. An error is raised, and written to the
    receipt for rank 0. Blocking: keep it off the training thread."""
    try:
        files, full = {}, {}
        for group, shards in groups.items():
            name = shard_name(group, rank, world)
            size, sha256 = write_tensors(
                temporary / name, {tensor: shard.tensor for tensor, shard in shards.items()}
            )
            files[name] = {"bytes": size, "sha256": sha256}
            full[group] = {
                tensor: list(shard.full) for tensor, shard in shards.items() if shard.full is not None
            }
    except BaseException as error:
        # A full disk may have no room for the receipt: then rank 0 times out.
        with suppress(OSError):
            _leave_receipt(temporary, rank, {"failed": f"rank {rank}: {error}"})
        raise
    _leave_receipt(temporary, rank, {"files": files, "full": full})


def snapshot_shards(groups: LocalGroups) -> tuple[LocalGroups, torch.cuda.Event | None]:
    """`snapshot_to_host` for shards."""
    tensors = {group: {name: shard.tensor for name, shard in each.items()} for group, each in groups.items()}
    snapshot, event = snapshot_to_host(tensors)
    return {
        group: {name: TensorShard(snapshot[group][name], shard.full) for name, shard in each.items()}
        for group, each in groups.items()
    }, event


class ShardWriter:
    """Writes the shards of a rank other than 0 in the background. Its receipt reports errors to rank 0, whose
    `CheckpointManager` counts and logs them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shards")

    def save(self, temporary: Path, shards: LocalGroups, rank: int, world: int) -> None:
        """Takes a snapshot now and writes it in the background."""
        mine, copied = snapshot_shards(shards)

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            write_shards(temporary, rank, world, mine)

        self._thread.submit(write)

    def close(self) -> None:
        """Waits for the last save."""
        self._thread.shutdown()


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
    """On rank 0, after its own `write_shards`: waits for the other ranks, adds groups that are not sharded (`whole`,
    host tensors), writes the manifest, renames the folder to its final name and returns that. Raises OSError if a
    rank failed, or if shards are missing and the folder has not grown for `patience_s`. After an error, the folder is
    removed."""
    try:
        receipts = _receipts(temporary, world, patience_s)
        shapes = receipts[0]["full"]
        if any(receipt["full"] != shapes for receipt in receipts):
            raise OSError("the processes wrote shards of different states")
        files: dict[str, dict[str, Any]] = {
            name: entry for receipt in receipts for name, entry in receipt["files"].items()
        }
        for group, tensors in (whole or {}).items():
            size, sha256 = write_tensors(temporary / f"{group}.safetensors", tensors)
            files[f"{group}.safetensors"] = {"bytes": size, "sha256": sha256}
        sharding = Sharding(world, shapes)
        groups: dict[str, Mapping[str, torch.Tensor]] = {
            group: _OnDisk(temporary, group, sharding)
            for group in shapes  # of one tensor at a time
        }
        manifest = Manifest(
            FORMAT_SHARDED,
            position,
            files,
            state_sha256({**groups, **(whole or {})}),
            recipe,
            environment,
            sharding,
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
    """The joined tensors of a group, from bytes that match the manifest's hashes. Raises `CorruptError`."""
    sharding = manifest.sharding
    assert sharding is not None
    shards = []
    for rank in range(sharding.count):
        name = shard_name(group, rank, sharding.count)
        expected = manifest.files[name]
        shards.append(read_tensors(folder / name, expected["bytes"], expected["sha256"]))
    joined: Tensors = {}
    for name in _names(folder, group, sharding, shards):
        held = [shard.pop(name) for shard in shards if name in shard]
        full = sharding.shapes[group].get(name)
        joined[name] = held[0] if full is None else torch.cat(held)
    return joined


class _OnDisk(Mapping[str, torch.Tensor]):
    """The tensors of a group that was just written. Each is read and joined on access."""

    def __init__(self, folder: Path, group: str, sharding: Sharding) -> None:
        self.sharding, self.group = sharding, group
        files = [folder / shard_name(group, rank, sharding.count) for rank in range(sharding.count)]
        self.indices = [tensor_index(file) for file in files]
        self.names = _names(folder, group, sharding, [index.entries for index in self.indices])

    def __getitem__(self, name: str) -> torch.Tensor:
        held = [index.read(name) for index in self.indices if name in index.entries]
        return held[0] if name not in self.sharding.shapes[self.group] else torch.cat(held)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _names(
    folder: Path,
    group: str,
    sharding: Sharding,
    shards: Sequence[Mapping[str, torch.Tensor] | Mapping[str, Entry]],
) -> list[str]:
    """All names of a group. Raises `CorruptError` unless every shard has exactly its own rows."""
    sharded = sharding.shapes[group]
    for rank, shard in enumerate(shards):
        where = folder / shard_name(group, rank, sharding.count)
        if missing := sorted(set(sharded) - set(shard)):
            raise CorruptError(f"{where}: its shard of {missing[0]!r} is missing")
        if rank and (odd := sorted(set(shard) - set(sharded))):
            raise CorruptError(f"{where}: holds {odd[0]!r}, which is not sharded")
        for name, shape in sharded.items():
            first, last = shard_rows(shape[0], rank, sharding.count)
            if shard[name].shape != (last - first, *shape[1:]) or shard[name].dtype != shards[0][name].dtype:
                raise CorruptError(f"{where}: its shard of {name!r} has shape {tuple(shard[name].shape)}")
    return sorted(shards[0])


def _leave_receipt(temporary: Path, rank: int, content: dict[str, Any]) -> None:
    write_text(temporary / _RECEIPT.format(rank=rank), json.dumps(content))


def _receipts(temporary: Path, world: int, patience_s: float) -> list[dict[str, Any]]:
    """The receipts of all ranks, when all have written. Raises as soon as one has failed."""
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
                f"timed out waiting for the shards of rank(s) {late} in {temporary}: every process must see it"
            )
        time.sleep(POLL_SECONDS)
