"""Shards that exchange values in the middle of forward and backward (BatchNorm, losses over the batch) run in
lockstep.

Promises: each shard runs as if it were alone, on a thread of its own; one runs at a time, in shard order. When all
have reached the same exchange, the main thread performs it over all processes, and each continues. The result depends
on the shards, never on which process computed them. Without exchanges nothing here runs, and with one shard per
process there are no threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from drumline.parallel.strict.ordered import Fold, owned
from drumline.parallel.world import World

T = TypeVar("T")
Switch = Callable[[int], None]
"""Called with the index of a shard among this process's own, each time before it continues."""


class Lockstep:
    """The shards of a world. Code that builds something that exchanges sets `needed`."""

    def __init__(self, world: World, shards: int) -> None:
        self.world, self.shards = world, shards
        self.owned = owned(shards, world.size)
        self.own = range(*self.owned[world.rank])
        self.counts = [last - first for first, last in self.owned]
        self.needed = False
        self._tasks: list[_Task] = []
        self._running: _Task | None = None

    def __deepcopy__(self, memo: object) -> Lockstep:
        """A copy of a model has the same shards."""
        return self

    def run(self, tasks: Sequence[Callable[[], None]], switch: Switch) -> None:
        """Runs this process's shards, with their exchanges."""
        assert len(tasks) == len(self.own), (len(tasks), self.own)
        if len(tasks) == 1:
            switch(0)
            tasks[0]()
            return
        self._tasks = [_Task(index, work, self.world.device) for index, work in enumerate(tasks)]
        try:
            while self._advance(switch):
                self._exchange()
        finally:
            for task in self._tasks:
                task.abandon()
            self._tasks, self._running = [], None

    def exchange(self, value: T, function: Callable[[list[T]], list[Any]]) -> Any:
        """Called by a shard: waits until all shards of this process have called it, then calls `function` once with
        the values of all, and returns this shard's result. `function` may call collectives: all processes get
        here."""
        if self._running is None:
            return function([value])[0]
        return self._running.wait_for((value, function))

    def all(self, value: Tensor) -> Tensor:
        """The values of all shards in shard order, one row each. Read-only."""

        def gather(values: list[Tensor]) -> list[Tensor]:
            assert len(values) == len(self.own), (len(values), self.own)
            rows = self.world.all_gather_rows(torch.stack(values), self.counts)
            return [rows] * len(values)

        rows: Tensor = self.exchange(value.detach(), gather)
        return rows

    def total(self, value: Tensor) -> Tensor:
        """The sum over all shards, in the tree's order."""
        fold: Fold[Tensor] = Fold(self.shards, lambda left, right, n, m: left + right)
        for shard, row in enumerate(self.all(value)):
            fold.push((shard, shard + 1), row)
        return fold.take()[0][1].clone()

    def _advance(self, switch: Switch) -> bool:
        """Runs every shard up to its next exchange, one after the other; whether there is one."""
        for index, task in enumerate(self._tasks):
            switch(index)
            self._running = task
            task.resume()
            self._running = None
            if task.error is not None:
                raise task.error
        waiting = [task.call is not None for task in self._tasks]
        assert all(waiting) or not any(waiting), "some shards have ended and others wait for them"
        return waiting[0]

    def _exchange(self) -> None:
        calls = [task.call for task in self._tasks]
        function = calls[0][1]  # type: ignore[index]
        results = function([value for value, _ in calls])  # type: ignore[misc]
        for task, result in zip(self._tasks, results, strict=True):
            task.call, task.result = None, result


class _Task(threading.Thread):
    """One shard's forward and backward, on a thread that runs only between `resume` and the next exchange."""

    def __init__(self, index: int, work: Callable[[], None], device: torch.device) -> None:
        super().__init__(name=f"shard {index}", daemon=True)
        self.work, self.device = work, device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.call: tuple[Any, Callable[[list[Any]], list[Any]]] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._abandoned = False

    def run(self) -> None:
        self._go.acquire()
        try:
            if not self._abandoned:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                # In this thread: in autograd's own, one shard's backward would wait for another's forever.
                with (
                    torch.cuda.stream(self.stream) if self.stream is not None else nullcontext(),
                    torch.autograd.set_multithreading_enabled(False),
                ):
                    self.work()
        except _Abandoned:
            self.error = None
        except BaseException as error:
            self.error = error
        self._paused.release()

    def resume(self) -> None:
        """Main thread: returns when this one waits at an exchange or has ended."""
        if not self.is_alive():
            self.start()
        self._go.release()
        self._paused.acquire()

    def wait_for(self, call: tuple[Any, Callable[[list[Any]], list[Any]]]) -> Any:
        """This thread: the result of the exchange."""
        self.call = call
        self._paused.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned
        result, self.result = self.result, None
        return result

    def abandon(self) -> None:
        """Main thread: ends this one wherever it waits."""
        if self.is_alive():
            self._abandoned = True
            self._go.release()
            self.join()


class _Abandoned(BaseException):
    """Another shard has failed."""
