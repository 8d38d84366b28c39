"""Finds ranks that no longer take the same steps: a thread writes this rank's status into the store every second, and
reads the others' when nothing moves.

Promises: ends the process only if a rank that others wait for cannot arrive any more (it has ended, it skipped a
step, or it waits in a different collective). A rank that is only busy (saving, evaluating alone, compiling) is named,
never ended. If the store disappears, a rank that waits is ended too. `find_stall` decides, from the statuses alone.
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

from drumline.core.text import counted
from drumline.guards.finding import Finding, Reports
from drumline.guards.script.peers import Peers
from drumline.guards.script.source_lines import is_user_file, user_lines

_PERIOD = 1.0
_GRACE = 3.0
"""Seconds that the main thread has to stop by itself."""
_WAITING = ("torch/distributed/", "torch/nn/parallel/distributed.py", "torch/autograd/", "drumline/guards/")
"""Code that may wait for other ranks."""
_COMPILING = (
    "torch/_dynamo/convert_frame.py",
    "torch/_dynamo/symbolic_convert.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/codecache.py",
    "torch/_inductor/async_compile.py",
)
_COMPUTING = 0.5
"""The main thread computes if it uses more than this fraction of a core; one that waits for other ranks sleeps."""
_MOST_RUNS = 64


class HangMonitor:
    """This rank's status, and the thread that watches the status of all ranks."""

    def __init__(
        self,
        peers: Peers,
        hang_seconds: float,
        warn: Callable[[Finding], None],
        stops: bool,
    ) -> None:
        self.steps = 0
        self.phase: Literal["step", "between", "finished"] = "between"
        self.backward = False
        self.paused = False
        self.comparing = False
        self.found: Finding | None = None
        self.given_up: Finding | None = None
        """With action="warn": the other ranks cannot arrive any more."""
        self._passes: list[list[int]] = [[1, 0]]
        self._peers, self._seconds, self._stops = peers, hang_seconds, stops
        self._warn = warn
        self._moved = time.monotonic()
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="drumline-guard", daemon=True)
        self.last: dict[int, RankStatus] = {}
        # macOS has no clock of one thread: there, the whole process counts as its main thread.
        clock_of = getattr(time, "pthread_getcpuclockid", lambda thread: time.CLOCK_PROCESS_CPUTIME_ID)
        self._clock = clock_of(self._main)
        self._used = (time.monotonic(), 0.0, 0.0)

    def start(self) -> None:
        """Starts the thread, if there are other ranks and `hang_seconds` is not 0."""
        if self._peers.size > 1 and self._seconds > 0:
            self._peers = self._peers.clone()
            self._thread.start()

    def move(self) -> None:
        """Something happened on this rank."""
        self._moved = time.monotonic()

    def backward_begins(self) -> None:
        """Backward has begun."""
        self.move()
        self.backward = True

    @property
    def passes(self) -> int:
        """Forward passes of the step in progress."""
        return self._passes[-1][1]

    def passed(self) -> None:
        """A forward pass of a step begins."""
        self._passes[-1][1] += 1

    def stepped(self, steps: int) -> None:
        """A step is done. Steps with the same number of forward passes are kept as one entry."""
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
        """The forward passes of each step, as in `RankStatus.passes`."""
        return [list(run) for run in self._passes]

    def explain(self) -> str:
        """After an error on this rank, such as a closed connection: which other rank caused it, if one did."""
        time.sleep(1.5 * _PERIOD)
        try:
            alert, statuses = self._peers.read("alert"), self._statuses()
        except RuntimeError:  # the store ended with the process that held it: use what was read last
            alert, statuses = None, dict(self.last)
        if alert is not None:
            return f"another rank stopped:\n{Finding(**alert)}"
        statuses[self._peers.rank] = RankStatus(self.steps, self.phase, waits=True)
        stall = find_stall(statuses, 0.0)
        return str(stall) if stall is not None and stall.certain else ""

    def _statuses(self) -> dict[int, RankStatus]:
        found = {rank: self._peers.read(f"status/{rank}") for rank in self._peers.ranks}
        return {rank: RankStatus(**status) for rank, status in found.items() if status is not None}

    def _watch(self) -> None:
        try:
            while not self._over.wait(_PERIOD):
                self._post()
                self._check()
            self._post()
        except RuntimeError:
            # The store ended with the process that held it. Gloo raises an error in a rank that waits for that
            # process. NCCL and a waiting guard raise none.
            self._watch_alone()

    def _watch_alone(self) -> None:
        """Without the store, the other ranks are unknown: ends this rank if it waits."""
        while not self._over.wait(_PERIOD):
            idle = time.monotonic() - self._moved
            waits = self._waits(sys._current_frames().get(self._main or 0))
            if self._stops and not self.paused and waits and idle > max(self._seconds, _GRACE):
                where = "; ".join(f"rank {rank} {status}" for rank, status in self.last.items())
                what = "the process that holds the store of the process group has ended, and this rank waits"
                fix = "check the output of the other ranks: one of them stopped first"
                _exit(str(Finding("steps", what, where, f"step {self.steps + 1}", fix)))

    def _post(self) -> None:
        frame = sys._current_frames().get(self._main or 0)
        idle = time.monotonic() - self._moved
        waits, where = False, ""
        self._measure()
        if idle > _PERIOD and frame is not None:
            lines = user_lines(frame)
            waits, where = self._waits(frame), str(lines[0]) if lines else ""
        status = RankStatus(self.steps, self.phase, idle, waits, where, self.history(), self.comparing)
        self._peers.post(f"status/{self._peers.rank}", asdict(status))

    def _measure(self) -> None:
        """Which fraction of a core the main thread has used since the last call."""
        now, used = time.monotonic(), time.clock_gettime(self._clock)
        before, then, _ = self._used
        self._used = (now, used, (used - then) / max(now - before, 1e-3))

    def _waits(self, frame: FrameType | None) -> bool:
        """Whether the main thread may be waiting for other ranks. Once backward has begun, any line that needs its
        result may wait for the exchange of gradients."""
        if not _in_waiting_call(frame) and not (self.phase == "step" and self.backward):
            return False
        if any(_compiles(each) for each in sys._current_frames().values()):
            return False
        # A thread that waits for a GPU polls it; one that waits for gloo or a store sleeps.
        return torch.cuda.is_initialized() or self._used[2] < _COMPUTING

    def _check(self) -> None:
        alert = self._peers.read("alert")
        if alert is not None and self.found is None:
            self.found = Finding(**alert)
            self._end(self.found, None)
        self.last = self._statuses()
        mine = self.last.get(self._peers.rank)
        if self.paused or mine is None or mine.idle < self._seconds:
            return
        stall = find_stall(self.last, self._seconds)
        if stall is None:
            return
        if not stall.certain or not self._stops:
            self._warn(stall)
            self.given_up = stall if stall.certain else None
            return
        self.found = stall
        self._peers.first("alert", vars(stall))
        self._end(stall, sys._current_frames().get(self._main or 0))

    def _end(self, finding: Finding, frame: FrameType | None) -> None:
        """Gives the main thread a moment to stop by itself, which it cannot do inside a collective."""
        stack = "".join(traceback.format_stack(frame)[-8:]) if frame is not None else ""
        # A rank that is only busy stops when it returns to the loop. Only one that waits is ended.
        while not self._over.wait(_GRACE):
            mine = sys._current_frames().get(self._main or 0)
            if frame is None and (
                not self._waits(mine) or time.monotonic() - self._moved < max(self._seconds, _GRACE)
            ):
                continue
            _exit(f"{finding}\n" + (f"stack of rank {self._peers.rank}:\n{stack}" if stack else ""))


