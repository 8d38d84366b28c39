"""The run folder that the first start of a run has claimed, which the launcher keeps for restarts.

Promises: a restart continues in the folder of the first start, whatever the command line says about names and
resuming: from its newest checkpoint, or from step 0 if there is none yet. Rejects a restart on a machine that cannot
see the folder.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError

VARIABLE = "DRUMLINE_CLAIMED"
"""The file in which our launcher keeps the name of the run folder."""


class Claim:
    """The launcher's side: the name, in anonymous memory."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("drumline-claimed")

    @property
    def variable(self) -> dict[str, str]:
        """The environment variable for the workers."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def read(self) -> str:
        """The name of the folder; empty if no worker has claimed one yet."""
        return os.pread(self._descriptor, 4096, 0).decode()

    def write(self, name: str) -> None:
        """Sets the name that a worker on another machine has claimed."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, name.encode(), 0)

    def close(self) -> None:
        os.close(self._descriptor)


def remember(name: str) -> None:
    """Claims a run folder, on rank 0. The first name stays: later ones are folders inside it."""
    if VARIABLE in os.environ and not claimed():
        Path(os.environ[VARIABLE]).write_text(name)


def claimed() -> str:
    """The name of the folder that an earlier start of this run has claimed; empty at its first start."""
    path = os.environ.get(VARIABLE)
    return Path(path).read_text() if path else ""


def restart_resume(recipe: Recipe, name: str) -> str:
    """The value of `checkpoint.resume` for a restart in the run folder of this name. Call it on rank 0."""
    folder = Path(recipe.run.dir) / name
    if not folder.is_dir():
        raise UserError(
            f"run.dir = {recipe.run.dir}: {name}, the folder of the run to continue, does not exist",
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
