"""Saves checkpoints in the background and keeps the ones worth keeping.

Promises: only the snapshot (a copy to host memory) holds up the step; writing, hashing and verifying happen on
one background thread; an old checkpoint is deleted only after a newer one has been verified on disk; the best
one is kept. A failed write surfaces at the next save or at `close`, never in silence.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from drumline.errors import UserError
from drumline.state.checkpoint import (
    Groups,
    Position,
    Unsound,
    checkpoints,
    step_of,
    verify_checkpoint,
    write_checkpoint,
)


class Keeper:
    """One run's `checkpoints/` folder, on the rank that writes."""

    def __init__(
        self, folder: Path, keep: int, recipe: str, environment: dict[str, Any], flush: Callable[[], None]
    ) -> None:
        """`flush` puts the log on disk: a checkpoint never knows of steps that the log does not."""
        self.folder, self.keep, self.recipe, self.environment = folder, keep, recipe, environment
        self.flush = flush
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, groups: Groups, position: Position) -> None:
        """Snapshots now, writes later. Waits only when the save before is still being written."""
        self.wait()
        if (self.folder / f"step-{position.step}").exists():
            return
        snapshot, copied = snapshot_to_host(groups)
        self._pending = self._thread.submit(self._write, snapshot, copied, position)

    def set_aside_after(self, step: int) -> list[str]:
        """Renames to `step-N.aside` the checkpoints beyond the step a run goes on from: unsound, or of a past
        that is being rewritten, they would stand in the way of new ones and count as newer. Gives their names."""
        beyond = [path for path in checkpoints(self.folder) if step_of(path) > step]
        for path in beyond:
            aside = path.with_name(f"{path.name}.aside")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        return [path.name for path in beyond]

    def wait(self) -> None:
        """Until the last save is on disk. Raises if it failed."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except (OSError, SafetensorError, Unsound) as error:
            raise UserError(
                f"could not write a checkpoint below {self.folder}: {error}",
                "free space or mend the disk, then go on with --checkpoint.resume auto",
            ) from error

    def close(self) -> None:
        """Waits for the last save and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, snapshot: Groups, copied: torch.cuda.Event | None, position: Position) -> None:
        if copied is not None:
            copied.synchronize()
        self.flush()
        path = write_checkpoint(self.folder, snapshot, position, self.recipe, self.environment)
        verify_checkpoint(path)
        for old in superseded(checkpoints(self.folder), self.keep, position.best_step):
            # Renamed first: a deletion cut short must not leave half a checkpoint under its name.
            shutil.rmtree(old.rename(f"{old}.tmp"), ignore_errors=True)


def superseded(found: list[Path], keep: int, best_step: int) -> list[Path]:
    """Which checkpoints to delete: all but the newest `keep` and the best. `found` is oldest first."""
    return [path for path in found[:-keep] if path.name != f"step-{best_step}"]


def snapshot_to_host(groups: Groups) -> tuple[Groups, torch.cuda.Event | None]:
    """A copy in host memory. From a GPU: queued into pinned memory, with the event that says it has arrived."""
    on_gpu = any(tensor.is_cuda for group in groups.values() for tensor in group.values())

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor.detach().clone(memory_format=torch.contiguous_format)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True)

    snapshot = {
        group: {name: copied(tensor) for name, tensor in tensors.items()} for group, tensors in groups.items()
    }
    if not on_gpu:
        return snapshot, None
    event = torch.cuda.Event()
    event.record()
    return snapshot, event