def _exit(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _compiles(frame: FrameType | None) -> bool:
    """Whether a thread compiles, which takes minutes, often on one rank alone."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILING):
            return True
        frame = frame.f_back
    return False


def _in_waiting_call(frame: FrameType | None) -> bool:
    """Whether the user's innermost line called something that may wait for other ranks. Frames further out do not
    count: a launcher of the same package may be among them."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if any(part in frame.f_code.co_filename for part in _WAITING):
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class RankStatus:
    """What a rank reports about itself: steps done, whether it is in a step or between two, for how long nothing has
    moved, and whether it may be waiting for other ranks (in a collective, in DDP, in or after backward).

    `passes` holds the forward passes of each step as [first step, number] pairs, the step in progress last.
    `comparing`: the rank waits in the guard, where ranks compare before a step.
    """

    steps: int
    phase: Literal["step", "between", "finished"]
    idle: float = 0.0
    waits: bool = False
    where: str = ""
    passes: Sequence[Sequence[int]] = ()
    comparing: bool = False

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


def find_stall(statuses: Mapping[int, RankStatus], hang_seconds: float) -> Finding | None:
    """Ranks that wait for another one; None while anything may still move. Certain if waiting is hopeless: a rank
    with no more steps has finished, or waits between steps in a different collective."""
    stuck = {rank: one for rank, one in statuses.items() if one.waits and one.idle >= hang_seconds}
    waiting = [rank for rank, one in stuck.items() if one.phase == "step"]
    if not waiting:
        return None
    reached = max(statuses[rank].steps for rank in waiting)
    since = f"{max(statuses[rank].idle for rank in waiting):.0f} s, step {reached + 1}"
    where = "; ".join(f"rank {rank} {one}" for rank, one in statuses.items())
    if len(stuck) == len(statuses):
        crossed = _crossed(statuses)
        if crossed is not None:
            return Finding("steps", crossed[0], where, since, crossed[1], certain=True)
    behind = {rank: one for rank, one in statuses.items() if one.phase != "step" and one.steps <= reached}
    if not behind:
        return None
    lost = [rank for rank, one in behind.items() if one.phase == "finished" or rank in stuck]
    busy = [rank for rank in behind if rank not in lost]
    if busy:
        what = f"rank {busy[0]} keeps the others waiting"
        fix = "nothing to do if it is saving or evaluating; otherwise check that line"
        return Finding("waiting", what, where, since, fix)
    what, fix = skipped_step(statuses) or (
        "ranks take unequal numbers of steps",
        "give every rank the same number of batches: DistributedSampler, drop_last=True, or a number of steps agreed "
        "on before the loop",
    )
    return Finding("steps", what, where, since, fix, certain=True)


def _crossed(statuses: Mapping[int, RankStatus]) -> tuple[str, str] | None:
    """Every rank waits: what happened and what to do if they wait at different points of the loop."""
    skipped = skipped_step(statuses)
    if skipped is not None:
        return skipped
    first = next((rank for rank, one in statuses.items() if one.comparing), None)
    if first is None:
        return None
    steps = statuses[first].steps
    others = [rank for rank, one in statuses.items() if not one.comparing or one.steps != steps]
    if not others:
        return None
    return (
        f"rank {first} is ready for step {steps + 1} and rank {others[0]} waits somewhere else: neither can continue",
        "call the same collectives, in the same order, on every rank",
    )


def skipped_step(statuses: Mapping[int, RankStatus], since: int = 1) -> tuple[str, str] | None:
    """What happened and what to do: the first step, from `since` on, in which a rank made more forward passes than
    another. It skipped the update."""
    for step in sorted({max(first, since) for one in statuses.values() for first, _ in one.passes}):
        counts = {rank: one.passes_in(step) for rank, one in statuses.items()}
        known = {rank: count for rank, count in counts.items() if count}
        if len(known) < 2 or len(set(known.values())) == 1:
            continue
        most = max(known, key=lambda rank: known[rank])
        least = min(known, key=lambda rank: known[rank])
        return (
            f"rank {most} skipped step {step}: {known[most]} forward passes in it, {known[least]} on rank {least}",
            "skip a batch on every rank or on none: all_reduce a flag and continue if any rank set it, or keep the "
            "step and multiply the bad loss by 0",
        )
    return None


def unequal_steps(reports: Reports, agreed: int, certain: bool) -> Finding | None:
    """Ranks that end after different numbers of steps. They agreed after step `agreed`."""
    counts, passes = reports.of("steps"), reports.of("passes")
    number = next((at for at in range(len(counts[0])) if len({each[at] for each in counts}) > 1), None)
    if number is None:
        return None
    statuses = {
        rank: RankStatus(count[0], "finished", passes=each)
        for rank, count, each in zip(reports.ranks, counts, passes, strict=True)
    }
    what, fix = skipped_step(statuses, agreed + 1) or (
        "ranks took unequal numbers of steps",
        "call optimizer.step() equally often on every rank: skip a batch on all ranks or on none",
    )
    where = ", ".join(
        f"rank {rank}: {counted(each[number], 'step')}"
        for rank, each in zip(reports.ranks, counts, strict=True)
    )
    return Finding("steps", what, where, f"after step {agreed}", fix, certain)
