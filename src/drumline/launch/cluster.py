"""The machines of a run as the supervisor of one of them sees them: joining a round, losses elsewhere, the end.

Reads memory only; `contact.py` does the network. Promises: a wait for other machines ends after `timeout` seconds, or
says why it may take longer; a machine that is lost, one that lost contact itself, and one that the run has continued
without are each reported in one sentence. `SingleNode` has the same methods for a run on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from drumline.core.errors import UserError
from drumline.launch.contact import Contact, View
from drumline.launch.failure import Failure
from drumline.launch.nodes import Round, is_live, ranks_of

BIG_SKEW = 10.0
"""Difference between clocks, in seconds, that is reported to the user."""

POLL_SECONDS = 0.1
LEAVE_SECONDS = 2.0
"""How long the last message of a launcher may take."""

JOINS_LATER = "the run is under way without this machine: it joins at the next restart"


class NotConnected(Exception):
    """The machines did not connect. `code` is `ended` if the run has ended without this machine, `not-a-launcher` if
    another program answers at the rendezvous."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


class Ended(Exception):
    """Another machine has ended the run."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class SingleNode:
    """A run on one machine. `round` is its first start."""

    def __init__(self, round: Round) -> None:
        self._round = round

    def next_round(
        self,
        restarts: int,
        folder: str,
        timeout: float,
        log: Callable[[str], None],
        check: Callable[[], None],
    ) -> Round:
        """Waits for the next round that this machine is part of; calls `check` meanwhile. Raises `NotConnected`,
        `Ended`, `UserError`."""
        return replace(self._round, generation=restarts)

    def ranks(self, round: Round) -> tuple[int, range, int]:
        """The number of this machine in a round, the ranks of its workers, and the world size."""
        return 0, range(round.processes[0]), round.processes[0]

    def report(self, **changes: Any) -> None:
        """Changes what this machine reports to the others."""

    def folder(self, round: Round) -> str:
        """The run folder that another machine has claimed; empty if none has."""
        return ""

    def losses(self, round: Round) -> list[Failure]:
        """What went wrong elsewhere: no contact with the rendezvous, a machine that is lost or has failed, or a run
        that continued without this machine."""
        return []

    def others(self, round: Round) -> list[tuple[int, bool]]:
        """The fewest steps of each other machine's workers, and whether one of them is busy with something long."""
        return []

    def skewed_clocks(self) -> list[str]:
        """Clocks that differ much from this machine's, each reported once."""
        return []

    def wait_until_done(self, round: Round, hurry: Callable[[], bool]) -> list[Failure]:
        """Waits until the workers of every machine have finished; returns what went wrong instead, if it did."""
        return []

    def wait_for_cause(self, round: Round, hurry: Callable[[], bool]) -> list[Failure]:
        """Gives other machines time to report why a connection broke, or to be missed."""
        return []


class Cluster(SingleNode):
    """A run on several machines. `host` is the name of this one."""

    def __init__(self, contact: Contact, host: str) -> None:
        self._contact, self._host = contact, host
        self._last: Round | None = None
        self._reported_clocks: set[str] = set()

    def next_round(
        self,
        restarts: int,
        folder: str,
        timeout: float,
        log: Callable[[str], None],
        check: Callable[[], None],
    ) -> Round:
        self.report(state="waiting", restarts=restarts, folder=folder)
        self._last = join(self._contact, self._last, timeout, log, check)
        return self._last

    def ranks(self, round: Round) -> tuple[int, range, int]:
        return ranks_of(round, self._contact.id)

    def report(self, **changes: Any) -> None:
        self._contact.report(**changes)

    def folder(self, round: Round) -> str:
        others = self._contact.view().others(self._contact.id).values()
        return next(
            (each.node.folder for each in others if each.node.folder and each.node.round == round.number), ""
        )

    def losses(self, round: Round) -> list[Failure]:
        return losses(self._contact, self._contact.view(), round, self._host)

    def others(self, round: Round) -> list[tuple[int, bool]]:
        others = self._contact.view().others(self._contact.id).values()
        return [(each.node.step, each.node.busy) for each in others if each.node.id in round.ids]

    def skewed_clocks(self) -> list[str]:
        return skewed_clocks(self._contact, self._contact.view(), self._reported_clocks)

    def wait_until_done(self, round: Round, hurry: Callable[[], bool]) -> list[Failure]:
        self.report(state="done", busy=False)
        while not hurry():
            view = self._contact.view()
            if view.age > self._contact.limit:
                break  # cut off; the workers here have finished all the same
            if found := losses(self._contact, view, round, self._host):
                return found
            if all(
                each is None or each.node.state in ("done", "left") for each in self._other_nodes(view, round)
            ):
                break
            time.sleep(POLL_SECONDS)
        return []

    def wait_for_cause(self, round: Round, hurry: Callable[[], bool]) -> list[Failure]:
        found: list[Failure] = []
        deadline = time.monotonic() + self._contact.limit + 2.0
        while time.monotonic() < deadline and not hurry():
            view = self._contact.view()
            found = losses(self._contact, view, round, self._host)
            known = [
                each is not None and each.node.failure is not None for each in self._other_nodes(view, round)
            ]
            if any(not failure.follows for failure in found) or all(known):
                break
            time.sleep(POLL_SECONDS)
        return found

    def leave(self) -> None:
        """Sends the last message."""
        self._contact.leave(LEAVE_SECONDS)

    def _other_nodes(self, view: View, round: Round) -> list[Any]:
        return [view.reply.heard.get(name) for name in round.ids if name != self._contact.id]


