"""What the launcher gives each of its workers beside the command: places for an error, beats, stacks and a name.

Promises: all of it travels as environment variables; a worker finds its places empty at each start, but for the run
folder's name, which stays; nothing is left in a file system when the launcher ends, and only the error files if it is
killed.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from drumline.launch.claimed import Claim
from drumline.launch.failure import FILE
from drumline.launch.heartbeat import Beats
from drumline.launch.stacks import Stacks


class Handout(LogsSpecs):
    """Made anew by torch's launcher at each start of the workers; leaves their output on the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.claim = Claim()
        self.variables: dict[str, str] = {}
        """The same for every worker of a start."""
        self.beats: Beats | None = None
        self.stacks: Stacks | None = None
        self._folder: Path | None = None

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by torch's launcher with the variables of each local rank, to be added to."""
        self.take_back()
        self._folder = Path(tempfile.mkdtemp(prefix="drumline-"))
        self.beats, self.stacks = Beats(len(envs)), Stacks(len(envs))
        files = {local_rank: str(self._folder / f"{local_rank}.json") for local_rank in envs}
        for local_rank, env in envs.items():
            env |= self.claim.variable | self.beats.variable(local_rank) | self.stacks.variable(local_rank)
            env |= self.variables
            env[FILE] = files[local_rank]
        return LogsDest(stdouts=dict.fromkeys(envs, ""), stderrs=dict.fromkeys(envs, ""), error_files=files)

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
