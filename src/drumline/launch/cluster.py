"""The machines of a run as the supervisor of one of them sees them: joining a round, losses elsewhere, the end.

A run on one machine is a cluster of one, whose hub is in memory. Promises: the supervisor never waits for the network
or a shared disk: it sets what to report and reads the latest replies in memory, including how long ago the last one
came, while a thread of its own exchanges messages. A wait for other machines ends after `timeout` seconds, or says
why it may take longer. A machine that is lost, one that lost contact itself, and one that the run has continued
without are each reported in one sentence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from drumline.core.errors import UserError
from drumline.launch.failure import Failure
from drumline.launch.hub import AwakeClock, Reply, Unreachable
from drumline.launch.nodes import Heard, Node, Round, is_live, ranks_of

SILENT_SECONDS = 5.0
"""Without a message, after which a launcher counts as lost, and the contact with the hub too."""

FILE_SILENT_SECONDS = 25.0
"""The same for a shared folder, where files of other machines may appear late."""

PACE = 0.25
FILE_PACE = 1.0
"""Seconds between two exchanges."""

BIG_SKEW = 10.0
"""Difference between clocks, in seconds, that is reported to the user."""

POLL_SECONDS = 0.1
LEAVE_SECONDS = 2.0
"""How long the last message of a launcher may take."""

JOINS_LATER = "the run is under way without this machine: it joins at the next restart"


class NotConnected(Exception):
    """The machines did not connect. `code` is `ended` if the run ended while this machine was disconnected,
    `not-a-launcher` if another program answers at the rendezvous."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


