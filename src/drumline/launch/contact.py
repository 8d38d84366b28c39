"""A launcher's contact with those of the other machines, kept by a thread of its own.

Promises: the launcher's main loop never waits for the network or a shared disk: it leaves what it has to say, and
reads what was heard last, in memory. How long nothing has been heard is part of that. Nobody waits for the thread to
end.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

from drumline.core.errors import UserError
from drumline.launch.hub import AwakeClock, Reply, Unreachable
from drumline.launch.nodes import Heard, Member, Round

SILENT_SECONDS = 5.0
"""Without a sign of life, after which a launcher counts as gone, and the contact with the hub as lost."""

FILE_SILENT_SECONDS = 25.0
"""The same at a shared folder, which may show what others have written late."""

PACE = 0.25
FILE_PACE = 1.0
"""Seconds between two exchanges."""


class Transport(Protocol):
    """How messages travel: a hub here, a hub elsewhere, a shared folder."""

    def exchange(self, member: Member) -> Reply: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class View:
    """What is known now. `age`: how long ago the last answer came. `error`: why the last attempt failed, if it did;
    `fatal`: why no attempt will succeed."""

    reply: Reply
    age: float
    error: str
    fatal: UserError | None

    @property
    def round(self) -> Round | None:
        return self.reply.round

    def others(self, me: str) -> dict[str, Heard]:
        """What was heard from the other launchers."""
        return {name: each for name, each in self.reply.heard.items() if name != me}


class Contact:
    """Says and hears. `place` names the meeting place, `limit` is the silence that counts as a loss."""

    def __init__(
        self, transport: Transport, member: Member, *, place: str, limit: float, pace: float
    ) -> None:
        self.place, self.limit, self._pace = place, limit, pace
        self._transport, self._member = transport, member
        self._clock, self._lock = AwakeClock(), threading.Lock()
        self._news = threading.Event()
        self._reply, self._error = Reply(None, {}), ""
        self._fatal: UserError | None = None
        self._heard_at = self._clock.now()
        self._said, self._delivered = 0, -1
        self._left = threading.Event()
        threading.Thread(target=self._run, name="contact", daemon=True).start()

    @property
    def id(self) -> str:
        return self._member.id

    @property
    def member(self) -> Member:
        """What is being said."""
        return self._member

    def say(self, **changes: Any) -> None:
        """Changes what is said from now on."""
        with self._lock:
            self._member = replace(self._member, **changes)
            self._said += 1
        self._news.set()

    def view(self) -> View:
        """What is known now. To be called more than once a second, so that time in which this process was stopped
        does not count as silence."""
        with self._lock:
            return View(self._reply, self._clock.now() - self._heard_at, self._error, self._fatal)

    def delivered(self) -> bool:
        """Whether all that was said has been heard."""
        with self._lock:
            return self._delivered >= self._said

    def leave(self, seconds: float) -> None:
        """Takes leave, within so many seconds where there is contact."""
        view = self.view()
        lost = view.age > self.limit or view.fatal is not None
        self.say(state="left")
        self._left.set()
        deadline = time.monotonic() + (0.0 if lost else seconds)
        while not self.delivered() and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        self._transport.close()

    def _run(self) -> None:
        over = False
        while not over:
            self._news.wait(self._pace)
            self._news.clear()
            over = self._left.is_set()
            with self._lock:
                member, said = self._member, self._said
            try:
                reply = self._transport.exchange(replace(member, clock=time.time()))
                if over:
                    self._transport.leave()
            except Unreachable as error:
                with self._lock:
                    self._error = str(error)
                over = False
                time.sleep(self._pace)
            except UserError as error:
                with self._lock:
                    self._fatal = error
                return
            else:
                with self._lock:
                    self._reply, self._error, self._delivered = reply, "", said
                    self._heard_at = self._clock.now()
