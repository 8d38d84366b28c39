"""How a launcher joins the next round, and what it makes of what the others say. Looks at memory only.

Promises: a wait for other machines ends after `timeout` seconds, or says why it may take longer; a launcher that is
gone, one that lost contact itself, and one that the run has left behind are each one plain sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from drumline.core.errors import UserError
from drumline.launch.contact import Contact, View
from drumline.launch.failure import Failure
from drumline.launch.nodes import Round, is_live

BIG_SKEW = 10.0
"""Seconds by which clocks differ that people should know of."""

OVER = "the run has ended"
UNDER_WAY = "the run is under way without this machine: it joins at the next restart"


class NotMet(Exception):
    """The machines did not come together."""


class Ended(Exception):
    """Another machine has ended the run, for this reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def join(
    contact: Contact,
    last: Round | None,
    timeout: float,
    announce: Callable[[str], None],
    stop_if_asked: Callable[[], None],
) -> Round:
    """Waits for the next round that this launcher is part of. Raises `NotMet`, `Ended`, `UserError`."""
    deadline, announced = time.monotonic() + timeout, False
    number = last.number if last is not None else 0
    while True:
        stop_if_asked()
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
            raise NotMet(OVER)
        if reached and _under_way(contact, view, last):
            deadline = now + timeout
            if view.round is not None and contact.id not in view.round.ids and not announced:
                announced = True
                announce(UNDER_WAY)
        if now > deadline:
            raise NotMet(_who_came(contact, view))
        time.sleep(0.05)


def losses(contact: Contact, view: View, round: Round, host: str) -> list[Failure]:
    """What went wrong elsewhere, as far as this launcher can tell: nothing is heard any more, another machine is gone
    or has failed, or the run goes on without this one."""
    now = time.monotonic()
    if view.age > contact.limit:
        since = f"for {view.age:.0f} s"
        words = f"lost contact with the rendezvous at {contact.place} {since}"
        return [Failure(-1, words, now - view.age, host=host, lost=True)]
    if view.round is not None and view.round.number > round.number and contact.id not in view.round.ids:
        words = "was left behind: the run goes on without it, after it was silent for a while"
        return [Failure(-1, words, now, host=host, lost=True)]
    found = []
    for place, name in enumerate(round.ids):
        if name == contact.id:
            continue
        heard = view.reply.heard.get(name)
        if heard is None:
            found.append(Failure(-1, "is gone", now, host=f"machine {place}", lost=True))
            continue
        member, where = heard.member, f"machine {place}, {heard.member.host},"
        if member.failure is not None and (member.round == round.number or member.state == "left"):
            found.append(member.failure)
        elif heard.silent > contact.limit and member.state != "left":
            words = f"is gone: no sign of its launcher for {heard.silent:.0f} s"
            found.append(Failure(-1, words, now - heard.silent, host=where, lost=True))
        elif member.round > round.number:
            found.append(Failure(-1, "has begun another start", now, host=where, lost=True))
    return found


def all_done(contact: Contact, view: View, round: Round) -> bool:
    """Whether the workers of every other machine have finished."""
    heard = [view.reply.heard.get(name) for name in round.ids if name != contact.id]
    return all(each is None or each.member.state in ("done", "left") for each in heard)


def all_failed(contact: Contact, view: View, round: Round) -> bool:
    """Whether every other machine has said why it stopped."""
    heard = [view.reply.heard.get(name) for name in round.ids if name != contact.id]
    return all(each is not None and each.member.failure is not None for each in heard)


def clock_notes(contact: Contact, view: View, noted: set[str]) -> list[str]:
    """Clocks that differ much from this machine's, each once."""
    notes = []
    own = view.reply.heard.get(contact.id)
    for name, heard in view.others(contact.id).items():
        ahead = heard.ahead - (own.ahead if own is not None else 0.0)
        if abs(ahead) > BIG_SKEW and name not in noted and heard.fresh:
            noted.add(name)
            way = "ahead of" if ahead > 0 else "behind"
            notes.append(
                f"the clock of {heard.member.host} is {abs(ahead):.0f} s {way} this machine's: times in its "
                "messages and files differ by that much; the run does not depend on clocks"
            )
    return notes


def _end_if_others_have(contact: Contact, view: View, last: Round) -> None:
    for name, heard in view.others(contact.id).items():
        failure = heard.member.failure
        if name in last.ids and failure is not None and failure.ends and heard.member.round >= last.number:
            raise Ended(failure)


def _under_way(contact: Contact, view: View, last: Round | None) -> bool:
    """Whether launchers that live are busy with a round, or about to wait for the next one."""
    rounds = [round for round in (view.round, last) if round is not None]
    return any(
        is_live(heard, contact.limit) and heard.member.state != "waiting"
        for name, heard in view.others(contact.id).items()
        if any(name in round.ids for round in rounds)
    )


def _who_came(contact: Contact, view: View) -> str:
    if view.age > contact.limit or not view.reply.heard:
        return view.error or "no answer"
    live = [each.member.host for each in view.reply.heard.values() if is_live(each, contact.limit)]
    came = f"{len(live)} came: {', '.join(sorted(live))}"
    if view.reply.strangers:
        came += f"; turned away for a different secret: {', '.join(view.reply.strangers)}"
    return came
