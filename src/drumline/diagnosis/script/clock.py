"""`clock` and `Clock`: where the time of a user's own loop goes, and why it is slow.

    clock = drumline.clock(loader, model, optimizer)

Promises: the loop stays as it is, takes the same steps with the same bits, and never waits: on a GPU, events are read
later. A step costs some tens of microseconds. Ranks exchange their times through the store of the process group, not
by collectives. A loop that is interrupted or fails is reported up to that point. `close` removes every hook.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from shutil import get_terminal_size
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drumline.core.errors import UserError
from drumline.core.machine import usable_cores
from drumline.core.text import message
from drumline.diagnosis.evidence import Evidence
from drumline.diagnosis.script import ranks, verdict
from drumline.diagnosis.script.history import History
from drumline.diagnosis.script.lines import LineSampler
from drumline.diagnosis.script.loader import loader_facts, worker_cpu_s
from drumline.diagnosis.script.parts import LoopAccount, LoopParts
from drumline.diagnosis.slowdown import Slowdown
from drumline.guards.checks.setup import home
from drumline.guards.script import taps
from drumline.guards.script.forwards import wrapper_of
from drumline.guards.script.parameters import capturing, with_hooks
from drumline.guards.script.peers import Peers, peers_of
from drumline.observe.clock import BatchEvents, StepClock
from drumline.observe.usage import Usage

_SAMPLE_S = 0.05
_USAGE_S = (1.0, 10.0)
"""Seconds from the first look at what the process uses to the second, and between later ones. Each costs some
milliseconds."""
_POST_S = 5.0
_CLOSING_S = 5.0
"""How long the first rank waits for the last times of the others."""
_WIDE = 100


@dataclass(frozen=True)
class Verdict:
    """Where the time of a loop went, and why it is slow."""

    text: str
    """As it is printed."""
    slowdowns: list[Slowdown]
    """The reasons, the largest predicted saving first; empty if nothing stands out."""
    evidence: Evidence
    """What the reasons were read from: the times of every rank."""

    def __str__(self) -> str:
        return self.text


def clock(
    loader: Iterable[Any] | Sequence[DataLoader[Any]],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    every: float = 0.0,
    report: bool = True,
) -> Clock:
    """Times a training loop until `close` or the end of the process, then prints why it is slow.

    Call it on every rank, in the thread of the loop, after wrapping the model and creating the optimizer.

    Args:
        loader: The loader that the loop trains on, or a list of them. The loop over a DataLoader stays as it is.
            Iterate anything else as `for batch in clock`.
        model: The model as the loop calls it, usually wrapped in DDP.
        optimizer: The optimizer, or a list of them; the first one counts the steps.
        every: Seconds between progress lines; 0: none.
        report: Print the verdict at the end.
    """
    optimizers = [with_hooks(each, "clock") for each in _several(optimizer, Optimizer)]
    if not optimizers or not isinstance(model, nn.Module):
        raise UserError(
            f"clock: {len(optimizers)} optimizers and a {type(model).__name__} as model",
            "drumline.clock(loader, model, optimizer)",
        )
    return Clock(_several(loader, DataLoader), model, optimizers, every, report)


def _several(given: Any, kind: type) -> list[Any]:
    """The members of a list of this kind; anything else is one thing."""
    several = isinstance(given, list | tuple) and all(isinstance(each, kind) for each in given)
    return list(given) if several else [given]


class Clock:
    """The times of one loop. Created by `clock`."""

    def __init__(
        self,
        loaders: list[Any],
        model: nn.Module,
        optimizers: list[Optimizer],
        every: float,
        report: bool,
    ) -> None:
        self._loaders, self._optimizers = loaders, optimizers
        self._every, self._report = every, report
        self._parts = LoopAccount()
        device = home(model.parameters()) or torch.device("cpu")
        self._gpu = device.type == "cuda"
        self._clock = StepClock(device, parts=self._parts)
        self._history = History(perf_counter)
        wrapper = wrapper_of(model)
        self._peers = peers_of(wrapper.process_group if wrapper is not None else None)
        self._loop = LoopParts(
            loaders, model, optimizers, self._clock, self._parts, self._begin, self._stepped
        )
        if self._gpu:
            self._mark_batches(device)
        self._lines = LineSampler(self._parts)
        self._messages: list[Mapping[str, Any] | None] = [None] * self._peers.size
        self._failed = False
        self._look_at = math.inf
        """When to look at what the process uses; never before the loop trains."""
        self._process, self._native = os.getpid(), threading.get_native_id()
        taps.listen(self._loop)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._peers.clone(),), daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)
        # A child forked by multiprocessing exits without running atexit.
        self._finalizer = Finalize(None, self._at_exit, exitpriority=100)
        self._open = True

    def __iter__(self) -> Iterator[Any]:
        """The batches of the loader, timed whatever it is. A DataLoader may also be iterated itself."""
        loader = self._loaders[0]
        if isinstance(loader, DataLoader) or not self._open:
            return iter(loader)
        return self._batches(loader)

    def __len__(self) -> int:
        return len(self._loaders[0])

    def verdict(self) -> Verdict:
        """Why the loop is slow so far. Other ranks reported their times a few seconds ago; after `close`, the first
        rank has the final ones."""
        if self._open:
            self._look()
            if self._peers.size == 1:  # otherwise only steps after which the intervals of all ranks end
                self._end_stretch()
            self._messages = [self._peers.read(f"latest/{rank}") for rank in self._peers.ranks]
        return self._verdict()

    def close(self) -> None:
        """Stops timing, removes all hooks, and prints the verdict on the first rank."""
        if not self._open or os.getpid() != self._process:
            return
        self._open = False
        atexit.unregister(self._at_exit)
        self._finalizer.cancel()
        taps.unlisten(self._loop)
        self._loop.close()
        self._ending.set()
        self._thread.join(_CLOSING_S)
        self._end_stretch()
        if self._loop.counts.steps:
            self._finish()

    def __enter__(self) -> Clock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = error is not None
        self.close()

    def _finish(self) -> None:
        first, seconds = self._peers.ranks[0], 1.0 if self._failed else _CLOSING_S
        try:
            if self._peers.rank != first:
                self._peers.post(f"closing/{self._peers.rank}", self._message())
                return
            last = self._peers.gather("closing", self._message(), lambda: None, seconds=seconds)
            late = [self._peers.read(f"latest/{rank}") for rank in self._peers.ranks]
            self._messages = [one or other for one, other in zip(last, late, strict=True)]
        except RuntimeError:  # the store ended with the process that held it
            self._messages = [None] * self._peers.size
        if self._report and self._peers.rank == first:
            print(message(self._last_words()), file=sys.stderr, flush=True)

    def _last_words(self) -> str:
        """The verdict. A mistake of ours in it must not end the script, which is done."""
        try:
            return self._verdict().text
        except Exception as error:
            return f"drumline.clock: no verdict, because of {type(error).__name__}: {error}"

    def _at_exit(self) -> None:
        self._failed = self._failed or getattr(sys, "last_value", None) is not None
        self.close()

    def _verdict(self) -> Verdict:
        """From the messages of all ranks; this rank's own is taken now."""
        at = self._peers.ranks.index(self._peers.rank)
        messages = [*self._messages[:at], self._message(), *self._messages[at + 1 :]]
        evidence = ranks.evidence_of(messages)
        width = min(get_terminal_size().columns, _WIDE) if sys.stderr.isatty() else _WIDE
        missing = [rank for rank, each in zip(self._peers.ranks, messages, strict=True) if each is None]
        slowdowns = verdict.diagnose_script(evidence)
        lines = verdict.lines(evidence, slowdowns, width, missing)
        return Verdict("\n".join(lines), slowdowns, evidence)

    def _message(self) -> dict[str, Any]:
        """What this rank reports."""
        return {
            "intervals": self._history.rows(),
            "lines": self._lines.most(ranks.MOST_LINES),
            "facts": {
                **loader_facts(self._loaders[0]),
                "gpu": self._gpu,
                "cores": usable_cores(),
                "machine_cores": os.cpu_count() or 0,
                "local_ranks": int(os.environ.get("LOCAL_WORLD_SIZE", self._peers.size)),
                "torch_threads": torch.get_num_threads(),
                "arrays": True,  # so that a loader's processes, which often wait, are not taken for threads
                "fused": all(each.defaults.get("fused", True) is True for each in self._optimizers),
                "evaluated": self._loop.counts.evaluated,
                **self._loop.facts,
            },
        }

    # Called by the loop.

    def _begin(self) -> None:
        self._history.begin(self._sums())
        self._look_at = 0.0

    def _stepped(self) -> None:
        if self._history.is_due(self._loop.counts.steps):
            self._end_stretch()

    def _end_stretch(self) -> None:
        counts = self._loop.counts
        if counts.steps:
            self._history.end(counts.steps, counts.epoch, self._clock.take(), self._sums())

    def _sums(self) -> dict[str, float]:
        return {"samples": float(self._loop.counts.samples), **self._loop.queue.sums()}

    def _mark_batches(self, device: torch.device) -> None:
        """On a GPU, records when the loop asks for a batch, has it on the host, and calls the model with it."""
        marks: dict[str, torch.cuda.Event] = {}

        def mark(name: str) -> torch.cuda.Event | None:
            if not capturing():
                marks[name] = torch.cuda.Event(enable_timing=True)
                marks[name].record(torch.cuda.current_stream(device))
            return marks.get(name)

        def events() -> BatchEvents:
            return BatchEvents(marks.get("arrived"), mark("ready"), marks.get("asked"))

        self._loop.asked, self._loop.arrived = lambda: mark("asked"), lambda: mark("arrived")
        self._clock.batch_events = events

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        self._loop.queue.opens()
        iterator = iter(loader)
        self._loop.queue.opened(iterator)
        while True:
            self._loop.waits()
            try:
                batch = next(iterator)
            except StopIteration:
                self._loop.pass_ends()
                return
            self._loop.received(batch)
            yield batch

    # In the background.

    def _look(self) -> None:
        self._history.used(Usage.now(self._native), worker_cpu_s(self._loop.queue.workers))

    def _watch(self, peers: Peers) -> None:
        posted = printed = perf_counter()
        looks = 0
        while not self._ending.wait(self._lines.pause(_SAMPLE_S)):
            self._lines.sample()
            now = perf_counter()
            try:
                if now >= self._look_at:
                    self._look_at = now + _USAGE_S[min(looks, 1)]
                    looks += 1
                    self._look()
                if now - posted >= _POST_S and peers.size > 1:
                    posted = now
                    peers.post(f"latest/{peers.rank}", self._message())
                if self._every and now - printed >= self._every and peers.rank == peers.ranks[0]:
                    printed = now
                    print(verdict.progress_line(self._message()), file=sys.stderr, flush=True)
            except (
                RuntimeError,
                OSError,
            ):  # the store ended with the process that held it, or stderr is closed
                continue
        self._look()
