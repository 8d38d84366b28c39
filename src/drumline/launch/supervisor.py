"""Starts one machine's workers and supervises them: stop requests, lost and hung processes, restarts, the end.

Promises: the loop checks its workers ten times a second and never waits for the network (a thread of `cluster.py`
does), so it acts on a stop request at once and notices a lost process within a second, whatever other machines do; a
restart kills the remaining workers at once and waits for no timeout; a user's mistake and a run that was asked to
stop are not restarted; restarts without progress come at growing intervals.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drumline.core.errors import KILLED
from drumline.core.heartbeat import Phase
from drumline.launch.cluster import Cluster, Ended, NotConnected
from drumline.launch.failure import (
    Failure,
    first_cause,
    on_host,
    rank_name,
    render_failure,
    summary,
)
from drumline.launch.hang import Limits, Pulse, Sign, describe, is_busy, is_hung, is_stopped, verdict
from drumline.launch.nodes import Round, worker_variables
from drumline.launch.workers import STOPPED, Backoff, StopRequests, WorkerEnvironment, Workers
from drumline.observe import text_log

GRACE_SECONDS = 300.0
"""How long workers may take to finish their step and save after a stop request."""

FAILURE_SECONDS = 3.0
"""How long the other workers may take to exit after one has failed and the run ends. A worker that waits for the
failed rank in a collective never notices."""

CAUSE_SECONDS = 0.5
"""How long a broken connection waits for the end of the process behind it."""

POLL_SECONDS = 0.1
"""Between two checks of the workers and of other machines' reports."""


@dataclass(frozen=True)
class Policy:
    """Restarts allowed, how long a worker may be silent, and how many seconds workers may take to save after a stop
    request."""

    restarts: int
    limits: Limits
    grace: float = GRACE_SECONDS


@dataclass(frozen=True)
class Outcome:
    """How the run ended: the failure that is the cause, if any, and rank 0's result as JSON, if the launcher returns
    it."""

    exit_code: int
    failure: Failure | None = None
    result: str = ""


class StopRequested(Exception):
    """A stop signal came while no worker runs."""


