"""Starts one machine's workers and watches them: stop requests, lost and hung processes, restarts, the end.

Promises: the loop looks at its workers ten times a second and never waits for the network (`contact.py` does), so a
stop request is obeyed at once and a lost process is noticed within a second, whatever other machines do; a restart
kills the others at once and waits for no timeout; a user's mistake and a run that was asked to stop are not
restarted; restarts that get no further come at growing intervals.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drumline.core.heartbeat import Phase
from drumline.launch.contact import Contact
from drumline.launch.failure import (
    Failure,
    failure_from_exit,
    first_cause,
    on_host,
    read_failure,
    render_failure,
    summary,
    who,
)
from drumline.launch.hang import Limits, Pulse, Sign, is_busy, is_hung, standing, verdict
from drumline.launch.joining import OVER, Ended, NotMet, all_done, all_failed, clock_notes, join, losses
from drumline.launch.nodes import Round, ranks_of, worker_variables
from drumline.launch.signals import STOPS, Requests
from drumline.launch.stacks import is_stopped
from drumline.launch.worker_environment import Handout
from drumline.launch.workers import Crew
from drumline.observe import text_log

GRACE_SECONDS = 300.0
"""How long workers may take to finish their step and save after a stop request."""

FAILURE_SECONDS = 3.0
"""How long the other workers may take to leave after one has failed and the run ends. One that waits in a collective
for the failed rank never notices."""

CAUSE_SECONDS = 0.5
"""How long a broken connection waits for the end of the process behind it."""

LOOK_SECONDS = 0.1
"""Between two looks at the workers and at what other machines say."""

LEAVE_SECONDS = 2.0
"""How long the last message of a launcher may take."""

LONGEST_PAUSE = 60.0
"""Before a restart."""

STOPPED = tuple(128 + number for number in STOPS)
"""Exit codes of a worker that saved and left because a signal stopped the run."""

KILLED = 128 + signal.SIGKILL
"""Exit code of a launcher that had to kill its workers before they saved."""


@dataclass(frozen=True)
class Care:
    """How workers are watched over: restarts allowed, and limits of silence."""

    restarts: int
    limits: Limits


class Pauses:
    """How long to wait before each restart: not at all as long as the run gets further each time, else 1, 2, 4 ... 60
    seconds."""

    def __init__(self) -> None:
        self._furthest, self._idle = -1, -1

    def next(self, step: int) -> float:
        """After a start whose workers came to this step."""
        self._idle = 0 if step > self._furthest >= 0 else self._idle + 1
        self._furthest = max(self._furthest, step)
        return min(2.0 ** (self._idle - 1), LONGEST_PAUSE) if self._idle else 0.0


class Watch:
    """This machine's workers from the first start to the end. Use once, through `finish`. `alone` is the round of a
    launcher that has no others; `variables` is the environment that all workers share."""

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        variables: Mapping[str, str],
        handout: Handout,
        *,
        alone: Round,
        contact: Contact | None,
        announce: text_log.LauncherLog,
        grace: float,
        host: str,
        care: Care,
    ) -> None:
        self._command, self._processes, self._variables = command, processes, variables
        self._handout, self._announce, self._grace, self._host = handout, announce, grace, host
        self._alone, self._contact, self._care = alone, contact, care
        self._used, self._pauses = 0, Pauses()
        self._round: Round | None = None
        self._lost: tuple[str, float] | None = None
        self._requests = Requests()
        self._clocks_noted: set[str] = set()
        self._begin(())

    def finish(self) -> int:
        """Runs the workers to their end, as often as it takes, shows what went wrong, and gives the exit code."""
        with self._requests.heard():
            while True:
                try:
                    round = self._next_round()
                except Ended as ended:
                    self._announce(render_failure(ended.failure), text_log.FAILED)
                    return ended.failure.exit_code
                except NotMet as error:
                    if self._round is None:
                        raise
                    over = str(error) == OVER
                    words = (
                        "has ended without this machine"
                        if over
                        else f"ends: the machines did not meet again ({error})"
                    )
                    self._announce(f"the run {words}", text_log.FAILED)
                    return 1
                try:
                    self._start(round)
                    code = self._one_start()
                finally:
                    self._crew.kill()  # with what lost workers have started
                if code is not None:
                    return code
                self._handout.take_back()
                self._pause(self._wait)

    def _begin(self, ranks: Sequence[int]) -> None:
        now = time.monotonic()
        self._crew, self._ranks = Crew(), list(ranks)
        self._pulses = [Pulse(rank, now) for rank in ranks]
        self._signs: list[Sign] = []
        self._furthest = 0
        self._hung: Failure | None = None
        self._posted: Failure | None = None
        self._broken_at: float | None = None
        self._said_at = 0.0
        self._wait = 0.0

    def _next_round(self) -> Round:
        if self._contact is None:
            return replace(self._alone, generation=self._used)
        self._contact.say(state="waiting", restarts=self._used, folder=self._handout.claim.read())
        limit = self._care.limits.starting
        return join(self._contact, self._round, limit, self._announce, self._end_if_asked)

    def _start(self, round: Round) -> None:
        place, ranks, world = (0, range(self._processes), self._processes)
        if self._contact is not None:
            place, ranks, world = ranks_of(round, self._contact.id)
        self._round, self._used = round, round.generation
        if round.folder:
            self._handout.claim.write(round.folder)
        self._announce.writes, self._announce.start = ranks[0] == 0, (round.launch_id, round.generation)
        given = worker_variables(round, place, ranks, world, self._care.restarts)
        own = self._handout.prepare(self._processes)
        environments = [dict(self._variables) | given[local] | own[local] for local in range(len(ranks))]
        if self._contact is not None:
            self._announce(
                f"machine {place} of {len(round.ids)}: starting ranks {ranks[0]} to {ranks[-1]} of {world}"
            )
            self._contact.say(
                state="running",
                round=round.number,
                launch_id=round.launch_id,
                restarts=self._used,
                step=0,
                busy=True,
                failure=None,
            )
        self._begin(ranks)
        self._crew.start(self._command, environments)

    def _one_start(self) -> int | None:
        """From a start of the workers to their end: the exit code, or None when they are to start again."""
        elsewhere = self._attend()
        if not elsewhere and all(code == 0 for code, _ in self._crew.ended.values()) and not self._hung:
            elsewhere = self._wait_for_all()
            if not elsewhere:
                return 0
        return self._explain(elsewhere)

    def _attend(self) -> list[Failure]:
        """Until no worker runs; gives what ended them, where that lies on another machine."""
        while self._crew.running():
            if any(self._is_failure(local_rank, code) for local_rank, (code, _) in self._crew.ended.items()):
                self._break_off()
                break
            self._feel_pulse()
            if lost := self._look_elsewhere():
                self._broken_at = time.monotonic()
                if self._goes_on_after(first_cause(lost), lost):
                    self._crew.kill()
                else:
                    self._stop()
                return lost
            self._obey()
            time.sleep(LOOK_SECONDS)
        return []

    # Stop requests.

    def _obey(self) -> None:
        """Passes the first request on to the workers; a second one, or the end of the grace time, kills."""
        if not self._requests:
            return
        name = self._requests.first.name
        if not self._crew.terminated:
            self._announce(
                f"{name}: the processes finish their step, save and leave; {name} again kills them"
            )
            self._crew.terminate()
        elif len(self._requests) > 1 or self._requests.seconds > self._grace:
            why = f"second {name}" if len(self._requests) > 1 else f"still running after {self._grace:g} s"
            ranks = self._names(self._crew.running())
            self._announce(f"{why}: killing {ranks} without saving", text_log.STOPPED)
            self._crew.kill()

    def _end_if_asked(self) -> None:
        """Ends this process by the signal that asked for it, where no worker runs that could save."""
        if not self._requests:
            return
        number = self._requests.first
        self._announce(f"{number.name}: ends here, no process is running", text_log.STOPPED)
        self._announce.close()
        self._handout.take_back()
        if self._contact is not None:
            words = f"was stopped by {number.name}"
            cause = Failure(-1, words, time.monotonic(), host=self._host, exit_code=128 + number, ends=True)
            self._contact.say(failure=cause)
            self._contact.leave(LEAVE_SECONDS)
            time.sleep(0.5)  # for those that ask us
        self._requests.end_us()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._end_if_asked()
            time.sleep(0.05)

    # Losses.

    def _is_failure(self, local_rank: int, code: int) -> bool:
        """Whether a worker that ended did so because something went wrong. One that was asked to stop may say
        so in its exit code, or be ended by the signal before it has a handler."""
        if local_rank in self._crew.killed or code == 0:
            return False
        asked = local_rank in self._crew.terminated and code == -signal.SIGTERM
        if code in STOPPED or asked:
            return read_failure(self._handout.error_file(local_rank)) is not None
        return True

    def _break_off(self) -> None:
        """One worker has failed: finds out which was first, tells the other machines, then stops the others."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while first_cause(self._failures()).follows and self._crew.running() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._end_all(first_cause(self._failures()))

    def _end_all(self, cause: Failure) -> None:
        self._broken_at = time.monotonic()
        again = self._goes_on_after(cause, [])
        self._post(replace(cause, ends=not again))
        if again or self._hung is not None:
            self._crew.kill()
        else:
            self._stop()

    def _post(self, failure: Failure) -> None:
        """Tells the other machines why this one stops. The first notice counts, and that the run ends."""
        if self._contact is not None and (self._posted is None or failure.ends > self._posted.ends):
            self._posted = failure
            self._contact.say(failure=failure)

    def _stop(self) -> None:
        """Asks the running workers to leave, kills those that have not in a few seconds."""
        if self._crew.running():
            self._broken_at = self._broken_at or time.monotonic()
            requests = len(self._requests)
            self._crew.stop(FAILURE_SECONDS, hurry=lambda: len(self._requests) > requests)

    def _goes_on_after(self, cause: Failure, elsewhere: list[Failure]) -> bool:
        """Whether the workers are to be started again: a loss is mended by that, a mistake is not. Another machine
        may have decided that the run ends."""
        mended = cause.lost or not (cause.user or cause.exit_code == 2)
        mended = mended and not any(failure.ends for failure in elsewhere)
        return mended and self._used < self._care.restarts and not self._requests

    def _look_elsewhere(self) -> list[Failure]:
        """Tells the other launchers how it goes here; gives who of them has failed or is gone."""
        if self._contact is None:
            return []
        assert self._round is not None
        now, claim = time.monotonic(), self._handout.claim.read()
        if now - self._said_at > 1.0 or claim != self._contact.member.folder:
            self._said_at = now
            fewest = min((sign.beat.step for sign in self._signs), default=0)
            self._contact.say(step=fewest, busy=is_busy(self._signs, self._care.limits), folder=claim)
        view = self._contact.view()
        for note in clock_notes(self._contact, view, self._clocks_noted):
            self._announce(note)
        for heard in view.others(self._contact.id).values():
            if heard.member.folder and heard.member.round == self._round.number and not claim:
                # Its machine may be gone by the next start.
                self._handout.claim.write(heard.member.folder)
        return losses(self._contact, view, self._round, self._host)

    def _elsewhere(self) -> list[tuple[int, bool]]:
        """The fewest steps of each other machine's workers, and whether one of them does something that may take
        long."""
        if self._contact is None or self._round is None:
            return []
        heard = self._contact.view().others(self._contact.id).values()
        return [(each.member.step, each.member.busy) for each in heard if each.member.id in self._round.ids]

    def _wait_for_all(self) -> list[Failure]:
        """The workers here have finished: waits for the other machines', or for one that has failed."""
        if self._contact is None:
            return []
        assert self._round is not None
        self._contact.say(state="done", busy=False)
        while len(self._requests) < 2:
            view = self._contact.view()
            if view.age > self._contact.limit:
                break  # cut off; this machine has done its part all the same
            if found := losses(self._contact, view, self._round, self._host):
                return found
            if all_done(self._contact, view, self._round):
                break
            time.sleep(LOOK_SECONDS)
        return []

    def _wait_for_cause(self) -> list[Failure]:
        """Workers that lost a connection do not know why. Gives other machines the time to say what happened, or to
        be missed."""
        if self._contact is None:
            return []
        assert self._round is not None
        found: list[Failure] = []
        deadline = time.monotonic() + self._contact.limit + 2.0
        while time.monotonic() < deadline and not self._requests:
            view = self._contact.view()
            found = losses(self._contact, view, self._round, self._host)
            if any(not failure.follows for failure in found) or all_failed(self._contact, view, self._round):
                break
            time.sleep(LOOK_SECONDS)
        return found

    def _failures(self) -> list[Failure]:
        """How this machine's workers failed, as far as it was not our doing: what came after we broke off is."""
        latest = self._broken_at or float("inf")
        found = [self._hung] if self._hung is not None else []
        for local_rank, rank in enumerate(self._ranks):
            code, ended_at = self._crew.ended.get(local_rank, (0, float("inf")))
            by_itself = ended_at <= latest and self._is_failure(local_rank, code)
            failure = read_failure(self._handout.error_file(local_rank))
            if failure is None and by_itself:
                failure = failure_from_exit(rank, code, ended_at)
            if failure is not None and (by_itself or failure.time <= latest):
                found.append(on_host(failure, self._host))
        return found

    def _explain(self, elsewhere: list[Failure]) -> int | None:
        """Says why the workers ended early, once; gives the exit code, or None when they start again."""
        failures = self._failures() + elsewhere
        if failures and first_cause(failures).follows:
            self._post(first_cause(failures))
            failures += self._wait_for_cause()
        if not failures:
            return self._say_stopped()
        cause = first_cause(failures)
        text_log.leave_bar()
        again = self._goes_on_after(cause, failures)
        self._post(replace(cause, ends=not again))
        if again:
            self._used += 1
            self._lost = who(cause), time.monotonic()
            if self._contact is not None:
                self._contact.say(state="restarting")
            if cause.traceback and not cause.follows:
                self._announce(render_failure(cause), text_log.FAILED)
            within = "" if self._hung or elsewhere else f"; noticed within {self._crew.noticed_within:.2f} s"
            self._announce(
                f"{summary(cause)}{within}: restart {self._used} of {self._care.restarts}{self._when()}",
                text_log.FAILED,
            )
            return None
        self._announce(render_failure(cause), text_log.FAILED)
        if self._used and self._used == self._care.restarts:
            self._announce(f"all {self._used} restarts of launch.restarts are used up")
        if self._requests and (cause.rank < 0 or cause.exit_code in STOPPED):
            return KILLED if self._crew.killed else 128 + self._requests.first
        return cause.exit_code

    def _when(self) -> str:
        """When the workers start again, where that is not at once."""
        self._wait = self._pauses.next(self._furthest)
        pause = f" in {self._wait:g} s" if self._wait else ""
        return pause + (", as soon as the machines have met again" if self._contact is not None else "")

    def _say_stopped(self) -> int:
        """Workers that ended because a signal stopped the run, which the launcher or another machine received."""
        codes = [exit_code for exit_code, _ in self._crew.ended.values()]
        code = 128 + self._requests.first if self._requests else max(codes)
        if self._crew.killed:
            code = KILLED
        if self._crew.killed or min(codes) < 0:
            words = f"was stopped by {self._requests.first.name}"
            cause = Failure(self._ranks[0], words, time.monotonic(), exit_code=code, ends=True)
            self._post(on_host(cause, self._host))
        return code

    def _names(self, local_ranks: list[int]) -> str:
        *first, last = (str(self._ranks[local_rank]) for local_rank in local_ranks)
        return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"

    # Progress.

    def _feel_pulse(self) -> None:
        """Looks at the workers' beats: says when a restarted run trains again, breaks off when it stands still."""
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
        step = min(sign.beat.step for sign in self._signs)
        self._furthest = max(self._furthest, step)
        if self._lost is not None and all(sign.beat.phase is Phase.STEPPING for sign in self._signs):
            lost, at = self._lost
            self._announce(f"training again: step {step:,} finished {now - at:.1f} s after {lost} was lost")
            self._lost = None
        busy = any(busy for _, busy in self._elsewhere())
        if is_hung(self._signs, self._care.limits, busy):
            self._break_off_hung()

    def _break_off_hung(self) -> None:
        """Prints where every rank stands, names the one that the others most likely wait for, and ends them."""
        assert self._handout.stacks is not None
        places = {rank: local_rank for local_rank, rank in enumerate(self._ranks)}
        awake = [places[sign.rank] for sign in self._signs if not sign.stopped]
        answers = self._handout.stacks.ask({place: self._crew.processes[place].pid for place in awake})
        by_rank = {sign.rank: answers.get(places[sign.rank], "") for sign in self._signs}
        for sign in self._signs:
            self._announce(standing(sign, by_rank[sign.rank]))
        steps = [step for step, _ in self._elsewhere()]
        self._hung = on_host(verdict(self._signs, by_rank, steps, time.monotonic()), self._host)
        self._end_all(self._hung)
