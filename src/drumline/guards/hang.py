"""Who is where, when ranks no longer take the same steps: a thread beside the training that writes this rank's step
into the store every second and reads the others' when nothing moves.

Promises: ends the process only when a rank that others wait for cannot come any more (it has ended, it skipped a
step, or it waits in a different collective); a rank that is merely busy (saving, evaluating alone, compiling) is
named, never ended. If the store goes away, a rank that waits ends too. `judge` decides, and is pure.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Literal

import torch

from drumline.guards.finding import Finding
from drumline.guards.meeting import Meeting
from drumline.guards.place import is_users, user_places

_PERIOD = 1.0
_GRACE = 3.0
_WAITING = ("torch/distributed/", "torch/nn/parallel/distributed.py", "torch/autograd/", "drumline/guards/")
_COMPILING = (
    "torch/_dynamo/convert_frame.py",
    "torch/_dynamo/symbolic_convert.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/codecache.py",
    "torch/_inductor/async_compile.py",
)
_COMPUTING = 0.5
"""Share of a core that the main thread uses when it computes; one that waits for other ranks sleeps."""
_MOST_RUNS = 64


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself: steps done, whether it is in a step or between two, how long nothing has moved,
    and whether it may be waiting for other ranks (in a collective, in DDP, in or after backward).

    `passes` holds the forward passes of each step as [first step, number] pairs, the step in progress last. `meets`:
    the rank waits in the guard, where ranks compare before a step.
    """

    steps: int
    phase: Literal["step", "between", "finished"]
    idle: float = 0.0
    waits: bool = False
    where: str = ""
    passes: Sequence[Sequence[int]] = ()
    meets: bool = False

    def passes_in(self, step: int) -> int | None:
        """Forward passes of a step; None for one that is too long ago or has not begun."""
        if step > self.steps + 1:
            return None
        return next((number for first, number in reversed(self.passes) if first <= step), None)

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
    since = f"{max(beats[rank].idle for rank in waiting):.0f} s, step {reached + 1}"
    if len(stuck) == len(beats):
        crossed = _crossed(beats)
        if crossed is not None:
            what, fix = crossed
            where = "; ".join(f"rank {rank} {beat}" for rank, beat in beats.items())
            return Verdict(Finding("steps", what, where, since, fix), True)
    behind = {rank: b for rank, b in beats.items() if b.phase != "step" and b.steps <= reached}
    lost = [rank for rank, beat in behind.items() if beat.phase == "finished" or rank in stuck]
    busy = [rank for rank in behind if rank not in lost]
    if not behind:
        return None
    told = "; ".join(f"rank {rank} {beat}" for rank, beat in beats.items())
    hopeless = bool(lost) and not busy
    if hopeless:
        what, fix = skipped_step(beats) or (
            "ranks take unequal numbers of steps",
            "give every rank as many batches: DistributedSampler, drop_last=True, or a count of steps agreed on "
            "before the loop",
        )
    else:
        what = f"rank {busy[0]} keeps the others waiting"
        fix = "nothing, if it is saving or evaluating; else look at that line"
    return Verdict(Finding("steps" if hopeless else "waiting", what, told, since, fix), hopeless)


def _crossed(beats: Mapping[int, Beat]) -> tuple[str, str] | None:
    """Every rank waits: what happened and what to do, where they wait at different points of the loop."""
    skipped = skipped_step(beats)
    if skipped is not None:
        return skipped
    meeting = [rank for rank, beat in beats.items() if beat.meets]
    if not meeting:
        return None
    first = meeting[0]
    others = [rank for rank, beat in beats.items() if not beat.meets or beat.steps != beats[first].steps]
    if not others:
        return None
    return (
        f"rank {first} is ready for step {beats[first].steps + 1} and rank {others[0]} waits somewhere else: "
        "neither can go on",
        "call the same collectives, in the same order, on every rank",
    )


