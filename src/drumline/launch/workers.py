"""The worker processes of one machine from one start to their end: their environment, their exit codes, stop
requests.

Promises: everything that the launcher gives a worker travels in arguments and environment variables, except for the
socket that rank 0 inherits; nothing is left in a file system when the launcher ends, and only error files if it is
killed; a worker gets SIGTERM at most once, and is killed together with every process that it has started. A stop
signal that is ignored on purpose (nohup) stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from types import FrameType

from drumline.core.environment import CLAIMED, STORE_SOCKET
from drumline.core.heartbeat import Beats
from drumline.launch.failure import FILE, Failure, failure_from_exit, read_failure
from drumline.launch.hang import Stacks

REAP_SECONDS = 3.0
LONGEST_PAUSE = 60.0
"""Before a restart."""

SAME_REQUEST_SECONDS = 0.5
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = tuple(128 + number for number in STOPS)
"""Exit codes of a worker that saved and exited because a signal stopped the run."""

RESULT = "DRUMLINE_RESULT"
"""File for the result of rank 0, given to workers if the launcher returns it; otherwise rank 0 prints it."""


class WorkerEnvironment:
    """What is behind the variables of each worker: the files of its error, heartbeat and stacks, new for each start;
    the claim of the run folder, the result and the socket `store`, which stay."""

    def __init__(self, store: socket.socket, returns_result: bool = False) -> None:
        self.claim = ClaimedFolder()
        self._store = store
        self.beats: Beats | None = None
        self.stacks: Stacks | None = None
        self._folder: Path | None = None
        self._result = os.memfd_create("drumline-result") if returns_result else None

    def prepare(self, ranks: Sequence[int]) -> list[dict[str, str]]:
        """The variables of each worker for the next start."""
        self.clear()
        self._folder = Path(tempfile.mkdtemp(prefix="drumline-"))
        self.beats, self.stacks = Beats(len(ranks)), Stacks(len(ranks))
        result = {} if self._result is None else {RESULT: f"/proc/{os.getpid()}/fd/{self._result}"}
        return [
            self.claim.variable
            | result
            | self.beats.variable(local_rank)
            | self.stacks.variable(local_rank)
            | {FILE: str(self.error_file(local_rank))}
            | ({STORE_SOCKET: str(self._store.fileno())} if rank == 0 else {})
            for local_rank, rank in enumerate(ranks)
        ]

    def error_file(self, local_rank: int) -> Path:
        """The file to which this worker writes its error."""
        assert self._folder is not None
        return self._folder / f"{local_rank}.json"

    def result(self) -> str:
        """The result as JSON; empty if rank 0 wrote none, or prints it."""
        return "" if self._result is None else os.pread(self._result, 1 << 24, 0).decode()

    def clear(self) -> None:
        """Removes what belongs to one start."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for resource in (self.beats, self.stacks):
            if resource is not None:
                resource.close()
        self._folder = self.beats = self.stacks = None

    def close(self) -> None:
        self.clear()
        self.claim.close()
        if self._result is not None:
            os.close(self._result)


