"""A launcher's contact with the launchers of the other machines, kept by a thread of its own.

Promises: the launcher's main loop never waits for the network or a shared disk: it sets what to report and reads the
latest replies in memory, including how long ago the last one came. Nothing waits for the thread to end.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

from drumline.core.errors import UserError
from drumline.launch.hub import AwakeClock, Reply, Unreachable
from drumline.launch.nodes import Heard, Node, Round

SILENT_SECONDS = 5.0
"""Without a message, after which a launcher counts as lost, and the contact with the hub too."""

FILE_SILENT_SECONDS = 25.0
"""The same for a shared folder, where files of other machines may appear late."""

PACE = 0.25
FILE_PACE = 1.0
"""Seconds between two exchanges."""


class Transport(Protocol):
    """How messages travel: a hub here, a hub on another machine, or a shared folder."""

    def exchange(self, node: Node) -> Reply: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class View:
    """What is known now. `age`: how long ago the last reply came. `error`: why the last attempt failed, if it did,
    with its code; `fatal`: why no attempt will succeed."""

    reply: Reply
    age: float
    error: str = ""
    error_code: str = ""
    fatal: UserError | None = None

    @property
    def round(self) -> Round | None:
        return self.reply.round

    def others(self, id: str) -> dict[str, Heard]:
        """What the launchers other than `id` reported."""
        return {name: each for name, each in self.reply.heard.items() if name != id}


class Contact:
    """Sends reports and receives those of others. `limit` is the silence that counts as a loss."""

    def __init__(
        self, transport: Transport, node: Node, *, rendezvous: str, limit: float, pace: float
    ) -> None:
        self.rendezvous, self.limit, self._pace = rendezvous, limit, pace
        self._transport, self._node = transport, node
        self._clock, self._lock = AwakeClock(), threading.Lock()
        self._changed = threading.Event()
        self._reply, self._error, self._error_code = Reply(None, {}), "", ""
        self._fatal: UserError | None = None
        self._heard_at = self._clock.now()
        self._reported, self._delivered = 0, -1
        self._left = threading.Event()
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
            age = self._clock.now() - self._heard_at
            return View(self._reply, age, self._error, self._error_code, self._fatal)

    def delivered(self) -> bool:
        """Whether the latest report has been received."""
        with self._lock:
            return self._delivered >= self._reported

    def leave(self, seconds: float) -> None:
        """Reports that this launcher leaves; waits up to `seconds` for delivery if there is contact."""
        view = self.view()
        lost = view.age > self.limit or view.fatal is not None or not view.reply.heard
        self.report(state="left")
        self._left.set()
        deadline = time.monotonic() + (0.0 if lost else seconds)
        while not self.delivered() and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        self._transport.close()

    def _run(self) -> None:
        over = False
        while not over:
            self._changed.wait(self._pace)
            self._changed.clear()
            over = self._left.is_set()
            with self._lock:
                node, reported = self._node, self._reported
            try:
                reply = self._transport.exchange(replace(node, clock=time.time()))
                if over:
                    self._transport.leave()
            except Unreachable as error:
                with self._lock:
                    self._error, self._error_code = str(error), error.code
                over = False
                time.sleep(self._pace)
            except UserError as error:
                with self._lock:
                    self._fatal = error
                return
            else:
                with self._lock:
                    self._reply, self._error, self._error_code, self._delivered = reply, "", "", reported
                    self._heard_at = self._clock.now()
