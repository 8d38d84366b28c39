"""Shards that must hear of each other in the middle of their forward and backward: computed in step.

Promises: each shard runs as if it were alone, on one thread of its own, and only one of them runs at a time, in the
order of the shards; where all have come to the same meeting, the main thread exchanges what they brought, over all
processes, and each goes on. What a meeting gives depends on the shards, never on which process computed them.
Without meetings nothing here runs, and with one shard per process there are no threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from drumline.parallel.strict.tree import Fold, owned
from drumline.parallel.world import World

T = TypeVar("T")
Switch = Callable[[int], None]
"""Called with the place of a shard among this process's own, each time before it runs on."""


class Together:
    """The shards of a world. Whoever builds something that meets says so in `met`."""

    def __init__(self, world: World, shards: int) -> None:
        self.world, self.shards = world, shards
        self.owned = owned(shards, world.size)
        self.own = range(*self.owned[world.rank])
        self.counts = [last - first for first, last in self.owned]
        self.met = False
        self._tasks: list[_Task] = []
        self._running: _Task | None = None

    def __deepcopy__(self, memo: object) -> Together:
        """A copy of a model meets the same shards."""
        return self

    def run(self, tasks: Sequence[Callable[[], None]], switch: Switch) -> None:
        """Runs this process's shards, with meetings."""
        assert len(tasks) == len(self.own), (len(tasks), self.own)
        if len(tasks) == 1:
            switch(0)
            tasks[0]()
            return
        self._tasks = [_Task(place, work, self.world.device) for place, work in enumerate(tasks)]
        try:
            while self._advance(switch):
                self._meet()
        finally:
            for task in self._tasks:
                task.abandon()
            self._tasks, self._running = [], None

    def meeting(self, brought: T, exchange: Callable[[list[T]], list[Any]]) -> Any:
        """Called by a shard: waits until all shards of this process have come here; then `exchange` is called once
        with what each brought and gives what each takes away. It may call collectives: all processes come."""
        if self._running is None:
            return exchange([brought])[0]
        return self._running.wait_for((brought, exchange))

    def all(self, value: Tensor) -> Tensor:
        """The values of all shards in their order, a row for each. Not to be written."""

        def exchange(values: list[Tensor]) -> list[Tensor]:
            assert len(values) == len(self.own), (len(values), self.own)
            rows = self.world.all_gather_rows(torch.stack(values), self.counts)
            return [rows] * len(values)

        rows: Tensor = self.meeting(value.detach(), exchange)
        return rows

    def total(self, value: Tensor) -> Tensor:
        """The sum over all shards, in the tree's order."""
        fold: Fold[Tensor] = Fold(self.shards, lambda left, right, n, m: left + right)
        for shard, row in enumerate(self.all(value)):
            fold.push((shard, shard + 1), row)
        return fold.take()[0][1].clone()

    def _advance(self, switch: Switch) -> bool:
        """Lets every shard run up to its next meeting, one after the other; whether there is one."""
        for place, task in enumerate(self._tasks):
            switch(place)
            self._running = task
            task.go_on()
            self._running = None
            if task.error is not None:
                raise task.error
        waiting = [task.brought is not None for task in self._tasks]
        assert all(waiting) or not any(waiting), "some shards have ended and others wait for them"
        return waiting[0]

    def _meet(self) -> None:
        brought = [task.brought for task in self._tasks]
        exchange = brought[0][1]  # type: ignore[index]
        taken = exchange([each[0] for each in brought])  # type: ignore[index]
        for task, result in zip(self._tasks, taken, strict=True):
            task.brought, task.result = None, result


class _Task(threading.Thread):
    """One shard's forward and backward, on a thread that runs only between `go_on` and the next meeting."""

    def __init__(self, place: int, work: Callable[[], None], device: torch.device) -> None:
        super().__init__(name=f"shard {place}", daemon=True)
        self.work, self.device = work, device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.brought: tuple[Any, Callable[[list[Any]], list[Any]]] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._abandoned = False

    def run(self) -> None:
        self._go.acquire()
        try:
            if not self._abandoned:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                # In this thread: autograd's own would make one shard's backward wait for another's, for ever.
                with (
                    torch.cuda.stream(self.stream) if self.stream is not None else nullcontext(),
                    torch.autograd.set_multithreading_enabled(False),
                ):
                    self.work()
        except _Abandoned:
            self.error = None
        except BaseException as error:
            self.error = error
        self._back.release()

    def go_on(self) -> None:
        """Main thread: returns when this one waits at a meeting or has ended."""
        if not self.is_alive():
            self.start()
        self._go.release()
        self._back.acquire()

    def wait_for(self, brought: tuple[Any, Callable[[list[Any]], list[Any]]]) -> Any:
        """This thread: what the meeting gives."""
        self.brought = brought
        self._back.release()
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
