"""The run folder that a run's first start has claimed, remembered by the launcher for its restarts.

Promises: a restart goes on in the folder of the first start, whatever the command line says of names and resuming:
from its newest checkpoint, or from the beginning in that same folder when there is none yet. Refuses to begin again
in silence where another machine takes over and cannot see the folder.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError

VARIABLE = "DRUMLINE_CLAIMED"
"""File for the name of the run folder, given to workers by our launcher."""


class Claim:
    """The launcher's side: a place for the name, that belongs to no file system."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("drumline-claimed")

    @property
    def variable(self) -> dict[str, str]:
        """What the workers are to be given."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def read(self) -> str:
        """The folder's name; empty when no worker has claimed one yet."""
        return os.pread(self._descriptor, 4096, 0).decode()

    def write(self, name: str) -> None:
        """For workers of this machine, when one of another machine has claimed it."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, name.encode(), 0)

    def close(self) -> None:
        os.close(self._descriptor)


def remember(name: str) -> None:
    """Called by rank 0 as soon as it has a run folder. The first name stays: folders inside the run's follow."""
    if VARIABLE in os.environ and not claimed():
        Path(os.environ[VARIABLE]).write_text(name)


def claimed() -> str:
    """The name of the folder that this run has already; empty at its first start."""
    path = os.environ.get(VARIABLE)
    return Path(path).read_text() if path else ""


def restart_resume(recipe: Recipe, name: str) -> str:
    """What `checkpoint.resume` means for a restart in the run folder of that name. Rank 0 looks for checkpoints."""
    folder = Path(recipe.run.dir) / name
    if not folder.is_dir():
        raise UserError(
            f"run.dir = {recipe.run.dir}: the folder of the run to continue, {name}, does not exist",
            "if you renamed or moved it, move it back and resume with --checkpoint.resume auto; on several machines, "
            "set run.dir to a folder on a shared disk",
        )
    resume = recipe.checkpoint.resume
    saved = any(path.suffix == "" for path in (folder / "checkpoints").glob("step-*"))
    return "auto" if saved or resume == "never" else resume


def restart_recipe(recipe: Recipe, name: str, resume: str) -> Recipe:
    """The recipe of a restart."""
    return replace(
        recipe,
        run=replace(recipe.run, name=name),
        checkpoint=replace(recipe.checkpoint, resume=resume),
    )
