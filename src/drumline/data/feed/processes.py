"""Batches made by processes: for formats that Python decodes, since Python threads would wait for each other.

Promises: the batches of `make_batch`, in the order of the requests, for any number of processes. Each opens the
dataset itself, so no data travels when a process starts. A `UserError` in a process is raised here; a process that
is killed is a `LostError`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import lru_cache, partial

import torch

from drumline.core.errors import LostError
from drumline.core.processes import WorkerKilled, map_in_processes
from drumline.data.feed.batch import HostBatch, make_batch
from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import Transform
from drumline.data.sources import Dataset, DatasetSpec, open_same


def process_batches(
    spec: DatasetSpec, digest: str, transform: Transform, seed: int, requests: Iterable[Request], workers: int
) -> Generator[HostBatch, None, None]:
    """The batches of the requests, in their order. `digest` is that of the dataset as this process has opened it."""
    make = partial(_make, spec, digest, transform, seed)
    try:
        yield from map_in_processes(make, requests, workers, preload=__name__)
    except WorkerKilled as error:
        raise LostError(
            "a loader process was killed",
            "if memory ran out (see `dmesg`), use fewer data.workers or a smaller data.batch; then continue with "
            "--checkpoint.resume auto",
        ) from error


def _make(spec: DatasetSpec, digest: str, transform: Transform, seed: int, request: Request) -> HostBatch:
    return make_batch(_opened(spec, digest), transform, seed, request)


@lru_cache(maxsize=1)
def _opened(spec: DatasetSpec, digest: str) -> Dataset:
    """The dataset in this process, opened for its first batch. The other processes use the other cores."""
    torch.set_num_threads(1)
    return open_same(spec, digest)
