"""Saves checkpoints in the background and keeps the ones worth keeping.

Promises: only the snapshot (a copy to host memory, at most one of them) holds up the step; writing, hashing and
verifying happen on one background thread. A save that falls due while that is still busy waits for it a second, then
it is skipped and said, unless it must be. A save that fails is said at once and tried anew at the next one; after
three in a row, or when the last one of a run fails, the run ends with an error. An old checkpoint is deleted only
when as many newer ones as are to be kept verify; the best one stays.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.core import lock
from drumline.core.errors import UserError
from drumline.core.files import CorruptError
from drumline.core.lock import Superseded
from drumline.state.checkpoint import (
    Groups,
    begin_folder,
    checkpoints,
    is_temporary,
    step_of,
    temporary_name,
    verify_checkpoint,
    write_checkpoint,
)
from drumline.state.manifest import Position, read_manifest
from drumline.state.shards import LocalGroups, TensorShard, seal_shards, write_shards

FAILURES = 3
"""Failed saves in a row that end a run."""
PATIENCE_S = 1.0
"""How long a save waits for the one before: enough for a hiccup of the disk, little for a run."""


class CheckpointManager:
    """One run's `checkpoints/` folder, on the rank that writes. Nothing is touched before `begin`."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        recipe: str,
        environment: dict[str, Any],
        flush: Callable[[], None],
        warn: Callable[[str], None] = lambda text: None,
        log: Callable[[str], None] = lambda text: None,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        """`flush` puts the log on disk: a checkpoint never knows of steps that the log does not. `warn` is told of
        saves that failed (on the background thread) or were skipped, `log` of those that succeeded. `saved` is called
        after each save."""
        self.folder, self.keep, self.recipe, self.environment = folder, keep, recipe, environment
        self.flush, self.warn, self.log, self.saved = flush, warn, log, saved
        self.skipped = 0
        """Saves left out because the one before was still being written."""
        self.failures = 0
        """Failed saves since the last one that went well."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self._failed: UserError | None = None
        self._verified: dict[Path, _Signature] = {}

    def begin(self) -> None:
        """Makes the folder, or takes away what a killed run left half written in it."""
        try:
            lock.check(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("step-*.tmp"):
                if is_temporary(leftover):
                    _remove(leftover)
        except OSError as error:
            raise UserError(
                f"cannot write {self.folder}: {error.strerror or error}",
                "free space there, or give another --run.dir",
            ) from error

    def save(self, groups: Groups, position: Position, must: bool = False) -> None:
        """Snapshots now, writes later. Skipped while the save before is still being written, unless it `must` be:
        then it waits for that one. Raises when saves have failed too often in a row."""
        if not self._admits(position, must):
            return
        snapshot, copied = snapshot_to_host(groups)
        write = partial(write_checkpoint, self.folder, snapshot, position, self.recipe, self.environment)
        self._submit(write, copied, position, _bytes(snapshot))

    def begin_sharded(self, position: Position, must: bool = False) -> Path | None:
        """Before a save in pieces: the folder that all processes are to write theirs to, or None when this one is
        skipped, on the terms of `save`. Rank 0 tells the others, and then calls `save_sharded`."""
        if not self._admits(position, must):
            return None
        try:
            return begin_folder(self.folder, position.step)
        except OSError as error:
            self._failed = self._told(position.step, 0, error)
            return None

    def save_sharded(
        self, temporary: Path, pieces: LocalGroups, world: int, position: Position, whole: Groups
    ) -> None:
        """Snapshots rank 0's pieces and the groups that are not sharded; writes them later, and makes a checkpoint of
        everybody's."""
        mine, mine_copied = snapshot_shards(pieces)
        others, copied = snapshot_to_host(whole)

        def write() -> Path:
            write_shards(temporary, 0, world, mine)
            return seal_shards(temporary, world, position, self.recipe, self.environment, whole=others)

        self._submit(write, copied or mine_copied, position, world * _shard_bytes(mine))

    def _admits(self, position: Position, must: bool) -> bool:
        """Whether there is something to save now. Raises when saves have failed too often in a row."""
        if self._pending is not None and not must and not self._pending.is_done(PATIENCE_S):
            self.skipped += 1
            self.warn(
                f"step-{position.step} is not saved: step-{self._pending.step} is still being written after "
                f"{time.monotonic() - self._pending.since:.1f} s (saves skipped so far: {self.skipped}). Save less "
                "often, or to a faster disk"
            )
            return False
        self._settle()
        if self.failures >= FAILURES:
            self._raise_failure()
        if (self.folder / f"step-{position.step}").exists():
            self._failed = None
            return False
        return True

    def _submit(
        self, write: Callable[[], Path], copied: torch.cuda.Event | None, position: Position, size: int
    ) -> None:
        future = self._thread.submit(self._save, write, copied, position, size)
        self._pending = _Pending(future, position.step, time.monotonic())

    def set_aside_after(self, step: int) -> list[str]:
        """Renames to `step-N.aside` the checkpoints beyond the step a run goes on from: unsound, or of a past
        that is being rewritten, they would stand in the way of new ones and count as newer. Gives their names."""
        beyond = [path for path in checkpoints(self.folder) if step_of(path) > step]
        for path in beyond:
            try:
                lock.check(path)
                set_aside(path)
            except OSError as error:
                raise UserError(
                    f"{path} lies beyond step {step:,}, where the run goes on, and cannot be set aside: "
                    f"{error.strerror or error}",
                    "make the folder writable, or go on under another --run.name",
                ) from error
        return [path.name for path in beyond]

    def wait(self) -> None:
        """Until the last save is on disk. Raises if it failed."""
        self._settle()
        self._raise_failure()

    def close(self) -> None:
        """Waits for the last save and ends the thread. Raises if it failed and nobody was told."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _settle(self) -> None:
        """Waits for the pending save."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._failed = pending.future.result()

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    # What follows runs on the background thread.

    def _save(
        self, write: Callable[[], Path], copied: torch.cuda.Event | None, position: Position, size: int
    ) -> UserError | None:
        """Writes, and says at once what went wrong; gives that too."""
        began = time.monotonic()
        try:
            words = self._write(write, copied, position)
        except Superseded:
            raise  # the folder is no longer ours: nothing is to be tried again
        except (OSError, CorruptError, UserError) as error:
            lock.check(self.folder)  # files that are gone because a later start has taken over
            return self._told(position.step, size, error)
        self.failures = 0
        self.log(f"saved checkpoint step-{position.step} ({_mib(size)}, {time.monotonic() - began:.1f} s)")
        for word in words:
            self.warn(word)
        return None

    def _told(self, step: int, size: int, error: Exception) -> UserError:
        """Counts a failed save, and says so."""
        self.failures += 1
        failed = self._explained(step, size, error)
        again = "training goes on, and the next save tries again" if self.failures < FAILURES else "giving up"
        self.warn(f"WARNING: {failed.what}; {again} (failed saves in a row: {self.failures})")
        return failed

    def _explained(self, step: int, size: int, error: Exception) -> UserError:
        """What went wrong, and what is missing."""
        reason = error.what if isinstance(error, UserError) else str(error)
        room = ""
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            free = -1
        if 0 <= free < size:
            room = f" (it takes {_mib(size)}, {_mib(free)} are free)"
        return UserError(
            f"step-{step}: could not write a checkpoint below {self.folder}: {reason}{room}",
            "free space or mend the disk, then go on with --checkpoint.resume auto",
        )

    def _write(
        self, write: Callable[[], Path], copied: torch.cuda.Event | None, position: Position
    ) -> list[str]:
        """Gives words of what did not work but does no harm."""
        if copied is not None:
            copied.synchronize()
        self.flush()
        path = write()
        try:
            verify_checkpoint(path)
        except CorruptError:
            set_aside(path)  # under its name it would keep the next attempt from being written
            raise
        self.saved()
        self._verified[path] = _signature(path)
        return self._delete_old(position.best_step)

    def _delete_old(self, best_step: int) -> list[str]:
        found = checkpoints(self.folder)
        old = superseded(found, self.keep, best_kept(found, best_step), self._is_sound)
        try:
            for path in old:
                # Renamed first: a deletion cut short must not leave half a checkpoint under its name.
                lock.check(path)
                _remove(path.rename(temporary_name(path)))
                self._verified.pop(path, None)
        except OSError as error:
            return [f"WARNING: an old checkpoint cannot be deleted: {error}"]
        return []

    def _is_sound(self, path: Path) -> bool:
        """Whether a checkpoint verifies. It is read once; afterwards a look at sizes and times is enough."""
        try:
            signature = _signature(path)
            if self._verified.get(path) != signature:
                verify_checkpoint(path)
                self._verified[path] = signature
        except (OSError, CorruptError):
            return False
        return True


