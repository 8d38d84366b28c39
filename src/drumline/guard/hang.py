"""Who is where, when ranks no longer take the same steps: a thread beside the training that writes this rank's step
into the store every second and reads the others' when nothing moves.

Promises: ends the process only when a rank that others wait for cannot come any more (it has ended, or waits in
another collective); a rank that is merely busy (saving, evaluating alone, compiling) is named, never ended.
`judge` decides, and is pure.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Literal

from drumline.guard.finding import Finding
from drumline.guard.meeting import Meeting
from drumline.guard.place import is_users, user_places

_PERIOD = 1.0
_GRACE = 3.0
_WAITING = ("torch/distributed/", "torch/nn/parallel/distributed.py", "torch/autograd/", "drumline/guard/")


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself: steps done, whether it is in a step or between two, how long nothing has moved,
    and whether it may be waiting for other ranks (in a collective, in DDP, in or after backward)."""

    steps: int
    phase: Literal["step", "between", "finished"]
    idle: float = 0.0
    waits: bool = False
    where: str = ""

    def __str__(self) -> str:
        if self.phase == "finished":
            return f"finished after step {self.steps}"
        doing = f"waits in step {self.steps + 1}" if self.phase == "step" else f"is past step {self.steps}"
        return doing + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Verdict:
    """A finding, and whether the waiting is hopeless."""

    finding: Finding
    hopeless: bool


def judge(beats: Mapping[int, Beat], hang_seconds: float) -> Verdict | None:
    """None while anything may still move. A rank that waits in a step waits in vain for a rank with no more steps
    than itself that is finished, or waits between steps in another collective."""
    stuck = {rank: beat for rank, beat in beats.items() if beat.waits and beat.idle >= hang_seconds}
    waiting = [rank for rank, beat in stuck.items() if beat.phase == "step"]
    if not waiting:
        return None
    reached = max(beats[rank].steps for rank in waiting)
    behind = {rank: b for rank, b in beats.items() if b.phase != "step" and b.steps <= reached}
    lost = [rank for rank, beat in behind.items() if beat.phase == "finished" or rank in stuck]
    busy = [rank for rank in behind if rank not in lost]
    if not behind:
        return None
    told = "; ".join(f"rank {rank} {beat}" for rank, beat in beats.items())
    hopeless = bool(lost) and not busy
    if hopeless:
        what = "ranks take unequal numbers of steps"
        fix = (
            "give every rank as many batches: DistributedSampler, drop_last=True, or a count of steps agreed on "
            "before the loop"
        )
    else:
        what = f"rank {busy[0]} keeps the others waiting"
        fix = "nothing, if it is saving or evaluating; else look at that line"
    since = f"{max(beats[rank].idle for rank in waiting):.0f} s, step {reached + 1}"
    return Verdict(Finding("steps" if hopeless else "waiting", what, told, since, fix), hopeless)


class Pulse:
    """This rank's beat, and the thread that watches all of them."""

    def __init__(
        self,
        meeting: Meeting,
        hang_seconds: float,
        warn: Callable[[Finding], None],
        stops: bool,
    ) -> None:
        self.steps = 0
        self.phase: Literal["step", "between", "finished"] = "between"
        self.backward = False
        self.paused = False
        self.found: Finding | None = None
        self._meeting, self._seconds, self._stops = meeting, hang_seconds, stops
        self._warn = warn
        self._moved = time.monotonic()
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="drumline-guard", daemon=True)
        self._warned = False
        self.last: dict[int, Beat] = {}

    def start(self) -> None:
        """Begins to watch, where there is somebody to watch and it was asked for."""
        if self._meeting.size > 1 and self._seconds > 0:
            self._meeting = self._meeting.another()
            self._thread.start()

    def move(self) -> None:
        """Something happened on this rank."""
        self._moved = time.monotonic()

    def finish(self) -> None:
        """This rank takes no more steps."""
        if self.phase == "finished":
            return
        self.phase = "finished"
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _PERIOD)

    def beats(self) -> dict[int, Beat]:
        """All ranks' newest words."""
        found = {}
        for rank in self._meeting.ranks:
            told = self._meeting.look(f"beat/{rank}")
            if told is not None:
                found[rank] = Beat(**told)
        return found

    def _watch(self) -> None:
        try:
            while not self._over.wait(_PERIOD):
                self._say()
                self._listen()
            self._say()
        except RuntimeError:
            # The store is gone with the process that kept it: it has ended, and torch tells whoever waits for it.
            return

    def _say(self) -> None:
        frame = sys._current_frames().get(self._main or 0)
        idle = time.monotonic() - self._moved
        beat = Beat(self.steps, self.phase, idle)
        if idle > _PERIOD and frame is not None:
            places = user_places(frame)
            waits = self._waits(frame)
            beat = Beat(self.steps, self.phase, idle, waits, str(places[0]) if places else "")
        self._meeting.post(f"beat/{self._meeting.rank}", asdict(beat))

    def _waits(self, frame: FrameType | None) -> bool:
        """Once backward has begun, any line that needs its result may wait for the exchange."""
        return _in_waiting_call(frame) or (self.phase == "step" and self.backward)

    def _listen(self) -> None:
        told = self._meeting.look("alert")
        if told is not None and self.found is None:
            self.found = Finding(**told)
            self._end(self.found, None)
        self.last = self.beats()
        mine = self.last.get(self._meeting.rank)
        if self.paused or mine is None or mine.idle < self._seconds:
            return
        verdict = judge(self.last, self._seconds)
        if verdict is None:
            return
        if not verdict.hopeless or not self._stops:
            self._warn(verdict.finding)
            return
        self.found = verdict.finding
        self._meeting.first("alert", vars(verdict.finding))
        self._end(verdict.finding, sys._current_frames().get(self._main or 0))

    def _end(self, finding: Finding, frame: FrameType | None) -> None:
        """Gives the main thread a moment to stop by itself; it cannot while it sits in a collective."""
        stack = "".join(traceback.format_stack(frame)[-8:]) if frame is not None else ""
        # A rank that is merely busy notices the finding when it comes back; only one that waits is ended.
        while not self._over.wait(_GRACE):
            mine = sys._current_frames().get(self._main or 0)
            if frame is None and (
                not self._waits(mine) or time.monotonic() - self._moved < max(self._seconds, _GRACE)
            ):
                continue
            text = f"{finding}\n"
            if stack:
                text += f"stack of rank {self._meeting.rank}:\n{stack}"
            print(text, file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)


def _in_waiting_call(frame: FrameType | None) -> bool:
    """Whether what the user's innermost line called may wait for other ranks. Frames further out do not count: a
    launcher of the same package may be among them."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if any(part in frame.f_code.co_filename for part in _WAITING):
            return True
        frame = frame.f_back
    return False
