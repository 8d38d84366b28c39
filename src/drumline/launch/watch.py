"""Watches one machine's workers: stop requests, failures, the end.

Torch's `LocalElasticAgent` with its own way of watching and stopping. Promises: torch's code is asked for the
result only when every worker has ended, so it never waits its 30 seconds for one that is stuck; SIGTERM is
sent to a worker once; whoever does not leave in time is killed with all processes it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from subprocess import Popen
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from drumline.errors import UserError
from drumline.launch.failure import (
    Failure,
    failure_from_exit,
    first_cause,
    on_host,
    read_failure,
    render_failure,
)
from drumline.launch.notice import NoticeBoard

GRACE_SECONDS = 300.0
"""How long workers may take to finish their step and save after a stop request."""

FAILURE_SECONDS = 3.0
"""How long the other workers may take to leave after one has failed. One that waits in a collective for the
failed rank never notices."""

SAME_REQUEST_SECONDS = 0.5
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a worker that left because it was asked to."""


@contextlib.contextmanager
def signals_end_us() -> Iterator[None]:
    """Stop signals simply end this process, for as long as no worker runs: torch waits for other machines in
    native code, where no Python handler would be heard. The handlers come back at the end."""
    before = {number: signal.getsignal(number) for number in STOPS}
    _take_signals(signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Watch(LocalElasticAgent):
    """This machine's workers from start to end. Use once, through `finish`, inside `signals_end_us`."""

    def __init__(
        self, spec: WorkerSpec, logs: LogsSpecs, *, announce: Callable[[str], None], grace: float, host: str
    ) -> None:
        super().__init__(spec, logs)
        self._announce, self._grace, self._host = announce, grace, host
        self._board: NoticeBoard | None = None
        self._looked_at_board = 0.0
        self._requests: list[tuple[signal.Signals, float]] = []
        self._ended: dict[int, tuple[int, float]] = {}
        self._terminated: set[int] = set()
        self._killed: set[int] = set()
        self._broken_at: float | None = None

    def finish(self) -> int:
        """Runs the workers to their end, shows what went wrong, and gives the exit code."""
        try:
            result = self.run()
            if result is None:
                raise UserError(
                    "this run has all its machines already", "check parallel.nodes and parallel.rendezvous"
                )
            return self._explain([]) if result.is_failed() else 0
        except _Elsewhere as elsewhere:
            return self._explain(elsewhere.failures)
        except (DistError, RendezvousConnectionError):
            if self._board is None:
                raise
            return self._explain([])
        finally:
            _take_signals(signal.SIG_DFL)

    def leave(self, hosts_store: bool) -> bool:
        """Takes leave of the other machines; gives whether all have left."""
        return self._board is not None and self._board.leave(hosts_store)

    # What torch's agent calls.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert worker_group.store is not None
        assert worker_group.group_rank is not None
        assert worker_group.group_world_size is not None
        self._board = NoticeBoard(worker_group.store, worker_group.group_rank, worker_group.group_world_size)
        self._ended, self._terminated, self._killed, self._broken_at = {}, set(), set(), None
        _take_signals(self._on_signal)
        if self._host:
            ranks = [worker.global_rank for worker in worker_group.workers]
            self._announce(
                f"machine {worker_group.group_rank} of {worker_group.group_world_size}: "
                f"starting ranks {ranks[0]} to {ranks[-1]} of {worker_group.workers[0].world_size}"
            )
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._running():
            if any(self._is_failure(local_rank, code) for local_rank, (code, _) in self._ended.items()):
                self._break_off()
            else:
                self._look_elsewhere()
                self._obey()
        if self._running():
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        assert self._board is not None
        failures = self._board.wait_for_all(give_up=lambda: len(self._requests) > 1)
        if failures:
            raise _Elsewhere(failures)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._stop(FAILURE_SECONDS)
        super()._shutdown(*args, **kwargs)

    # Stop requests.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Notes a request. A wrapper that passes on the Ctrl-C which the terminal sent us too makes two of
        one, so what follows at once is the same request."""
        now = time.monotonic()
        if not self._requests or now - self._requests[-1][1] > SAME_REQUEST_SECONDS:
            self._requests.append((signal.Signals(number), now))

    def _obey(self) -> None:
        """Passes the first request on to the workers; a second one, or the end of the grace time, kills."""
        if not self._requests:
            return
        name, since = self._requests[0][0].name, self._requests[0][1]
        if not self._terminated:
            self._announce(
                f"{name}: the processes finish their step, save and leave; {name} again kills them"
            )
            self._terminate()
        elif len(self._requests) > 1 or time.monotonic() - since > self._grace:
            why = "asked again" if len(self._requests) > 1 else f"still running after {self._grace:g} s"
            self._announce(f"{why}: killing {self._names(self._running())}")
            self._kill()

    # Failures.

    def _is_failure(self, local_rank: int, code: int) -> bool:
        """Whether a worker that ended did so because something went wrong. One that was asked to stop may say
        so in its exit code, or be ended by the signal before it has a handler."""
        if local_rank in self._killed or code == 0:
            return False
        if local_rank in self._terminated and (code in STOPPED or code == -signal.SIGTERM):
            return read_failure(self._error_file(local_rank)) is not None
        return True

    def _break_off(self) -> None:
        """One worker has failed: tells the other machines, then stops the other workers."""
        self._broken_at = time.time()
        assert self._board is not None
        self._board.post(first_cause(self._failures()))
        self._stop(FAILURE_SECONDS)

    def _look_elsewhere(self) -> None:
        """Once a second, breaks off when another machine has failed."""
        assert self._board is not None
        if time.monotonic() - self._looked_at_board > 1:
            self._looked_at_board = time.monotonic()
            failures = self._board.failures()
            if failures:
                raise _Elsewhere(failures)

    def _failures(self) -> list[Failure]:
        """How this machine's workers failed, as far as it was not our doing: what came after we broke off is."""
        latest = self._broken_at or float("inf")
        found = []
        for worker in self._worker_group.workers:
            local_rank, rank = worker.local_rank, worker.global_rank
            code, ended_at = self._ended.get(local_rank, (0, float("inf")))
            by_itself = ended_at <= latest and self._is_failure(local_rank, code)
            failure = read_failure(self._error_file(local_rank))
            if failure is None and by_itself:
                failure = failure_from_exit(rank, code, ended_at)
            if failure is not None and (by_itself or failure.time <= latest):
                found.append(on_host(failure, self._host))
        return found

    def _explain(self, elsewhere: list[Failure]) -> int:
        """Says why the run ended early, once, and gives the exit code."""
        assert self._board is not None
        failures = self._failures() + elsewhere
        if failures and first_cause(failures).follows:
            failures += self._board.wait_for_cause()
        if failures:
            cause = first_cause(failures)
            self._announce(render_failure(cause))
            code = cause.exit_code
        elif self._requests:
            code = max(exit_code for exit_code, _ in self._ended.values())
            if self._killed or code <= 0:
                code = 128 + self._requests[0][0]
                rank = self._worker_group.workers[0].global_rank
                cause = Failure(
                    rank, f"was stopped by {self._requests[0][0].name}", time.time(), exit_code=code
                )
                failures = [on_host(cause, self._host)]
        else:
            self._announce("lost contact with the machine that hosts the rendezvous")
            return 1
        if failures:
            self._board.post(first_cause(failures))
        return code

    def _error_file(self, local_rank: int) -> str:
        assert self._pcontext is not None
        return str(self._pcontext.error_files[local_rank])

    # Processes.

    def _workers(self) -> dict[int, Popen[bytes]]:
        """The worker processes by local rank; none before the start."""
        if self._pcontext is None:
            return {}
        assert isinstance(self._pcontext, SubprocessContext)
        return {
            local_rank: handler.proc for local_rank, handler in self._pcontext.subprocess_handlers.items()
        }

    def _running(self) -> list[int]:
        """Local ranks still running; notes code and time of those that have ended."""
        for local_rank, process in self._workers().items():
            if local_rank not in self._ended and process.poll() is not None:
                self._ended[local_rank] = (process.returncode, time.time())
        return [local_rank for local_rank in self._workers() if local_rank not in self._ended]

    def _names(self, local_ranks: list[int]) -> str:
        ranks = [self._worker_group.workers[local_rank].global_rank for local_rank in local_ranks]
        return "rank " + ", ".join(str(rank) for rank in ranks)

    def _terminate(self) -> None:
        """SIGTERM to each running worker that has not had one: to the worker alone, not to its data loaders,
        which it needs to finish its step."""
        for local_rank in self._running():
            if local_rank not in self._terminated:
                self._workers()[local_rank].send_signal(signal.SIGTERM)
                self._terminated.add(local_rank)

    def _kill(self) -> None:
        """SIGKILL to the process groups of all workers, running or not: each worker leads one, and nothing it
        started may stay behind."""
        self._killed.update(self._running())
        for process in self._workers().values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + FAILURE_SECONDS
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _stop(self, seconds: float) -> None:
        """Asks the running workers to leave, kills those that have not in time."""
        if not self._running():
            return
        self._broken_at = self._broken_at or time.time()
        self._terminate()
        requests, deadline = len(self._requests), time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline and len(self._requests) == requests:
            time.sleep(0.02)
        self._kill()


def _take_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Installs a handler for the stop signals; those ignored on purpose (nohup) stay ignored."""
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


class _Elsewhere(Exception):
    """Another machine of the run has failed."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__()
        self.failures = failures