class ShardWriter:
    """The pieces of a process that does not keep the checkpoints: written in the background. What goes wrong is told
    to rank 0 by the receipt; its manager counts and says it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pieces")

    def save(self, temporary: Path, pieces: LocalGroups, rank: int, world: int) -> None:
        """Snapshots now, writes later."""
        mine, copied = snapshot_shards(pieces)

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            write_shards(temporary, rank, world, mine)

        self._thread.submit(write)

    def close(self) -> None:
        """Waits for the last one."""
        self._thread.shutdown()


def set_aside(path: Path) -> Path:
    """Renames to `NAME.aside`, or `NAME.2.aside` and so on where that is taken."""
    aside, number = path.with_name(f"{path.name}.aside"), 2
    while os.path.lexists(aside):
        aside, number = path.with_name(f"{path.name}.{number}.aside"), number + 1
    return path.rename(aside)


def superseded(found: list[Path], keep: int, best_step: int, is_sound: Callable[[Path], bool]) -> list[Path]:
    """Which checkpoints to delete: those older than the newest `keep` sound ones, but for the best. Damaged ones do
    not count: else they would push out the last good one. `found` is oldest first."""
    sound = 0
    for place in range(len(found) - 1, -1, -1):
        sound += is_sound(found[place])
        if sound == keep:
            return [path for path in found[:place] if path.name != f"step-{best_step}"]
    return []


def best_kept(found: list[Path], best_step: int) -> int:
    """The step of the best checkpoint that there is: a new best whose save failed must not cost the old one."""
    steps = {step_of(path) for path in found}
    if best_step in steps:
        return best_step
    for path in reversed(found):
        try:
            earlier = read_manifest(path).position.best_step
        except CorruptError:
            continue
        if earlier in steps:
            return earlier
    return -1


def snapshot_to_host(groups: Groups) -> tuple[Groups, torch.cuda.Event | None]:
    """A copy in host memory. From a GPU: queued into pinned memory, with the event that says it has arrived."""
    gpus = {tensor.device for group in groups.values() for tensor in group.values() if tensor.is_cuda}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor.detach().clone(memory_format=torch.contiguous_format)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True)

    snapshot = {
        group: {name: copied(tensor) for name, tensor in tensors.items()} for group, tensors in groups.items()
    }
    if not gpus:
        return snapshot, None
    event = torch.cuda.Event()
    for gpu in gpus:  # stages of one process may lie on several, each of which copies by itself
        torch.cuda.current_stream().wait_event(torch.cuda.current_stream(gpu).record_event())
    event.record()
    return snapshot, event


def snapshot_shards(pieces: LocalGroups) -> tuple[LocalGroups, torch.cuda.Event | None]:
    """`snapshot_to_host` of pieces."""
    tensors = {group: {name: piece.tensor for name, piece in each.items()} for group, each in pieces.items()}
    snapshot, event = snapshot_to_host(tensors)
    return {
        group: {name: TensorShard(snapshot[group][name], piece.full) for name, piece in each.items()}
        for group, each in pieces.items()
    }, event


_Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class _Pending:
    """A save that is being written."""

    future: Future[UserError | None]
    step: int
    since: float

    def is_done(self, patience_s: float) -> bool:
        return bool(wait([self.future], patience_s).done)


def _signature(folder: Path) -> _Signature:
    """What changes when somebody writes to a file of the folder."""
    entries = sorted((path.name, path.stat()) for path in folder.iterdir())
    return tuple((name, found.st_size, found.st_mtime_ns, found.st_ino) for name, found in entries)


def _remove(path: Path) -> None:
    """Takes away a folder, a file or a link, whatever stands there; what cannot go stays."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _bytes(groups: Groups) -> int:
    return sum(
        tensor.numel() * tensor.element_size() for group in groups.values() for tensor in group.values()
    )


def _shard_bytes(groups: LocalGroups) -> int:
    return _bytes({g: {name: piece.tensor for name, piece in each.items()} for g, each in groups.items()})


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
