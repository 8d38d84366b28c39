"""One short run: an ordinary `drumline train` or `distill` in its own process and folder, and its speed.

Promises: it is the user's command, with the same recipe. Its first steps do not count, and it lasts until its mean
speed is known to within 2 % or its time is up. It leaves no process and no file, not even after Ctrl-C or SIGTERM. A
run that fails raises `TrialFailed` with the run's own message.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from drumline.core.environment import TRIAL
from drumline.core.errors import KILLED, UserError
from drumline.core.text import counted, duration
from drumline.diagnosis.evidence import Evidence, Interval, merged, read_evidence

SECONDS = 5.0
"""How long a trial measures by default."""
MOST = 3.0
"""A trial whose speed varies measures for up to this many times as long."""
PRECISE = 0.02
"""The standard error of the mean speed, as a fraction of it, at which a trial ends."""
FEWEST = 3
"""Intervals that a mean and its error need."""
WARM_UP = 0.2
"""How long the first steps do not count, as a fraction of the time to measure."""
RISING = 1.15
"""How much slower the first half of the steps may be than the second."""
START_S = 7.0
"""About how long a run takes until its first step and at its end. Compiling takes longer."""
STEPS = 10_000_000
"""A number that no trial reaches."""
SETTINGS = (
    "run.name=trial",
    "checkpoint.resume=never",
    f"train.steps={STEPS}",
    "train.patience=0",
    "launch.restarts=0",
    "guard.action=warn",
)
"""What every trial sets."""
NO_PAUSES = ("train.eval_every=0", "checkpoint.every_epochs=0", "checkpoint.every_steps=0")
"""What a trial sets of which evaluations and saves are not the subject."""
_POLL_S = 0.1
_STOP_S = 30.0
"""How long a run may take to stop before it is killed."""


@dataclass(frozen=True)
class Command:
    """A command line that trains: `train` or `distill`, and its arguments."""

    job: str
    arguments: tuple[str, ...]

    def having(self, *settings: str) -> Command:
        """With more settings, which replace those of the same fields."""
        fields = tuple(f"{text.partition('=')[0]}=" for text in settings)
        kept = (text for text in self.arguments if not text.removeprefix("--").startswith(fields))
        return replace(self, arguments=(*kept, *settings))

    def __str__(self) -> str:
        return shlex.join(("drumline", self.job, *self.arguments))


class TrialFailed(UserError):
    """A short run that did not get as far as to be measured."""


def run_trial(
    command: Command, seconds: float = SECONDS, within: Callable[[Interval], bool] = lambda interval: True
) -> Evidence:
    """Runs a command for about `seconds` of steps, at most up to an interval that is not `within`. The first interval
    of the evidence is the warm-up, which `Figures` leaves out; there may be no others if the run was too short."""
    with tempfile.TemporaryDirectory(prefix="drumline-why-", ignore_cleanup_errors=True) as folder:
        words = [*command.arguments, *SETTINGS, f"run.dir={folder}"]
        with (Path(folder) / "stderr").open("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drumline", command.job, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, TRIAL: str(os.getpid())},
            )
            try:
                return _watch(process, command, Path(folder) / "trial", seconds, within, errors)
            finally:
                _end(process)


def steady(
    intervals: Sequence[Interval], seconds: float, within: Callable[[Interval], bool] = lambda interval: True
) -> list[Interval]:
    """The warm-up as one interval, and those that count: up to the first one that is not `within`. The first interval
    of a run is always warm-up: it has the first step, and the batches that were made before it."""
    warm, late, warmed = list[Interval](), list[Interval](), 0.0
    for each in intervals:
        if not within(each):
            break
        if warm and warmed >= WARM_UP * seconds:
            late.append(each)
        else:
            warm.append(each)
            warmed += each.seconds
    if not warm:
        return []
    counting = whole_cycles(late)
    rising = still_rising(counting)
    return [merged([*warm, *counting[:rising]]), *counting[rising:]]


def whole_cycles(counting: Sequence[Interval]) -> Sequence[Interval]:
    """Those from one evaluation or save to another, if there are two: as many pauses as there are in all the time."""
    pauses = [number for number, each in enumerate(counting) if max(each.walls) > max(each.get("step_ms"))]
    return counting[pauses[0] + 1 : pauses[-1] + 1] if len(pauses) > 1 else counting


def still_rising(counting: Sequence[Interval]) -> int:
    """How many of the first intervals are warm-up too: the first half, as long as it is slower than the second. Many
    worker processes take a while to start."""
    half = len(counting) // 2
    if half < FEWEST:
        return 0
    first, second = (
        statistics.fmean(max(each.walls) for each in part) for part in (counting[:half], counting[half:])
    )
    return half + still_rising(counting[half:]) if first > RISING * second else 0


def enough(counting: Sequence[Interval], seconds: float) -> bool:
    """Whether these intervals give a speed."""
    measured = sum(each.seconds for each in counting)
    if measured >= MOST * seconds:
        return True
    return measured >= seconds and error_of(counting) <= PRECISE


def error_of(counting: Sequence[Interval]) -> float:
    """The standard error of the mean step, as a fraction of it. Infinite if there are too few intervals."""
    if len(counting) < FEWEST:
        return math.inf
    walls = [max(each.walls) for each in counting]
    return statistics.stdev(walls) / math.sqrt(len(walls)) / statistics.fmean(walls)


def announced(runs: int, seconds: float) -> str:
    """How long short runs take, to be said before them."""
    about = duration(runs * (START_S + 1.5 * seconds))
    return f"{counted(runs, 'short run')} of about {seconds:g} s, and the time to start: about {about}"


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that its trials end and their folders are removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    process: subprocess.Popen[bytes],
    command: Command,
    run: Path,
    seconds: float,
    within: Callable[[Interval], bool],
    errors: IO[str],
) -> Evidence:
    """Waits until the run has measured enough. Raises if it ends before."""
    while True:
        ended = process.poll() is not None
        found = read_evidence(run)
        intervals = steady(found.intervals, seconds, within)
        past = bool(found.intervals) and not within(found.intervals[-1])
        if past or enough(intervals[1:], seconds):
            return replace(found, intervals=intervals)
        if ended:
            errors.seek(0)
            raise failure(process.returncode, errors.read(), command)
        time.sleep(_POLL_S)


def failure(code: int, said: str, command: Command) -> TrialFailed:
    """Why a run ended, from its exit code and what it wrote to stderr."""
    if code in (-signal.SIGKILL, KILLED):
        return TrialFailed(
            "the run was killed, as the system does when memory runs out", "use a smaller data.batch or model"
        )
    _, ours, text = said.rpartition("drumline: ")
    if ours:
        what, _, fix = text.strip().partition("\n  fix: ")
        return TrialFailed(what, fix)
    last = said.strip().rpartition("\n")[2] or f"exit code {code}"
    return TrialFailed(f"the run failed: {last}", f"see it fail: {command}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stops a run as a user would, and kills it if it does not stop, or if the user is impatient."""
    try:
        if process.poll() is None:
            process.terminate()
        process.wait(_STOP_S)
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid)
            for each in [*family.children(recursive=True), family]:
                with suppress(psutil.NoSuchProcess):  # one may end by itself
                    each.kill()
            process.wait()
