"""Watches one machine's workers: stop requests, lost and hung processes, restarts, the end.

Torch's `LocalElasticAgent` with its own way of watching and stopping; each start of the workers is one run of it.
Promises: torch's code is asked for the result only when every worker has ended, so it never waits its 30 seconds for
one that is stuck; a lost process is noticed within a second; a restart kills the others at once and waits for no
timeout; a user's mistake and a run that was asked to stop are not restarted.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from drumline.errors import UserError
from drumline.launch.crew import Crew
from drumline.launch.environment import GENERATION, LAUNCH_ID
from drumline.launch.failure import (
    Failure,
    failure_from_exit,
    first_cause,
    on_host,
    read_failure,
    render_failure,
    summary,
)
from drumline.launch.handout import Handout
from drumline.launch.hang import Limits, Pulse, Sign, is_busy, is_hung, standing, verdict
from drumline.launch.heartbeat import Phase
from drumline.launch.notice import NoticeBoard, State
from drumline.launch.stacks import is_stopped
from drumline.observe import story

GRACE_SECONDS = 300.0
"""How long workers may take to finish their step and save after a stop request."""

FAILURE_SECONDS = 3.0
"""How long the other workers may take to leave after one has failed and the run ends. One that waits in a collective
for the failed rank never notices."""

CAUSE_SECONDS = 0.5
"""How long a broken connection waits for the end of the process behind it."""

LOOK_SECONDS = 0.25
"""Between two looks at what other machines say."""

SAME_REQUEST_SECONDS = 0.5
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a worker that left because it was asked to."""