def skipped_step(beats: Mapping[int, Beat], since: int = 1) -> tuple[str, str] | None:
    """The first step, from `since` on, in which a rank made more forward passes than another: it skipped the
    update."""
    steps = sorted({max(first, since) for beat in beats.values() for first, _ in beat.passes})
    for step in steps:
        counts = {rank: beat.passes_in(step) for rank, beat in beats.items()}
        known = {rank: count for rank, count in counts.items() if count}
        if len(known) < 2 or len(set(known.values())) == 1:
            continue
        most = max(known, key=lambda rank: known[rank])
        least = min(known, key=lambda rank: known[rank])
        return (
            f"rank {most} skipped step {step}: {known[most]} forward passes in it, {known[least]} on rank {least}",
            "leave a batch out on every rank or on none: all_reduce a flag and continue where any rank set it, or "
            "keep the step and multiply the bad loss by 0",
        )
    return None


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
        self.meets = False
        self.found: Finding | None = None
        self.given_up: Finding | None = None
        """With action="warn": the others cannot come any more."""
        self._passes: list[list[int]] = [[1, 0]]
        self._meeting, self._seconds, self._stops = meeting, hang_seconds, stops
        self._warn = warn
        self._moved = time.monotonic()
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="drumline-guard", daemon=True)
        self._warned = False
        self.last: dict[int, Beat] = {}
        # macOS has no clock of one thread: there, the whole process counts as its main thread.
        clock_of = getattr(time, "pthread_getcpuclockid", lambda thread: time.CLOCK_PROCESS_CPUTIME_ID)
        self._clock = clock_of(self._main)
        self._used = (time.monotonic(), 0.0, 0.0)

    def start(self) -> None:
        """Begins to watch, where there is somebody to watch and it was asked for."""
        if self._meeting.size > 1 and self._seconds > 0:
            self._meeting = self._meeting.another()
            self._thread.start()

    def move(self) -> None:
        """Something happened on this rank."""
        self._moved = time.monotonic()

    @property
    def passes(self) -> int:
        """Forward passes of the step in progress."""
        return self._passes[-1][1]

    def passed(self) -> None:
        """A forward pass of a step begins."""
        self._passes[-1][1] += 1

    def stepped(self, steps: int) -> None:
        """A step is done: a run of steps with as many forward passes goes on, or a new one begins."""
        runs = self._passes
        if len(runs) > 1 and runs[-1][1] == runs[-2][1]:
            runs.pop()
        self.steps, self.phase = steps, "between"
        runs.append([steps + 1, 0])
        del runs[:-_MOST_RUNS]

    def finish(self) -> None:
        """This rank takes no more steps."""
        if self.phase == "finished":
            return
        self.phase = "finished"
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _PERIOD)

    def history(self) -> list[list[int]]:
        """The forward passes of each step, as in `Beat.passes`."""
        return [list(run) for run in self._passes]

    def beats(self) -> dict[int, Beat]:
        """All ranks' newest words."""
        found = {}
        for rank in self._meeting.ranks:
            told = self._meeting.look(f"beat/{rank}")
            if told is not None:
                found[rank] = Beat(**told)
        return found

    def explain(self) -> str:
        """After an error on this rank, such as a closed connection: which other rank's doing it was, if it was."""
        time.sleep(1.5 * _PERIOD)
        try:
            told, beats = self._meeting.look("alert"), self.beats()
        except RuntimeError:  # the store went with the process that kept it; what was last read must do
            told, beats = None, dict(self.last)
        if told is not None:
            return f"another rank stopped:\n{Finding(**told)}"
        beats[self._meeting.rank] = Beat(self.steps, self.phase, waits=True)
        verdict = judge(beats, 0.0)
        return str(verdict.finding) if verdict is not None and verdict.hopeless else ""

    def _watch(self) -> None:
        try:
            while not self._over.wait(_PERIOD):
                self._say()
                self._listen()
            self._say()
        except RuntimeError:
            # The store is gone with the process that kept it. Gloo raises an error in whoever waits for that
            # process; NCCL and a waiting guard do not.
            self._wait_alone()

    def _wait_alone(self) -> None:
        """No rank can be heard any more: ends this one when it waits."""
        while not self._over.wait(_PERIOD):
            idle = time.monotonic() - self._moved
            waits = self._waits(sys._current_frames().get(self._main or 0))
            if self._stops and not self.paused and waits and idle > max(self._seconds, _GRACE):
                where = "; ".join(f"rank {rank} {beat}" for rank, beat in self.last.items())
                what = "the process that keeps the store of the process group has ended, and this rank waits"
                fix = "look at the output of the other ranks: one of them stopped first"
                print(
                    Finding("steps", what, where, f"step {self.steps + 1}", fix), file=sys.stderr, flush=True
                )
                sys.stdout.flush()
                os._exit(1)

    def _say(self) -> None:
        frame = sys._current_frames().get(self._main or 0)
        idle = time.monotonic() - self._moved
        waits, where = False, ""
        self._measure()
        if idle > _PERIOD and frame is not None:
            places = user_places(frame)
            waits, where = self._waits(frame), str(places[0]) if places else ""
        beat = Beat(self.steps, self.phase, idle, waits, where, self.history(), self.meets)
        self._meeting.post(f"beat/{self._meeting.rank}", asdict(beat))

    def _measure(self) -> None:
        """How much of a core the main thread has used since the last time."""
        now, used = time.monotonic(), time.clock_gettime(self._clock)
        before, then, _ = self._used
        self._used = (now, used, (used - then) / max(now - before, 1e-3))

    def _waits(self, frame: FrameType | None) -> bool:
        """Once backward has begun, any line that needs its result may wait for the exchange."""
        if not _in_waiting_call(frame) and not (self.phase == "step" and self.backward):
            return False
        if any(_compiles(each) for each in sys._current_frames().values()):
            return False
        # A thread that waits for a GPU is busy asking; one that waits for gloo or a store sleeps.
        return torch.cuda.is_initialized() or self._used[2] < _COMPUTING

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
            self.given_up = verdict.finding if verdict.hopeless else None
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


def _compiles(frame: FrameType | None) -> bool:
    """Whether a thread compiles: that takes minutes, often on one rank alone."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILING):
            return True
        frame = frame.f_back
    return False


def _in_waiting_call(frame: FrameType | None) -> bool:
    """Whether what the user's innermost line called may wait for other ranks. Frames further out do not count: a
    launcher of the same package may be among them."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if any(part in frame.f_code.co_filename for part in _WAITING):
            return True
        frame = frame.f_back
    return False
