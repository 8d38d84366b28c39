"""Saves checkpoints in the background and deletes old ones.

Promises: only the snapshot (one copy to host memory) delays the step; one background thread writes, hashes and
verifies. A save that is due while the thread is busy waits for a second and is then skipped with a warning, unless it
must happen. A failed save is reported at once, and the next one tries again. After three failures in a row, or if the
last save of a run fails, the run ends with an error. An old checkpoint is deleted only when `keep` newer ones verify;
the best one is never deleted.
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
    begin_folder,
    checkpoints,
    is_temporary,
    step_of,
    temporary_name,
    verify_checkpoint,
    write_checkpoint,
)
from drumline.state.manifest import Position, read_manifest
from drumline.state.shards import LocalGroups, seal_shards, snapshot_shards, write_shards
from drumline.state.tensors import Groups, snapshot_to_host

FAILURES = 3
"""Number of failed saves in a row that end a run."""
PATIENCE_S = 1.0
"""How long a save waits for the one before it: enough for a short stall of the disk."""


class CheckpointManager:
    """Manages a folder of checkpoints on the rank that writes. Changes nothing before `begin`."""

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
        """`flush` writes the log to disk, so that no checkpoint is ahead of the log. `warn` reports failed saves (on
        the background thread) and skipped ones, `log` successful ones. `saved` is called after each save."""
        self.folder, self.keep, self.recipe, self.environment = folder, keep, recipe, environment
        self.flush, self.warn, self.log, self.saved = flush, warn, log, saved
        self.skipped = 0
        """Saves skipped because the one before was still being written."""
        self.failures = 0
        """Failed saves since the last successful one."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self._failed: UserError | None = None
        self._verified: dict[Path, _Signature] = {}

    def begin(self) -> None:
        """Creates the folder, and removes incomplete checkpoints that a killed run left in it."""
        try:
            lock.check(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("step-*.tmp"):
                if is_temporary(leftover):
                    _remove(leftover)
        except OSError as error:
            raise UserError(
                f"cannot write {self.folder}: {error.strerror or error}",
                "free space on that disk, or choose another folder (--run.dir)",
            ) from error

    def save(self, groups: Groups, position: Position, must: bool = False) -> None:
        """Takes a snapshot now and writes it in the background. Skipped while the save before is still being written,
        unless it `must` happen: then it waits for that one. Raises after too many failures in a row."""
        if not self._can_save(position, must):
            return
        snapshot, copied = snapshot_to_host(groups)
        write = partial(write_checkpoint, self.folder, snapshot, position, self.recipe, self.environment)
        self._submit(write, copied, position, _bytes(snapshot))

    def begin_sharded(self, position: Position, must: bool = False) -> Path | None:
        """Before a sharded save: the folder that all processes write their shards to, or None if the save is skipped,
        as in `save`. Rank 0 broadcasts it, and then calls `save_sharded`."""
        if not self._can_save(position, must):
            return None
        try:
            return begin_folder(self.folder, position.step)
        except OSError as error:
            self._failed = self._report_failure(position.step, 0, error)
            return None

    def save_sharded(
        self, temporary: Path, shards: LocalGroups, world: int, position: Position, whole: Groups
    ) -> None:
        """Takes a snapshot of rank 0's shards and of the groups that are not sharded. In the background, writes them
        and joins the shards of all processes into one checkpoint."""
        mine, mine_copied = snapshot_shards(shards)
        others, copied = snapshot_to_host(whole)

        def write() -> Path:
            write_shards(temporary, 0, world, mine)
            return seal_shards(temporary, world, position, self.recipe, self.environment, whole=others)

        self._submit(write, copied or mine_copied, position, world * _shard_bytes(mine))

    def _can_save(self, position: Position, must: bool) -> bool:
        """Whether to save now. Raises after too many failures in a row."""
        if self._pending is not None and not must and not self._pending.is_done(PATIENCE_S):
            self.skipped += 1
            self.warn(
                f"step-{position.step} is not saved: step-{self._pending.step} is still being written after "
                f"{time.monotonic() - self._pending.since:.1f} s (saves skipped so far: {self.skipped}). Save less "
                "often, or use a faster disk"
            )
            return False
        self._wait_pending()
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
        """Renames the checkpoints after the step that a run resumes from to `step-N.aside`, and returns their names.
        They are damaged, or belong to steps that the run computes again."""
        beyond = [path for path in checkpoints(self.folder) if step_of(path) > step]
        for path in beyond:
            try:
                lock.check(path)
                set_aside(path)
            except OSError as error:
                raise UserError(
                    f"cannot rename {path}, which is after step {step:,}, where the run resumes: "
                    f"{error.strerror or error}",
                    "make the folder writable, or resume under another --run.name",
                ) from error
        return [path.name for path in beyond]

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises if it failed."""
        self._wait_pending()
        self._raise_failure()

    def close(self) -> None:
        """Waits for the last save and ends the thread. Raises if the save failed and no call has raised that yet."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _wait_pending(self) -> None:
        """Waits for the pending save."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._failed = pending.future.result()

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    # The methods below run on the background thread.

    def _save(
        self, write: Callable[[], Path], copied: torch.cuda.Event | None, position: Position, size: int
    ) -> UserError | None:
        """Writes a checkpoint. Reports an error at once, and returns it."""
        began = time.monotonic()
        try:
            warnings = self._write(write, copied, position)
        except Superseded:
            raise  # a later start owns the folder: do not try again
        except (OSError, CorruptError, UserError) as error:
            lock.check(self.folder)  # files may be missing because a later start has taken over
            return self._report_failure(position.step, size, error)
        self.failures = 0
        self.log(f"saved checkpoint step-{position.step} ({_mib(size)}, {time.monotonic() - began:.1f} s)")
        for warning in warnings:
            self.warn(warning)
        return None

    def _report_failure(self, step: int, size: int, error: Exception) -> UserError:
        """Counts and reports a failed save."""
        self.failures += 1
        failed = self._explained(step, size, error)
        again = (
            "training continues, and the next save tries again" if self.failures < FAILURES else "giving up"
        )
        self.warn(f"WARNING: {failed.what}; {again} (failed saves in a row: {self.failures})")
        return failed

    def _explained(self, step: int, size: int, error: Exception) -> UserError:
        """The error with its reason and, if the disk is full, the space that it needs."""
        reason = error.what if isinstance(error, UserError) else str(error)
        room = ""
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            free = -1
        if 0 <= free < size:
            room = f" (needs {_mib(size)}, {_mib(free)} free)"
        return UserError(
            f"step-{step}: could not write a checkpoint in {self.folder}: {reason}{room}",
            "free space or repair the disk, then resume (--checkpoint.resume auto)",
        )

    def _write(
        self, write: Callable[[], Path], copied: torch.cuda.Event | None, position: Position
    ) -> list[str]:
        """Returns warnings about what failed without harm."""
        if copied is not None:
            copied.synchronize()
        self.flush()
        path = write()
        try:
            verify_checkpoint(path)
        except CorruptError:
            set_aside(path)  # under its name it would block the next attempt
            raise
        self.saved()
        self._verified[path] = _signature(path)
        return self._delete_old(position.best_step)

    def _delete_old(self, best_step: int) -> list[str]:
        found = checkpoints(self.folder)
        old = superseded(found, self.keep, best_kept(found, best_step), self._is_valid)
        try:
            for path in old:
                # Renamed first: an interrupted deletion must not leave an incomplete checkpoint under its name.
                lock.check(path)
                _remove(path.rename(temporary_name(path)))
                self._verified.pop(path, None)
        except OSError as error:
            return [f"WARNING: cannot delete an old checkpoint: {error}"]
        return []

    def _is_valid(self, path: Path) -> bool:
        """Whether a checkpoint verifies. It is read once; later calls compare sizes and times only."""
        try:
            signature = _signature(path)
            if self._verified.get(path) != signature:
                verify_checkpoint(path)
                self._verified[path] = signature
        except (OSError, CorruptError):
            return False
        return True


def set_aside(path: Path) -> Path:
    """Renames to `NAME.aside`, or to `NAME.2.aside` and so on if that exists."""
    aside, number = path.with_name(f"{path.name}.aside"), 2
    while os.path.lexists(aside):
        aside, number = path.with_name(f"{path.name}.{number}.aside"), number + 1
    return path.rename(aside)


def superseded(found: list[Path], keep: int, best_step: int, is_valid: Callable[[Path], bool]) -> list[Path]:
    """The checkpoints to delete: those older than the newest `keep` valid ones, except the best. Damaged ones do not
    count, so that they cannot displace the last valid one. `found` is oldest first."""
    valid = 0
    for index in range(len(found) - 1, -1, -1):
        valid += is_valid(found[index])
        if valid == keep:
            return [path for path in found[:index] if path.name != f"step-{best_step}"]
    return []


def best_kept(found: list[Path], best_step: int) -> int:
    """The step of the best existing checkpoint. If the save of a new best failed, the old best must stay."""
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
    """A value that changes when a file of the folder is written."""
    entries = sorted((path.name, path.stat()) for path in folder.iterdir())
    return tuple((name, found.st_size, found.st_mtime_ns, found.st_ino) for name, found in entries)


def _remove(path: Path) -> None:
    """Removes a folder, a file or a link, as far as possible."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _bytes(groups: Groups) -> int:
    return sum(
        tensor.numel() * tensor.element_size() for group in groups.values() for tensor in group.values()
    )


def _shard_bytes(groups: LocalGroups) -> int:
    return _bytes({g: {name: shard.tensor for name, shard in each.items()} for g, each in groups.items()})


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
