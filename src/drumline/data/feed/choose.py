"""Chooses how to decode: by threads or processes, on the CPU or the GPU. Measures on the user's own files.

Promises: the choice changes the speed, never a pixel of a sound file. It is explained, with the measured figures.
Nothing is measured without image files, or if the recipe leaves no choice. A setting that cannot work on this machine
is rejected with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import torch

from drumline import native
from drumline.core.errors import UserError
from drumline.data.feed.batch import BadSamples, make_batch
from drumline.data.feed.loader import READY, LoaderWorkers, batches
from drumline.data.feed.sampler import Request, epoch_order
from drumline.data.feed.threads import MADE_AHEAD, READ_AHEAD
from drumline.data.feed.transform import Transform
from drumline.data.image.augment import Augmentation
from drumline.data.sources import ArrayDataset, Dataset, DatasetSpec, EncodedDataset

MEASURE_S = 0.4
TRIAL_BATCH = 64
GPU_HELPS = 0.1
"""A GPU that decodes less than this fraction of what the CPU decodes is not worth the memory."""
PROCESS_GAIN = 2.0
"""Processes must promise this many times what threads make: sixteen of them made half of sixteen times what one makes
alone."""


def choose_workers(
    spec: DatasetSpec,
    dataset: Dataset,
    transform: Transform,
    seed: int,
    device: torch.device,
    *,
    count: int,
    pool: Literal["auto", "threads", "processes"],
    decode: Literal["auto", "cpu", "gpu"],
) -> tuple[LoaderWorkers, str]:
    """The workers for this dataset on this machine, and the reason. `count` is how many there may be."""
    if isinstance(dataset, ArrayDataset):
        if transform.own and pool == "processes" and count:
            return LoaderWorkers(
                "processes", count
            ), f"data.transform runs in {LoaderWorkers('processes', count)}"
        return LoaderWorkers("threads", 0), ""
    _check_possible(pool, decode, device, count)
    if count == 0:
        return LoaderWorkers("threads", 0), ""
    if not native.decodes_jpeg():
        return (
            LoaderWorkers("processes", count),
            f"decoding by {LoaderWorkers('processes', count)}: native part {native.describe()}",
        )
    if decode == "gpu":
        return (
            LoaderWorkers("threads", count, decode="gpu"),
            "decoding on the GPU where that is bit-equal, as asked",
        )

    # Augmentation runs on the device in either case.
    transform = replace(transform, augmentation=Augmentation())

    def rate(workers: LoaderWorkers) -> float:
        with closing(
            batches(
                spec,
                dataset,
                transform,
                seed,
                _trial(dataset),
                workers,
                device,
                BadSamples("trial", len(dataset), 1),
            )
        ) as feed:
            return _rate(lambda: len(next(feed).labels), ahead=READ_AHEAD + MADE_AHEAD + READY)

    if transform.own and device.type == "cuda":
        decode, on_cpu_why = "cpu", "; JPEGs on the CPU, because data.transform runs there"
    else:
        on_cpu_why = ""
    workers, figures = LoaderWorkers("threads", count), ""
    if pool == "processes":
        workers = LoaderWorkers("processes", count)
    elif pool == "auto":
        workers, figures = _threads_or_processes(dataset, transform, seed, workers, rate(workers))
    if (
        decode == "auto"
        and device.type == "cuda"
        and workers.kind == "threads"
        and not gpu_unavailable(device)
    ):
        # Measure the CPU again: the files are in the page cache by now, as they will be for the GPU.
        on_cpu, on_gpu = rate(workers), rate(replace(workers, decode="gpu"))
        figures = f"CPU {on_cpu:,.0f} img/s, GPU {on_gpu:,.0f} img/s alone"
        if on_gpu > GPU_HELPS * on_cpu:
            return (
                replace(workers, decode="both"),
                f"decoding by {workers}, and on the GPU what the step would wait for: {figures}",
            )
        return workers, f"decoding by {workers}: {figures}"
    return workers, f"decoding by {workers}{on_cpu_why}" + (f": {figures}" if figures else "")


def gpu_unavailable(device: torch.device) -> str:
    """Why JPEGs cannot be decoded on the device; empty if they can."""
    if device.type != "cuda":
        return "there is no GPU in this run"
    if not native.decodes_jpeg():
        return f"the native part is {native.describe()}"
    from drumline.data.gpu import nvjpeg

    return nvjpeg.unavailable(device)


def _check_possible(pool: str, decode: str, device: torch.device, count: int) -> None:
    if pool == "threads" and not native.decodes_jpeg():
        raise UserError(
            f"data.pool = threads needs the native part, which is {native.describe()}",
            "use auto or processes, or install a C compiler and libjpeg-turbo's headers and install drumline again",
        )
    if decode != "gpu":
        return
    if count == 0:
        raise UserError("data.decode = gpu needs workers, but data.workers = 0", "use data.workers auto")
    if pool == "processes":
        raise UserError("data.decode = gpu needs threads, but data.pool = processes", "use data.pool auto")
    if reason := gpu_unavailable(device):
        raise UserError(f"data.decode = gpu is not possible: {reason}", "use auto or cpu")


def _threads_or_processes(
    dataset: EncodedDataset, transform: Transform, seed: int, threads: LoaderWorkers, by_threads: float
) -> tuple[LoaderWorkers, str]:
    """Threads, unless Python has so much to decode (formats other than JPEG) that they would wait for each other."""
    requests = _trial(dataset)
    alone = _rate(lambda: len(make_batch(dataset, transform, seed, next(requests)).batch.labels))
    processes = LoaderWorkers("processes", threads.count)
    most = alone * threads.count
    if most > PROCESS_GAIN * by_threads:
        return processes, f"{most:,.0f} img/s at best ({threads}: {by_threads:,.0f})"
    return threads, f"{by_threads:,.0f} img/s ({processes}: {most:,.0f} at best)"


def _trial(dataset: Dataset) -> Iterator[Request]:
    """Small batches of the dataset, repeated without end."""
    batch = min(TRIAL_BATCH, len(dataset))
    order = epoch_order(0, 0, len(dataset))
    while True:
        for first in range(0, len(dataset) - batch + 1, batch):
            yield Request(0, order[first : first + batch])


def _rate(make: Callable[[], Any], ahead: int = 0) -> float:
    """Images per second, without the first batch, which includes the start, and the batches that were made during
    it."""
    for _ in range(1 + ahead):
        make()
    begin, made = time.perf_counter(), 0
    while True:
        made += make()
        took = time.perf_counter() - begin
        if took >= MEASURE_S:
            return made / took
