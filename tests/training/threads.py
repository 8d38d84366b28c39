"""Ranks as threads of one process, for what they say to each other; no tensors, no sockets."""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import torch


class _World:
    """What `consistency` needs of a World. Values travel as JSON, as between machines."""

    device, backend = torch.device("cpu"), "threads"

    def __init__(self, rank: int, size: int, said: list[Any], barrier: Barrier) -> None:
        self.rank, self.size, self.said, self.barrier = rank, size, said, barrier

    def all_gather_object(self, value: Any) -> list[Any]:
        self.said[self.rank] = json.dumps(value)
        self.barrier.wait(30)
        heard = [json.loads(each) for each in self.said]
        self.barrier.wait(30)
        return heard

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_object(value)[0]

    def all_gather_floats(self, values: list[float]) -> list[Any]:
        return self.all_gather_object(values)


def on_ranks(size: int, job: Callable[[Any], Any]) -> list[Any]:
    """What `job(world)` gives on each rank, or the exception that it raises."""
    said, found = [None] * size, list[Any]([None] * size)
    barrier = Barrier(size)

    def run(rank: int) -> None:
        try:
            found[rank] = job(_World(rank, size, said, barrier))
        except Exception as error:
            found[rank] = error

    threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found