def join(
    contact: Contact,
    last: Round | None,
    timeout: float,
    log: Callable[[str], None],
    check: Callable[[], None],
) -> Round:
    """Waits for the next round that this launcher is part of. Raises `NotConnected`, `Ended`, `UserError`."""
    deadline, logged = time.monotonic() + timeout, False
    number = last.number if last is not None else 0
    while True:
        check()
        view, now = contact.view(), time.monotonic()
        if view.fatal is not None:
            raise view.fatal
        if view.reply.refused:
            raise UserError(view.reply.refused, "start the same command on each machine")
        if view.round is not None and view.round.number > number and contact.id in view.round.ids:
            return view.round
        if last is not None:
            _end_if_others_have(contact, view, last)
        reached = view.age <= contact.limit
        if reached and view.reply.over:
            raise NotConnected("the run has ended", "ended")
        if reached and _under_way(contact, view, last):
            deadline = now + timeout
            if view.round is not None and contact.id not in view.round.ids and not logged:
                logged = True
                log(JOINS_LATER)
        if now > deadline:
            raise NotConnected(_connected(contact, view), view.error_code)
        time.sleep(0.05)


def losses(contact: Contact, view: View, round: Round, host: str) -> list[Failure]:
    """What went wrong elsewhere, as far as this launcher can tell."""
    now = time.monotonic()
    if view.age > contact.limit:
        text = f"lost contact with the rendezvous at {contact.rendezvous} for {view.age:.0f} s"
        return [Failure(-1, text, now - view.age, host=host, lost=True)]
    if view.round is not None and view.round.number > round.number and contact.id not in view.round.ids:
        text = "the run continued without this machine after it was silent for a while"
        return [Failure(-1, text, now, host=host, lost=True)]
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


def skewed_clocks(contact: Contact, view: View, reported: set[str]) -> list[str]:
    """Clocks that differ much from this machine's, each reported once."""
    lines = []
    own = view.reply.heard.get(contact.id)
    for name, heard in view.others(contact.id).items():
        ahead = heard.ahead - (own.ahead if own is not None else 0.0)
        if abs(ahead) > BIG_SKEW and name not in reported and heard.fresh:
            reported.add(name)
            direction = "ahead of" if ahead > 0 else "behind"
            lines.append(
                f"the clock of {heard.node.host} is {abs(ahead):.0f} s {direction} this machine's: times in its "
                "messages and files differ by that much; the run does not depend on clocks"
            )
    return lines


def _end_if_others_have(contact: Contact, view: View, last: Round) -> None:
    for name, heard in view.others(contact.id).items():
        failure = heard.node.failure
        if name in last.ids and failure is not None and failure.ends and heard.node.round >= last.number:
            raise Ended(failure)


def _under_way(contact: Contact, view: View, last: Round | None) -> bool:
    """Whether live launchers are busy with a round, or about to wait for the next one."""
    rounds = [round for round in (view.round, last) if round is not None]
    return any(
        is_live(heard, contact.limit) and heard.node.state != "waiting"
        for name, heard in view.others(contact.id).items()
        if any(name in round.ids for round in rounds)
    )


def _connected(contact: Contact, view: View) -> str:
    if view.age > contact.limit or not view.reply.heard:
        return view.error or "no answer"
    live = [each.node.host for each in view.reply.heard.values() if is_live(each, contact.limit)]
    text = f"{len(live)} connected: {', '.join(sorted(live))}"
    if view.reply.strangers:
        text += f"; rejected for a different secret: {', '.join(view.reply.strangers)}"
    return text