class Supervisor:
    """This machine's workers from the first start to the end. Use once, through `run`. `variables` is the environment
    that all workers share."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        environment: WorkerEnvironment,
        cluster: Cluster,
        *,
        log: text_log.LauncherLog,
        host: str,
        policy: Policy,
    ) -> None:
        self._command, self._variables, self._environment = command, variables, environment
        self._cluster, self._log, self._host, self._policy = cluster, log, host, policy
        self._restarts, self._backoff = 0, Backoff()
        self._round: Round | None = None
        self._lost: tuple[str, float] | None = None
        self._requests = StopRequests()
        self._reset(())

    def run(self) -> Outcome:
        """Runs the workers to their end, restarts them if necessary, and logs what went wrong."""
        with self._requests.handled():
            try:
                while True:
                    round = self._next_round()
                    try:
                        self._start(round)
                        outcome = self._supervise(round)
                    finally:
                        self._workers.kill()  # with everything that lost workers have started
                    if outcome is not None:
                        return outcome
                    self._environment.clear()
                    self._wait(self._pause)
            except Ended as ended:
                self._log(render_failure(ended.failure), text_log.FAILED)
                return Outcome(ended.failure.exit_code, ended.failure)
            except NotConnected as error:
                if self._round is None:
                    raise
                why = (
                    "ended while this machine was disconnected"
                    if error.code == "ended"
                    else f"ends: the machines could not connect again ({error})"
                )
                self._log(f"the run {why}", text_log.FAILED)
                return Outcome(1, Failure(-1, f"the run {why}", time.monotonic(), host=self._host))
            except StopRequested:
                return self._stopped_between_starts()

    def _reset(self, ranks: Sequence[int]) -> None:
        now = time.monotonic()
        self._workers, self._ranks = Workers(self._environment, ranks), list(ranks)
        self._pulses = [Pulse(rank, now) for rank in ranks]
        self._signs: list[Sign] = []
        self._furthest = 0
        self._hung: Failure | None = None
        self._reported: Failure | None = None
        self._broken_at: float | None = None
        self._progress_reported: tuple[float, str] = (0.0, "")
        self._pause = 0.0

    def _next_round(self) -> Round:
        claim = self._environment.claim.read()
        self._cluster.report(state="waiting", restarts=self._restarts, folder=claim)
        return self._cluster.next_round(self._policy.limits.starting, self._log, self._check_requests)

    def _start(self, round: Round) -> None:
        node, ranks, world = self._cluster.ranks(round)
        self._round, self._restarts = round, round.generation
        if round.folder:
            self._environment.claim.write(round.folder)
        self._log.writes, self._log.start = ranks[0] == 0, (round.launch_id, round.generation)
        given = worker_variables(round, node, ranks, world, self._policy.restarts)
        own = self._environment.prepare(ranks)
        environments = [dict(self._variables) | given[local] | own[local] for local in range(len(ranks))]
        if len(round.ids) > 1 or self._host:
            self._log(
                f"machine {node} of {len(round.ids)}: starting ranks {ranks[0]} to {ranks[-1]} of {world}"
            )
        self._cluster.report(
            state="running",
            round=round.number,
            launch_id=round.launch_id,
            restarts=self._restarts,
            step=0,
            busy=True,
            failure=None,
        )
        self._reset(ranks)
        self._workers.start(self._command, environments)

    def _supervise(self, round: Round) -> Outcome | None:
        """From a start of the workers to their end: the outcome, or None if they are to be restarted."""
        elsewhere = self._poll_until_end(round)
        if not elsewhere and all(code == 0 for code, _ in self._workers.ended.values()) and not self._hung:
            elsewhere = self._cluster.wait_until_done(round, lambda: len(self._requests) > 1)
            if not elsewhere:
                return Outcome(0)
        return self._conclude(round, elsewhere)

    def _poll_until_end(self, round: Round) -> list[Failure]:
        """Until no worker runs. Returns what ended them, if that happened on another machine."""
        while self._workers.running():
            if any(map(self._workers.is_failure, self._workers.ended)):
                self._end_after_failure()
                break
            self._check_progress(round)
            if lost := self._check_cluster(round):
                self._broken_at = time.monotonic()
                if self._restarts_after(first_cause(lost), lost):
                    self._workers.kill()
                else:
                    self._stop()
                return lost
            self._forward_requests()
            time.sleep(POLL_SECONDS)
        return []

    # Stop requests.

    def _forward_requests(self) -> None:
        """Forwards the first request to the workers; a second one, or the end of the grace time, kills them."""
        if not self._requests:
            return
        name, grace = self._requests.first.name, self._policy.grace
        if not self._workers.terminated:
            self._log(f"{name}: the processes finish their step, save and exit; {name} again kills them")
            self._workers.terminate()
        elif (len(self._requests) > 1 or self._requests.seconds > grace) and (
            left := self._workers.running()
        ):
            why = f"second {name}" if len(self._requests) > 1 else f"still running after {grace:g} s"
            *first, last = (str(self._ranks[local_rank]) for local_rank in left)
            ranks = f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
            self._log(f"{why}: killing {ranks} without saving", text_log.STOPPED)
            self._workers.kill()

    def _check_requests(self) -> None:
        if self._requests:
            raise StopRequested

    def _stopped_between_starts(self) -> Outcome:
        number = self._requests.first
        self._log(f"{number.name}: exiting; no process is running", text_log.STOPPED)
        cause = self._stop_failure(128 + number)
        self._cluster.report(failure=replace(cause, rank=-1))
        return Outcome(cause.exit_code)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._check_requests()
            time.sleep(0.05)

    def _stop_failure(self, code: int) -> Failure:
        rank = self._ranks[0] if self._ranks else -1
        text = f"stopped by {self._requests.first.name}"
        return Failure(rank, text, time.monotonic(), host=self._host, exit_code=code, ends=True)

    # Losses.

    def _end_after_failure(self) -> None:
        """One worker has failed: finds out which was first, reports it to the other machines, ends the workers."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while (
            first_cause(self._failures()).follows and self._workers.running() and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        self._end_all(first_cause(self._failures()))

    def _end_all(self, cause: Failure) -> None:
        self._broken_at = time.monotonic()
        again = self._restarts_after(cause, [])
        self._report(replace(cause, ends=not again))
        if again or self._hung is not None:
            self._workers.kill()
        else:
            self._stop()

    def _report(self, failure: Failure) -> None:
        """Reports to the other machines why this one stops. Only the first report is sent, or a
        later one that ends the run."""
        if self._reported is None or failure.ends > self._reported.ends:
            self._reported = failure
            self._cluster.report(failure=failure)

    def _stop(self) -> None:
        """Terminates the running workers; kills those that take longer than a few seconds."""
        if self._workers.running():
            self._broken_at = self._broken_at or time.monotonic()
            requests = len(self._requests)
            self._workers.stop(FAILURE_SECONDS, hurry=lambda: len(self._requests) > requests)

    def _restarts_after(self, cause: Failure, elsewhere: list[Failure]) -> bool:
        """Whether to restart the workers: that helps after a loss, not after a user's mistake. Another machine may
        have decided that the run ends."""
        helps = cause.lost or not (cause.user or cause.exit_code == 2)
        helps = helps and not any(failure.ends for failure in elsewhere)
        return helps and self._restarts < self._policy.restarts and not self._requests

    def _check_cluster(self, round: Round) -> list[Failure]:
        """Reports progress to the other launchers; returns which of them have failed or are lost."""
        now, claim = time.monotonic(), self._environment.claim.read()
        if now - self._progress_reported[0] > 1.0 or claim != self._progress_reported[1]:
            self._progress_reported = now, claim
            fewest = min((sign.beat.step for sign in self._signs), default=0)
            self._cluster.report(step=fewest, busy=is_busy(self._signs, self._policy.limits), folder=claim)
        for line in self._cluster.skewed_clocks():
            self._log(line)
        if not claim and (claimed := self._cluster.folder(round)):
            # The machine that claimed it may be lost by the next start.
            self._environment.claim.write(claimed)
        return self._cluster.losses(round)

    def _failures(self) -> list[Failure]:
        """How this machine's workers failed, without those that ended because the launcher ended them."""
        found = self._workers.failures(self._broken_at or float("inf"))
        return [on_host(each, self._host) for each in found] + ([self._hung] if self._hung else [])

    def _conclude(self, round: Round, elsewhere: list[Failure]) -> Outcome | None:
        """Logs why the workers ended early, once. Returns the outcome, or None if they are to be restarted."""
        failures = self._failures() + elsewhere
        if failures and first_cause(failures).follows:
            self._report(first_cause(failures))
            failures += self._cluster.wait_for_cause(round, lambda: len(self._requests) > 0)
        if not failures:
            return self._stopped()
        cause = first_cause(failures)
        text_log.leave_bar()
        again = self._restarts_after(cause, failures)
        self._report(replace(cause, ends=not again))
        if again:
            self._restarts += 1
            self._lost = rank_name(cause), time.monotonic()
            self._cluster.report(state="restarting")
            if cause.traceback and not cause.follows:
                self._log(render_failure(cause), text_log.FAILED)
            within = (
                "" if self._hung or elsewhere else f"; noticed within {self._workers.noticed_within:.2f} s"
            )
            self._pause = self._backoff.next(self._furthest)
            when = f" in {self._pause:g} s" if self._pause else ""
            when += ", as soon as the machines are connected again" if self._host else ""
            self._log(
                f"{summary(cause)}{within}; restart {self._restarts} of {self._policy.restarts}{when}",
                text_log.FAILED,
            )
            return None
        self._log(render_failure(cause), text_log.FAILED)
        if self._restarts and self._restarts == self._policy.restarts:
            self._log(f"all {self._restarts} restarts of launch.restarts are used up")
        if self._requests and (cause.rank < 0 or cause.exit_code in STOPPED):
            return Outcome(KILLED if self._workers.killed else 128 + self._requests.first, cause)
        return Outcome(cause.exit_code, cause)

    def _stopped(self) -> Outcome:
        """Workers that ended because a signal stopped the run, received here or on another machine."""
        codes = [exit_code for exit_code, _ in self._workers.ended.values()]
        code = 128 + self._requests.first if self._requests else max(codes)
        if self._workers.killed:
            code = KILLED
        if self._workers.killed or min(codes) < 0:
            self._report(self._stop_failure(code))
        return Outcome(code)

    # Progress.

    def _check_progress(self, round: Round) -> None:
        """Reads the workers' heartbeats: logs when a restarted run trains again, ends the workers if it hangs."""
        beats = self._environment.beats
        assert beats is not None
        now = time.monotonic()
        self._signs = [
            self._pulses[local_rank].update(
                beats.read(local_rank), is_stopped(self._workers.processes[local_rank].pid), now
            )
            for local_rank in self._workers.running()
        ]
        if not self._signs:
            return
        step = min(sign.beat.step for sign in self._signs)
        self._furthest = max(self._furthest, step)
        if self._lost is not None and all(sign.beat.phase is Phase.STEPPING for sign in self._signs):
            lost, at = self._lost
            self._log(f"training again: step {step:,} finished {now - at:.1f} s after {lost} was lost")
            self._lost = None
        busy = any(busy for _, busy in self._cluster.others(round))
        if is_hung(self._signs, self._policy.limits, busy):
            self._end_hung(round)

    def _end_hung(self, round: Round) -> None:
        """Logs the stack of every rank, names the one that the others most likely wait for, and ends the workers."""
        assert self._environment.stacks is not None
        local = {rank: local_rank for local_rank, rank in enumerate(self._ranks)}
        awake = [local[sign.rank] for sign in self._signs if not sign.stopped]
        answers = self._environment.stacks.ask({each: self._workers.processes[each].pid for each in awake})
        by_rank = {sign.rank: answers.get(local[sign.rank], "") for sign in self._signs}
        for sign in self._signs:
            self._log(describe(sign, by_rank[sign.rank]))
        steps = [step for step, _ in self._cluster.others(round)]
        self._hung = on_host(verdict(self._signs, by_rank, steps, time.monotonic()), self._host)
        self._end_all(self._hung)
