"""The worker processes of one machine, from one start to their end.

Promises: SIGTERM is sent to a worker once; whoever is killed is killed with all processes it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import Popen

REAP_SECONDS = 3.0


@dataclass
class Crew:
    """Processes by local rank; who has ended with which code, and how soon after that this was seen; who was asked to
    leave, and who was made to."""

    processes: dict[int, Popen[bytes]] = field(default_factory=dict)
    ended: dict[int, tuple[int, float]] = field(default_factory=dict)
    terminated: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    noticed_within: float = 0.0
    """How long before the first end was noticed everybody was seen running."""
    _seen_whole: float = field(default_factory=time.monotonic)

    def start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        """One worker for each environment, the leader of a process group of its own."""
        for local_rank, variables in enumerate(environments):
            self.processes[local_rank] = Popen(command, env=variables, start_new_session=True)
        self._seen_whole = time.monotonic()

    def running(self) -> list[int]:
        """Local ranks still running; notes code and time of those that have ended."""
        now = time.monotonic()
        for local_rank, process in self.processes.items():
            if local_rank not in self.ended and process.poll() is not None:
                if not self.ended:
                    self.noticed_within = now - self._seen_whole
                self.ended[local_rank] = (process.returncode, now)
        if not self.ended:
            self._seen_whole = now
        return [local_rank for local_rank in self.processes if local_rank not in self.ended]

    def terminate(self) -> None:
        """SIGTERM to each running worker that has not had one: to the worker alone, not to its data loaders, which it
        needs to finish its step."""
        for local_rank in self.running():
            if local_rank not in self.terminated:
                self.processes[local_rank].send_signal(signal.SIGTERM)
                self.terminated.add(local_rank)

    def kill(self) -> None:
        """SIGKILL to the process groups of all workers, running or not: each worker leads one, and nothing it started
        may stay behind."""
        self.killed.update(self.running())
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + REAP_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self, seconds: float, hurry: Callable[[], bool]) -> None:
        """Asks the running workers to leave, kills those that have not in time, or at once when `hurry` says so."""
        self.terminate()
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline and not hurry():
            time.sleep(0.02)
        self.kill()
