"""What the launchers of one run, one per machine, tell each other.

Promises: when a machine fails, the others know within a second, stop, and show the same cause; a launcher that falls
silent counts as lost; the machine that hosts the shared store leaves last. What is read from the store is JSON of a
known shape, or it is not believed. On one machine there is nobody to tell.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed import DistError, Store

from drumline.launch.failure import Failure, from_json, plain, to_json

T = TypeVar("T")

POSTED = "drumline/posted"
CAUSE_SECONDS = 3.0
"""How long a machine that only lost contact waits for another one to say what really happened."""

LEAVE_SECONDS = 10.0
"""How long the machine with the store waits for the others to stop their workers and read it."""

SILENT_PACES = 5
"""Signs of life of another launcher that may fail to come."""


@dataclass(frozen=True)
class State:
    """What a launcher says of its workers: the fewest steps that one of them has taken, whether one does something
    that may take long, and the name of the run folder, where it is known."""

    step: int = 0
    busy: bool = False
    folder: str = ""


class NoticeBoard:
    """Notices in the store that the rendezvous gave the launchers, for one start of the workers. Each launcher gives
    a sign of life every `pace` seconds."""

    def __init__(self, store: Store, machine: int, machines: int, *, pace: float = 1.0) -> None:
        self._store, self._machine, self._machines = store, machine, machines
        self._posted = False
        self._pace, self._signs, self._told_at, self._told = pace, 0, 0.0, State()
        self._looked_at = time.monotonic()
        others = [other for other in range(machines) if other != machine]
        self._heard = dict.fromkeys(others, (0, time.monotonic(), State()))

    def agree(self, restarts: int, folder: str, launch_id: str) -> tuple[int, str, str]:
        """Before the workers start: how often they have been restarted, the name of the run folder, and the id of the
        launch, as far as any machine knows. A machine that has just joined knows none of them."""
        if self._machines == 1:
            return restarts, folder, launch_id
        self._store.set(self._key("knows"), json.dumps([restarts, folder, launch_id]))
        known = [
            _read_knowledge(self._store.get(self._key("knows", machine)).decode())
            for machine in range(self._machines)
        ]
        # Of equals, max takes the first, so all take the same machine's id.
        most, _, agreed_id = max(known, key=lambda machine: machine[0])
        return most, next((name for _, name, _ in known if name), ""), agreed_id

    def post(self, failure: Failure) -> None:
        """Tells the other machines why this one stops. Only the first notice counts."""
        if self._machines > 1 and not self._posted:
            self._posted = True
            self._quietly(lambda: self._store.set(self._key("failed"), to_json(failure)))
            self._quietly(lambda: self._store.set(POSTED, ""))

    def failures(self) -> list[Failure]:
        """What the other machines have posted. Raises `DistError` when the store is out of reach."""
        if self._machines == 1 or not self._store.check([POSTED]):
            return []
        found = []
        for machine in self._heard:
            key = self._key("failed", machine)
            if self._store.check([key]):
                found.append(_read_failure(self._store.get(key).decode(errors="replace"), machine))
        return found

    def live(self, state: State) -> list[Failure]:
        """Gives a sign of life when it is time to, and looks for the others'; those that fell silent are failures.
        Raises `DistError` when the store is out of reach."""
        now = time.monotonic()
        late, self._looked_at = now - self._looked_at, now
        if self._machines == 1:
            return []
        if now - self._told_at >= self._pace or state.folder != self._told.folder:
            self._told_at, self._told, self._signs = now, state, self._signs + 1
            self._store.set(
                self._key("alive"), json.dumps([self._signs, state.step, state.busy, state.folder])
            )
        lost = []
        for machine, (signs, since, _) in self._heard.items():
            key = self._key("alive", machine)
            if self._store.check([key]):
                heard, told = _read_sign(self._store.get(key).decode(errors="replace"))
                # Whoever stood still himself has no right to call others silent.
                if heard != signs or late > 3 * self._pace:
                    self._heard[machine] = (heard, now, told)
                    continue
            silent = now - since
            if silent > SILENT_PACES * self._pace:
                words = f"is gone: no sign of its launcher for {silent:.0f} s"
                lost.append(Failure(-1, words, time.time(), host=f"machine {machine}"))
        return lost

    @property
    def elsewhere(self) -> list[State]:
        """What the other launchers have said of their workers last."""
        return [state for _, _, state in self._heard.values()]

    def wait_for_cause(self) -> list[Failure]:
        """What the others have posted, giving them a moment to post a failure that does not follow from another; an
        unreachable store has nothing to say."""
        found: list[Failure] = []
        deadline = time.monotonic() + CAUSE_SECONDS
        while self._machines > 1 and time.monotonic() < deadline:
            answer = self._quietly(self.failures)
            found = answer or []
            if answer is None or any(not failure.follows for failure in found):
                break
            time.sleep(0.1)
        return found

    def wait_for_all(self, give_up: Callable[[], bool]) -> list[Failure]:
        """Waits until every machine's workers have finished, or one has failed: gives those failures."""
        keys = [self._key("done", machine) for machine in range(self._machines)]
        self._quietly(lambda: self._store.set(self._key("done"), ""))
        while self._machines > 1 and not give_up():
            failures = self._quietly(lambda: self.failures() or self.live(State()))
            if failures:
                return failures
            # A store out of reach has lost its machine; ours has done its part all the same.
            if failures is None or self._quietly(lambda: self._store.check(keys)) is not False:
                break
            time.sleep(0.1)
        return []

    def leave(self, hosts_store: bool) -> bool:
        """The last thing a machine does with the store. The one that hosts it lets the others go first, so
        that they never find it gone. Gives whether every machine has left."""
        left = self._quietly(lambda: self._store.add("drumline/left", 1))
        deadline = time.monotonic() + LEAVE_SECONDS
        while hosts_store and left is not None and left < self._machines and time.monotonic() < deadline:
            time.sleep(0.1)
            left = self._quietly(lambda: self._store.add("drumline/left", 0))
        return left == self._machines

    def _key(self, what: str, machine: int | None = None) -> str:
        return f"drumline/{what}/{self._machine if machine is None else machine}"

    @staticmethod
    def _quietly(ask: Callable[[], T]) -> T | None:
        """The store's answer, or None when it is out of reach: its machine has left."""
        try:
            return ask()
        except DistError:
            return None


def _read_failure(text: str, machine: int) -> Failure:
    try:
        return from_json(text)
    except (ValueError, RecursionError):
        return Failure(
            -1, "has left a notice that is none", time.time(), host=f"machine {machine}", ends=True
        )


def _read_knowledge(text: str) -> tuple[int, str, str]:
    match _parsed(text):
        case [int(restarts), str(folder), str(launch_id)] if _is_name(folder) and _is_id(launch_id):
            return restarts, folder, launch_id
    return 0, "", ""


def _is_id(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None


def _read_sign(text: str) -> tuple[int, State]:
    match _parsed(text):
        case [int(signs), int(step), bool(busy), str(folder)] if _is_name(folder):
            return signs, State(step, busy, folder)
    return 0, State()


def _is_name(folder: str) -> bool:
    """Whether this is a plain folder name, or empty: it comes from another machine and becomes part of a path."""
    return "/" not in folder and folder not in (".", "..") and plain(folder) == folder


def _parsed(text: str) -> object:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found