@dataclass(frozen=True)
class Care:
    """How workers are watched over: restarts allowed, limits of silence, seconds between two signs of life that
    launchers give each other."""

    restarts: int
    limits: Limits
    pace: float


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
    """This machine's workers from the first start to the end. Use once, through `finish`, inside `signals_end_us`."""

    def __init__(
        self,
        spec: WorkerSpec,
        handout: Handout,
        *,
        announce: story.LauncherNotes,
        grace: float,
        host: str,
        care: Care,
    ) -> None:
        super().__init__(spec, handout)
        self._handout, self._announce, self._grace, self._host = handout, announce, grace, host
        self._care = care
        self._used = 0
        self._launch_id = secrets.token_hex(16)
        self._lost_at: float | None = None
        self._board: NoticeBoard | None = None
        self._requests: list[tuple[signal.Signals, float]] = []
        self._begin(Crew())

    def finish(self) -> int:
        """Runs the workers to their end, as often as it takes, shows what went wrong, and gives the exit code."""
        while (code := self._one_start()) is None:
            self._handout.take_back()
            self._begin(Crew())
        return code

    def leave(self, hosts_store: bool) -> bool:
        """Takes leave of the other machines; gives whether all have left."""
        return self._board is not None and self._board.leave(hosts_store)

    def _begin(self, crew: Crew) -> None:
        self._crew = crew
        self._pulses: dict[int, Pulse] = {}
        self._signs: list[Sign] = []
        self._hung: Failure | None = None
        self._broken_at: float | None = None
        self._looked_at_board = 0.0

    def _one_start(self) -> int | None:
        """From a start of the workers to their end: the exit code, or None when they are to start again."""
        elsewhere: list[Failure] = []
        try:
            result = self.run()
            if result is None:
                raise UserError(
                    "this run has all its machines already", "check parallel.nodes and parallel.rendezvous"
                )
            if not result.is_failed():
                return 0
        except _Elsewhere as found:
            elsewhere = found.failures
        except RendezvousClosedError:
            if self._board is None:
                raise
            self._announce("another machine has ended the run", story.FAILED)
            return 1
        except (DistError, RendezvousConnectionError):
            if self._board is None:
                raise
        finally:
            _take_signals(signal.SIG_DFL)
        return self._explain(elsewhere)

    # What torch's agent calls.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert worker_group.store is not None
        assert worker_group.group_rank is not None
        assert worker_group.group_world_size is not None
        board = NoticeBoard(
            worker_group.store, worker_group.group_rank, worker_group.group_world_size, pace=self._care.pace
        )
        self._board = board
        self._used, folder, self._launch_id = board.agree(
            self._used, self._handout.claim.read(), self._launch_id
        )
        if folder:
            self._handout.claim.write(folder)
        self._handout.variables = {LAUNCH_ID: self._launch_id, GENERATION: str(self._used)}
        self._announce.start = (self._launch_id, self._used)
        # Becomes TORCHELASTIC_RESTART_COUNT, by which the workers keep the keys of each start apart.
        worker_group.spec.max_restarts = self._used
        _take_signals(self._on_signal)
        ranks = [worker.global_rank for worker in worker_group.workers]
        self._announce.writes = ranks[0] == 0
        if self._host:
            self._announce(
                f"machine {worker_group.group_rank} of {worker_group.group_world_size}: "
                f"starting ranks {ranks[0]} to {ranks[-1]} of {worker_group.workers[0].world_size}"
            )
        started = super()._start_workers(worker_group)
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._pcontext.subprocess_handlers
        self._begin(Crew({local_rank: handler.proc for local_rank, handler in handlers.items()}))
        now = time.monotonic()
        self._pulses = {worker.local_rank: Pulse(worker.global_rank, now) for worker in worker_group.workers}
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._crew.running():
            if any(self._is_failure(local_rank, code) for local_rank, (code, _) in self._crew.ended.items()):
                self._break_off()
            else:
                self._feel_pulse()
                self._look_elsewhere()
                self._obey()
        if self._crew.running():
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        assert self._board is not None
        failures = self._board.wait_for_all(give_up=lambda: len(self._requests) > 1)
        if failures:
            raise _Elsewhere(failures)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._stop()
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
        if not self._crew.terminated:
            self._announce(
                f"{name}: the processes finish their step, save and leave; {name} again kills them"
            )
            self._crew.terminate()
        elif len(self._requests) > 1 or time.monotonic() - since > self._grace:
            why = "asked again" if len(self._requests) > 1 else f"still running after {self._grace:g} s"
            self._announce(f"{why}: killing {self._names(self._crew.running())}", story.STOPPED)
            self._crew.kill()

    # Losses.

    def _is_failure(self, local_rank: int, code: int) -> bool:
        """Whether a worker that ended did so because something went wrong. One that was asked to stop may say
        so in its exit code, or be ended by the signal before it has a handler."""
        if local_rank in self._crew.killed or code == 0:
            return False
        if local_rank in self._crew.terminated and (code in STOPPED or code == -signal.SIGTERM):
            return read_failure(self._error_file(local_rank)) is not None
        return True

    def _break_off(self) -> None:
        """One worker has failed: finds out which was first, tells the other machines, then stops the others."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while first_cause(self._failures()).follows and self._crew.running() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._end_all(first_cause(self._failures()))

    def _end_all(self, cause: Failure) -> None:
        assert self._board is not None
        self._broken_at = time.time()
        again = self._goes_on_after(cause, [])
        self._board.post(replace(cause, ends=not again))
        if again or self._hung is not None:
            self._crew.kill()
        else:
            self._stop()

    def _stop(self) -> None:
        """Asks the running workers to leave, kills those that have not in a few seconds."""
        if self._crew.running():
            self._broken_at = self._broken_at or time.time()
            requests = len(self._requests)
            self._crew.stop(FAILURE_SECONDS, hurry=lambda: len(self._requests) > requests)

    def _goes_on_after(self, cause: Failure, elsewhere: list[Failure]) -> bool:
        """Whether the workers are to be started again: a loss is mended by that, a mistake is not. Another machine
        may have decided that the run ends."""
        mended = cause.lost or not (cause.user or cause.exit_code == 2)
        mended = mended and not any(failure.ends for failure in elsewhere)
        return mended and self._used < self._care.restarts and not self._requests

    def _look_elsewhere(self) -> None:
        """Tells the other launchers how it goes here, and breaks off when one has failed or fell silent."""
        assert self._board is not None
        if time.monotonic() - self._looked_at_board < LOOK_SECONDS:
            return
        self._looked_at_board = time.monotonic()
        fewest = min((sign.beat.step for sign in self._signs), default=0)
        claim = self._handout.claim
        lost = self._board.live(State(fewest, is_busy(self._signs, self._care.limits), claim.read()))
        for state in self._board.elsewhere:
            if state.folder and not claim.read():
                claim.write(state.folder)  # its machine may be gone by the next start
        failures = self._board.failures() or lost
        if failures:
            if self._goes_on_after(first_cause(failures), failures):
                self._broken_at = time.time()
                self._crew.kill()
            raise _Elsewhere(failures)

    def _failures(self) -> list[Failure]:
        """How this machine's workers failed, as far as it was not our doing: what came after we broke off is."""
        latest = self._broken_at or float("inf")
        found = [self._hung] if self._hung is not None else []
        for worker in self._worker_group.workers if self._crew.processes else ():
            local_rank, rank = worker.local_rank, worker.global_rank
            code, ended_at = self._crew.ended.get(local_rank, (0, float("inf")))
            by_itself = ended_at <= latest and self._is_failure(local_rank, code)
            failure = read_failure(self._error_file(local_rank))
            if failure is None and by_itself:
                failure = failure_from_exit(rank, code, ended_at)
            if failure is not None and (by_itself or failure.time <= latest):
                found.append(on_host(failure, self._host))
        return found

    def _explain(self, elsewhere: list[Failure]) -> int | None:
        """Says why the workers ended early, once; gives the exit code, or None when they start again."""
        assert self._board is not None
        self._crew.kill()  # what lost workers have started
        failures = self._failures() + elsewhere
        if failures and first_cause(failures).follows:
            failures += self._board.wait_for_cause()
        if not failures:
            return self._say_stopped()
        cause = first_cause(failures)
        story.leave_bar()
        again = self._goes_on_after(cause, failures)
        self._board.post(replace(cause, ends=not again))
        if again:
            self._used += 1
            self._lost_at = time.monotonic()
            if cause.traceback and not cause.follows:
                self._announce(render_failure(cause), story.FAILED)
            within = "" if self._hung or elsewhere else f"; noticed within {self._crew.noticed_within:.2f} s"
            meeting = ", as soon as the machines have met again" if self._host else ""
            self._announce(
                f"{summary(cause)}{within}: restart {self._used} of {self._care.restarts}{meeting}",
                story.FAILED,
            )
            return None
        self._announce(render_failure(cause), story.FAILED)
        if self._used and self._used == self._care.restarts:
            self._announce(f"all {self._used} restarts of launch.restarts are used up")
        return cause.exit_code

    def _say_stopped(self) -> int:
        """Workers that ended because they were asked to, or because nobody can be asked any more."""
        assert self._board is not None
        if not self._requests:
            advice = "; a file:// rendezvous needs no such machine" if self._care.restarts else ""
            self._announce(f"lost contact with the machine that hosts the rendezvous{advice}", story.FAILED)
            return 1
        code = max(exit_code for exit_code, _ in self._crew.ended.values())
        if self._crew.killed or code <= 0:
            code = 128 + self._requests[0][0]
            rank = self._worker_group.workers[0].global_rank
            words = f"was stopped by {self._requests[0][0].name}"
            cause = Failure(rank, words, time.time(), exit_code=code, ends=True)
            self._board.post(on_host(cause, self._host))
        return code

    def _error_file(self, local_rank: int) -> str:
        assert self._pcontext is not None
        return str(self._pcontext.error_files[local_rank])

    def _names(self, local_ranks: list[int]) -> str:
        ranks = [self._worker_group.workers[local_rank].global_rank for local_rank in local_ranks]
        return "rank " + ", ".join(str(rank) for rank in ranks)

    # Progress.

    def _feel_pulse(self) -> None:
        """Looks at the workers' beats: says when a restarted run trains again, breaks off when it stands still."""
        assert self._board is not None
        beats = self._handout.beats
        assert beats is not None
        now = time.monotonic()
        self._signs = [
            self._pulses[local_rank].look(
                beats.read(local_rank), is_stopped(self._crew.processes[local_rank].pid), now
            )
            for local_rank in self._crew.running()
        ]
        if not self._signs:
            return
        if self._lost_at is not None and all(sign.beat.phase is Phase.STEPPING for sign in self._signs):
            step = min(sign.beat.step for sign in self._signs)
            self._announce(f"training again: step {step:,} done {now - self._lost_at:.1f} s after the loss")
            self._lost_at = None
        busy = any(state.busy for state in self._board.elsewhere)
        if not self._requests and is_hung(self._signs, self._care.limits, busy):
            self._break_off_hung()

    def _break_off_hung(self) -> None:
        """Prints where every rank stands, names the one that the others most likely wait for, and ends them."""
        assert self._board is not None
        assert self._handout.stacks is not None
        places = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        awake = [places[sign.rank] for sign in self._signs if not sign.stopped]
        answers = self._handout.stacks.ask({place: self._crew.processes[place].pid for place in awake})
        by_rank = {sign.rank: answers.get(places[sign.rank], "") for sign in self._signs}
        for sign in self._signs:
            self._announce(standing(sign, by_rank[sign.rank]))
        cause = verdict(self._signs, by_rank, [state.step for state in self._board.elsewhere], time.time())
        self._hung = on_host(cause, self._host)
        self._end_all(self._hung)


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