class Ended(Exception):
    """Another machine has ended the run."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class RendezvousBackend(Protocol):
    """How messages travel: through a hub here, a hub on another machine, or a shared folder."""

    def exchange(self, node: Node) -> Reply: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class View:
    """What is known now: the last reply, and how many seconds ago it came."""

    reply: Reply
    age: float
    error: Unreachable | UserError | None = None
    """Why the last exchange failed. A `UserError`: no later one will succeed."""

    @property
    def round(self) -> Round | None:
        return self.reply.round

    def others(self, id: str) -> dict[str, Heard]:
        """What the launchers other than `id` reported."""
        return {name: each for name, each in self.reply.heard.items() if name != id}


class Contact:
    """Sends reports and receives those of others, on a thread of its own, for whose end nothing waits. `limit` is the
    silence that counts as a loss."""

    def __init__(
        self, backend: RendezvousBackend, node: Node, *, rendezvous: str, limit: float, pace: float
    ) -> None:
        self.rendezvous, self.limit, self._pace = rendezvous, limit, pace
        self._backend, self._node = backend, node
        self._clock, self._lock = AwakeClock(), threading.Lock()
        self._changed, self._left = threading.Event(), threading.Event()
        self._reply = Reply(None, {})
        self._error: Unreachable | UserError | None = None
        self._heard_at = self._clock.now()
        self._reported, self._delivered = 0, -1
        threading.Thread(target=self._run, name="contact", daemon=True).start()

    @property
    def id(self) -> str:
        return self._node.id

    def report(self, **changes: Any) -> None:
        """Changes what is reported from now on."""
        with self._lock:
            self._node = replace(self._node, **changes)
            self._reported += 1
        self._changed.set()

    def view(self) -> View:
        """What is known now. Call it more than once a second, so that time in which this process was stopped does not
        count as silence."""
        with self._lock:
            return View(self._reply, self._clock.now() - self._heard_at, self._error)

    def leave(self, seconds: float) -> None:
        """Reports that this launcher leaves; waits up to `seconds` for delivery if there is contact."""
        view = self.view()
        lost = view.age > self.limit or isinstance(view.error, UserError) or not view.reply.heard
        self.report(state="left")
        self._left.set()
        deadline = time.monotonic() + (0.0 if lost else seconds)
        while self._delivered < self._reported and time.monotonic() < deadline:
            time.sleep(0.02)

    def _run(self) -> None:
        over = False
        while not over:
            self._changed.wait(self._pace)
            self._changed.clear()
            over = self._left.is_set()
            with self._lock:
                node, reported = self._node, self._reported
            try:
                reply = self._backend.exchange(replace(node, clock=time.time()))
                if over:
                    self._backend.leave()
            except Unreachable as error:
                with self._lock:
                    self._error = error
                over = False
                time.sleep(self._pace)
            except UserError as error:
                with self._lock:
                    self._error = error
                return
            else:
                with self._lock:
                    self._reply, self._error, self._delivered = reply, None, reported
                    self._heard_at = self._clock.now()


class Cluster:
    """The machines of a run. `host` is the name of this one."""

    def __init__(self, contact: Contact, host: str) -> None:
        self._contact, self._host = contact, host
        self._last: Round | None = None
        self._reported_clocks: set[str] = set()

    def next_round(self, timeout: float, log: Callable[[str], None], check: Callable[[], None]) -> Round:
        """Waits for the next round that this machine is part of; calls `check` meanwhile. Raises `NotConnected`,
        `Ended`, `UserError`."""
        contact, deadline, logged = self._contact, time.monotonic() + timeout, False
        number = self._last.number if self._last is not None else 0
        while True:
            check()
            view, now = contact.view(), time.monotonic()
            if isinstance(view.error, UserError):
                raise view.error
            if view.reply.refused:
                raise UserError(view.reply.refused, "start the same command on each machine")
            if view.round is not None and view.round.number > number and contact.id in view.round.ids:
                self._last = view.round
                return view.round
            self._end_if_others_have(view)
            reached = view.age <= contact.limit
            if reached and view.reply.over:
                raise NotConnected("the run has ended", "ended")
            if reached and self._under_way(view):
                deadline = now + timeout
                if view.round is not None and contact.id not in view.round.ids and not logged:
                    logged = True
                    log(JOINS_LATER)
            if now > deadline:
                code = view.error.code if view.error is not None else ""
                raise NotConnected(self._connected(view), code)
            time.sleep(0.02)

    def ranks(self, round: Round) -> tuple[int, range, int]:
        """The number of this machine in a round, the ranks of its workers, and the world size."""
        return ranks_of(round, self._contact.id)

    def report(self, **changes: Any) -> None:
        """Changes what this machine reports to the others."""
        self._contact.report(**changes)

    def folder(self, round: Round) -> str:
        """The run folder that another machine has claimed; empty if none has."""
        others = self._contact.view().others(self._contact.id).values()
        return next(
            (each.node.folder for each in others if each.node.folder and each.node.round == round.number), ""
        )

    def losses(self, round: Round) -> list[Failure]:
        """What went wrong elsewhere: no contact with the rendezvous, a machine that is lost or has failed, or a run
        that continued without this machine."""
        contact, view, now = self._contact, self._contact.view(), time.monotonic()
        if view.age > contact.limit:
            text = f"lost contact with the rendezvous at {contact.rendezvous} for {view.age:.0f} s"
            return [Failure(-1, text, now - view.age, host=self._host, lost=True)]
        if view.round is not None and view.round.number > round.number and contact.id not in view.round.ids:
            text = "the run continued without this machine after it was silent for a while"
            return [Failure(-1, text, now, host=self._host, lost=True)]
        found = []
        for index, name in enumerate(round.ids):
            if name == contact.id:
                continue
            heard = view.reply.heard.get(name)
            if heard is None:
                found.append(Failure(-1, "lost", now, host=f"machine {index}", lost=True))
                continue
            node, where = heard.node, f"machine {index}, {heard.node.host}"
            if node.failure is not None and (node.round == round.number or node.state == "left"):
                found.append(node.failure)
            elif heard.silent > contact.limit and node.state != "left":
                text = f"lost: no message from its launcher for {heard.silent:.0f} s"
                found.append(Failure(-1, text, now - heard.silent, host=where, lost=True))
            elif node.round > round.number:
                found.append(Failure(-1, "has already restarted", now, host=where, lost=True))
        return found

    def others(self, round: Round) -> list[tuple[int, bool]]:
        """The fewest steps of each other machine's workers, and whether one of them is busy with something long."""
        others = self._contact.view().others(self._contact.id).values()
        return [(each.node.step, each.node.busy) for each in others if each.node.id in round.ids]

    def skewed_clocks(self) -> list[str]:
        """Clocks that differ much from this machine's, each reported once."""
        lines, view = [], self._contact.view()
        own = view.reply.heard.get(self._contact.id)
        for name, heard in view.others(self._contact.id).items():
            ahead = heard.ahead - (own.ahead if own is not None else 0.0)
            if abs(ahead) > BIG_SKEW and name not in self._reported_clocks and heard.fresh:
                self._reported_clocks.add(name)
                direction = "ahead of" if ahead > 0 else "behind"
                lines.append(
                    f"the clock of {heard.node.host} is {abs(ahead):.0f} s {direction} this machine's: times in its "
                    "messages and files differ by that much; the run does not depend on clocks"
                )
        return lines

    def wait_until_done(self, round: Round, hurry: Callable[[], bool]) -> list[Failure]:
        """Waits until the workers of every machine have finished; returns what went wrong instead, if it did."""
        self.report(state="done", busy=False)
        while not hurry():
            view = self._contact.view()
            if view.age > self._contact.limit:
                break  # cut off; the workers here have finished all the same
            if found := self.losses(round):
                return found
            if all(
                each is None or each.node.state in ("done", "left") for each in self._other_nodes(view, round)
            ):
                break
            time.sleep(POLL_SECONDS)
        return []

    def wait_for_cause(self, round: Round, hurry: Callable[[], bool]) -> list[Failure]:
        """Gives other machines time to report why a connection broke, or to be missed."""
        found: list[Failure] = []
        deadline = time.monotonic() + self._contact.limit + 2.0
        while time.monotonic() < deadline and not hurry():
            found = self.losses(round)
            known = [
                each is not None and each.node.failure is not None
                for each in self._other_nodes(self._contact.view(), round)
            ]
            if any(not failure.follows for failure in found) or all(known):
                break
            time.sleep(POLL_SECONDS)
        return found

    def leave(self) -> None:
        """Sends the last message."""
        self._contact.leave(LEAVE_SECONDS)

    def _other_nodes(self, view: View, round: Round) -> list[Heard | None]:
        return [view.reply.heard.get(name) for name in round.ids if name != self._contact.id]

    def _end_if_others_have(self, view: View) -> None:
        if (last := self._last) is None:
            return
        for name, heard in view.others(self._contact.id).items():
            failure = heard.node.failure
            if name in last.ids and failure is not None and failure.ends and heard.node.round >= last.number:
                raise Ended(failure)

    def _under_way(self, view: View) -> bool:
        """Whether live launchers are busy with a round, or about to wait for the next one."""
        rounds = [round for round in (view.round, self._last) if round is not None]
        return any(
            is_live(heard, self._contact.limit) and heard.node.state != "waiting"
            for name, heard in view.others(self._contact.id).items()
            if any(name in round.ids for round in rounds)
        )

    def _connected(self, view: View) -> str:
        """Which machines are connected, for the error of a wait that timed out."""
        if view.age > self._contact.limit or not view.reply.heard:
            return str(view.error or "no answer")
        heard = view.reply.heard.values()
        live = [each.node.host for each in heard if is_live(each, self._contact.limit)]
        text = f"{len(live)} connected: {', '.join(sorted(live))}"
        if view.reply.strangers:
            text += f"; rejected for a different secret: {', '.join(view.reply.strangers)}"
        return text