class ClaimedFolder:
    """The name of the run folder that the first start of the run has claimed, in anonymous memory. It stays for
    restarts."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("drumline-claimed")

    @property
    def variable(self) -> dict[str, str]:
        """The environment variable for the workers."""
        return {CLAIMED: f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def read(self) -> str:
        """The name of the folder; empty if no worker has claimed one yet."""
        return os.pread(self._descriptor, 4096, 0).decode()

    def write(self, name: str) -> None:
        """Sets the name that a worker on another machine has claimed."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, name.encode(), 0)

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass
class Workers:
    """Processes by local rank: exit code and time of those that have ended, and which were terminated or killed."""

    environment: WorkerEnvironment
    ranks: Sequence[int]
    processes: dict[int, Popen[bytes]] = field(default_factory=dict)
    ended: dict[int, tuple[int, float]] = field(default_factory=dict)
    terminated: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    noticed_within: float = 0.0
    """Time between the last check that found every worker running and the one that noticed the first exit."""
    _all_running_at: float = field(default_factory=time.monotonic)

    def start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        """Starts one worker for each environment, each the leader of a process group of its own."""
        for local_rank, variables in enumerate(environments):
            store = [int(variables[STORE_SOCKET])] if STORE_SOCKET in variables else []
            self.processes[local_rank] = Popen(command, env=variables, start_new_session=True, pass_fds=store)
        self._all_running_at = time.monotonic()

    def running(self) -> list[int]:
        """The local ranks still running. Records exit code and time of those that have ended."""
        now = time.monotonic()
        for local_rank, process in self.processes.items():
            if local_rank not in self.ended and process.poll() is not None:
                if not self.ended:
                    self.noticed_within = now - self._all_running_at
                self.ended[local_rank] = (process.returncode, now)
        if not self.ended:
            self._all_running_at = now
        return [local_rank for local_rank in self.processes if local_rank not in self.ended]

    def terminate(self) -> None:
        """Sends SIGTERM to each running worker that has not had one: to the worker alone, not to its data loaders,
        which it needs to finish its step."""
        for local_rank in self.running():
            if local_rank not in self.terminated:
                self.processes[local_rank].send_signal(signal.SIGTERM)
                self.terminated.add(local_rank)

    def kill(self) -> None:
        """Sends SIGKILL to the process groups of all workers, running or not, so that nothing they started stays
        behind."""
        self.killed.update(self.running())
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + REAP_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self, seconds: float, hurry: Callable[[], bool]) -> None:
        """Terminates the running workers and kills those still running after `seconds`, or when `hurry()` is true."""
        self.terminate()
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline and not hurry():
            time.sleep(0.02)
        self.kill()

    def is_failure(self, local_rank: int) -> bool:
        """Whether a worker ended because something went wrong. After a stop request it may exit with the code of a
        stopped run, or be ended by the signal before its handler is installed."""
        code, _ = self.ended.get(local_rank, (0, 0.0))
        if local_rank in self.killed or code == 0:
            return False
        if code in STOPPED or (local_rank in self.terminated and code == -signal.SIGTERM):
            return read_failure(self.environment.error_file(local_rank)) is not None
        return True

    def failures(self, latest: float) -> list[Failure]:
        """How the workers failed up to this time, as they reported it or as their exit codes tell."""
        found = []
        for local_rank, rank in enumerate(self.ranks):
            code, ended_at = self.ended.get(local_rank, (0, float("inf")))
            by_itself = ended_at <= latest and self.is_failure(local_rank)
            failure = read_failure(self.environment.error_file(local_rank))
            if failure is None and by_itself:
                failure = failure_from_exit(rank, code, ended_at)
            if failure is not None and (by_itself or failure.time <= latest):
                found.append(failure)
        return found


class Backoff:
    """How long to wait before each restart: 0 as long as the run makes progress, else 1, 2, 4 ... 60 seconds."""

    def __init__(self) -> None:
        self._furthest, self._idle = -1, -1

    def next(self, step: int) -> float:
        """After a start whose workers reached this step."""
        self._idle = 0 if step > self._furthest >= 0 else self._idle + 1
        self._furthest = max(self._furthest, step)
        return min(2.0 ** (self._idle - 1), LONGEST_PAUSE) if self._idle else 0.0


class StopRequests:
    """The stop signals received so far, oldest first, with their times."""

    def __init__(self) -> None:
        self._received: list[tuple[signal.Signals, float]] = []

    def __len__(self) -> int:
        return len(self._received)

    @property
    def first(self) -> signal.Signals:
        return self._received[0][0]

    @property
    def seconds(self) -> float:
        """Since the first one."""
        return time.monotonic() - self._received[0][1]

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Receives the stop signals, then restores the previous handlers. Does nothing outside the main thread, where
        Python allows no signal handler."""
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in STOPS if main}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Records a request. A wrapper may forward the Ctrl-C that the terminal sent to this process too, so a signal
        that follows at once is the same request."""
        now = time.monotonic()
        if not self._received or now - self._received[-1][1] > SAME_REQUEST_SECONDS:
            self._received.append((signal.Signals(number), now))
