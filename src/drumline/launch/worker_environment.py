"""What the launcher gives each of its workers beside the command: places for an error, beats, stacks and a name.

Promises: all of it travels as environment variables; a worker finds its places empty at each start, but for the run
folder's name, which stays; nothing is left in a file system when the launcher ends, and only the error files if it is
killed.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from drumline.core.heartbeat import Beats
from drumline.launch.failure import FILE
from drumline.launch.stacks import Stacks
from drumline.state.claim import Claim


class Handout:
    """The launcher's side of those places; `prepare` makes new ones for each start of the workers."""

    def __init__(self) -> None:
        self.claim = Claim()
        self.beats: Beats | None = None
        self.stacks: Stacks | None = None
        self._folder: Path | None = None

    def prepare(self, workers: int) -> list[dict[str, str]]:
        """The variables of each worker."""
        self.take_back()
        self._folder = Path(tempfile.mkdtemp(prefix="drumline-"))
        self.beats, self.stacks = Beats(workers), Stacks(workers)
        return [
            self.claim.variable
            | self.beats.variable(local_rank)
            | self.stacks.variable(local_rank)
            | {FILE: str(self.error_file(local_rank))}
            for local_rank in range(workers)
        ]

    def error_file(self, local_rank: int) -> Path:
        """Where this worker leaves its error."""
        assert self._folder is not None
        return self._folder / f"{local_rank}.json"

    def take_back(self) -> None:
        """Between two starts."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for place in (self.beats, self.stacks):
            if place is not None:
                place.close()
        self._folder = self.beats = self.stacks = None

    def close(self) -> None:
        self.take_back()
        self.claim.close()
