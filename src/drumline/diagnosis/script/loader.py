"""What a user's loader does: its settings, whether batches are ready when the loop asks, and what its workers use.

Promises: reads the counters of torch's own iterators and takes nothing from them. A torch whose iterators look
different, or any other loader, gives fewer facts, never an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter, thread_time
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset

_DEEP = 4
"""Levels of lists and dictionaries in which a batch's first tensor is looked for."""


class LoaderState:
    """Sums over the batches so far. Written by the loop's thread, read by any."""

    def __init__(self) -> None:
        self.taking_s = 0.0
        """Time until the loop had a batch that its workers had ready when it asked."""
        self.start_s = 0.0
        """Time from the beginning of a pass to its first batch, if workers are started for each pass."""
        self.cpu_s = 0.0
        """CPU time of the loop's thread while it waited for a batch."""
        self.workers: tuple[psutil.Process, ...] = ()
        """The processes of the present pass."""
        self._opened_at: float | None = None
        self._cpu_from = self._asked_at = 0.0
        self._ready = False
        self._queue: Any = None

    def opens(self) -> None:
        """A pass begins."""
        self._opened_at = perf_counter()

    def opened(self, iterator: Any) -> None:
        """Its workers, if it has any, are started."""
        processes = getattr(iterator, "_workers", ())
        self._queue = getattr(iterator, "_data_queue", None)
        if not processes or getattr(iterator, "_persistent_workers", False):
            self._opened_at = None
        known = tuple(_process(each.pid) for each in processes)
        self.workers = tuple(each for each in known if each is not None)

    def asks(self) -> None:
        """The loop asks for a batch."""
        self._ready = False
        if self._queue is not None:
            try:
                self._ready = self._queue.qsize() > 0
            except NotImplementedError:  # macOS
                self._queue = None
            self._asked_at = perf_counter()
        else:
            self._cpu_from = thread_time()

    def receives(self) -> None:
        """It has one."""
        if self._queue is None:
            self.cpu_s += thread_time() - self._cpu_from
        elif self._ready:
            self.taking_s += perf_counter() - self._asked_at
        if self._opened_at is not None:
            self.start_s += perf_counter() - self._opened_at
            self._opened_at = None

    def sums(self) -> dict[str, float]:
        """What an interval's values are made of, by difference."""
        return {"start_s": self.start_s, "data_cpu_s": self.cpu_s, "taking_s": self.taking_s}


def worker_cpu_s(workers: tuple[psutil.Process, ...]) -> float:
    """The CPU time of worker processes; of one that has ended, none."""
    total = 0.0
    for worker in workers:
        try:
            times = worker.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def loader_facts(loader: Any) -> dict[str, Any]:
    """The settings that matter for speed; empty for a loader that is not torch's."""
    if not isinstance(loader, DataLoader):
        return {}
    return {
        "workers": loader.num_workers,
        "pool": "processes",
        "persistent": bool(loader.persistent_workers),
        "prefetch": loader.prefetch_factor or 0,
        "stream": isinstance(loader.dataset, IterableDataset),
        "batch_size": loader.batch_size or 0,
    }


def first_tensor(batch: Any, deep: int = _DEEP) -> torch.Tensor | None:
    """The first tensor of a batch, which counts its samples."""
    if isinstance(batch, torch.Tensor):
        return batch
    if deep and isinstance(batch, Mapping):
        batch = list(batch.values())
    if deep and isinstance(batch, list | tuple):
        for each in batch:
            found = first_tensor(each, deep - 1)
            if found is not None:
                return found
    return None


def is_pinned(batch: Any) -> bool:
    """Whether the copy of a batch to a GPU may overlap with computing; also if the batch is on the GPU already."""
    tensor = first_tensor(batch)
    return tensor is None or tensor.is_cuda or tensor.is_pinned()


def samples_in(batch: Any) -> int:
    """How many samples a batch has; 1 if that cannot be seen."""
    if type(batch) in (list, tuple) and batch and type(batch[0]) is torch.Tensor and batch[0].dim():
        return batch[0].size(0)  # nearly always, and ten times as fast
    tensor = first_tensor(batch)
    if tensor is not None:
        return len(tensor) if tensor.dim() else 1
    return len(batch) if isinstance(batch, list | tuple) else 1


def _process(pid: int | None) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None
