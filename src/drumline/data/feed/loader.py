"""Batches on the device, in order, ahead of the step: made by threads, processes or the GPU, and prefetched.

Promises: the batches depend on the requests alone, never on the kind or number of workers, so resuming needs only the
remaining requests. A bounded number of batches is under way, in buffers that are reused, so memory does not grow. The
feed runs in its own thread and copies on its own stream, so the step finds its batch on the device. A broken sample
is handled as `Transform.on_bad` says and recorded in `BadSamples`. A worker's `UserError` is raised; a loader process
that is killed is a `LostError`. Closing a feed ends its threads and processes before it returns.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Literal, TypeVar

import torch

from drumline.core.account import Account
from drumline.core.errors import LostError
from drumline.core.processes import WorkerKilled, map_in_processes
from drumline.data.feed.batch import (
    BadSample,
    BadSamples,
    Batch,
    HostBatch,
    finished,
    load_sample,
    make_batch,
)
from drumline.data.feed.sampler import Request
from drumline.data.feed.threads import Allocate, Route, threaded_batches
from drumline.data.feed.times import MAKE, SPACE, FeedTimes
from drumline.data.feed.transform import Transform
from drumline.data.gpu.decoder import DeviceDecoder, GpuFraction
from drumline.data.image.augment import apply
from drumline.data.sources import ArrayDataset, Dataset, DatasetSpec, EncodedDataset, open_same

Batches = Generator[Batch, None, None]
"""Close it to end its workers."""
RESIDENT_BATCHES = 8
KEPT = 8
"""Free page-locked buffers that are kept for reuse."""
READY = 2
"""Batches that wait on the device for the step."""


@dataclass(frozen=True)
class LoaderWorkers:
    """What makes the batches: native threads, processes, or (if there are 0) the feed's own thread."""

    kind: Literal["threads", "processes"]
    count: int
    decode: Literal["cpu", "gpu", "both"] = "cpu"
    """Where JPEGs are decoded: by the threads, by the GPU where it can, or by both as fast as the step needs."""

    def __str__(self) -> str:
        if self.count == 0:
            return "no workers"
        return (
            f"{self.count} {self.kind if self.count > 1 else self.kind.removesuffix('s').removesuffix('e')}"
        )


def batches(
    spec: DatasetSpec,
    dataset: Dataset,
    transform: Transform,
    seed: int,
    requests: Iterable[Request],
    workers: LoaderWorkers,
    device: torch.device,
    bad_samples: BadSamples,
    times: FeedTimes | None = None,
) -> Batches:
    """The batches of the requests, in their order, on the device. Close the iterator to end the workers."""
    times = times or FeedTimes()
    fraction = GpuFraction() if workers.decode == "both" and device.type == "cuda" else None
    asked = _FeedArguments(spec, dataset, transform, seed, requests, workers, times, fraction)
    made = _on_device(asked, device) if device.type == "cuda" else _on_host(asked)
    # On a CPU, making a plain array batch is faster than handing it to another thread.
    slow = isinstance(dataset, EncodedDataset) or transform.own or device.type == "cuda"
    running_ahead = prefetch(made, READY, times.account) if slow else made
    with closing(running_ahead) as feed:
        while True:
            wanted = fraction.wanted(device) if fraction else None
            item = next(feed, None)
            if item is None:
                return
            batch, bad, ready, arrived = item
            bad_samples.add(bad)
            if fraction and wanted and ready:
                fraction.handed(wanted, ready)
            times.ready, times.arrived = ready, arrived
            yield _handed_over(batch, ready, device)


def resident_batches(
    dataset: Dataset,
    transform: Transform,
    seed: int,
    requests: Iterable[Request],
    first_step: int,
    device: torch.device,
) -> Batches:
    """A few batches, made once and repeated without end: measures the model's speed without data loading.
    Used for synthetic data; step n always gets batch n mod RESIDENT_BATCHES."""
    pool = [
        Batch(*(tensor.to(device) for tensor in make_batch(dataset, transform, seed, request).batch))
        for request in itertools.islice(requests, RESIDENT_BATCHES)
    ]
    rotated = [pool[(first_step + i) % len(pool)] for i in range(len(pool))]
    yield from itertools.cycle(rotated)


def blank_batches(
    dataset: Dataset, transform: Transform, seed: int, requests: Iterable[Request], device: torch.device
) -> Batches:
    """The batches of the requests with black images that take no memory, and the labels of the dataset: for a process
    that computes a later stage of the model and must stay in step with those that read."""
    pixel = torch.zeros((1, 1, 1, 3), dtype=torch.uint8, device=device)
    for request in requests:
        made = finished(
            pixel.expand(len(request.samples), transform.size, transform.size, 3),
            dataset.labels[request.samples],
            (),
            transform,
            seed,
            request,
        )
        yield Batch(*(tensor.to(device, non_blocking=True) for tensor in made.batch))


class PinnedPool:
    """Page-locked buffers for pixels on their way to the device, each reused once it is copied."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []
        self.leaving: list[tuple[torch.cuda.Event, torch.Tensor]] = []

    def take(self, *shape: int) -> torch.Tensor:
        """A buffer for uint8 pixels."""
        while self.leaving and self.leaving[0][0].query():
            self.free.append(self.leaving.pop(0)[1])
        del self.free[:-KEPT]
        for place, buffer in enumerate(self.free):
            if buffer.shape == shape:
                return self.free.pop(place)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def give_back(self, buffer: torch.Tensor, copied: torch.cuda.Event) -> None:
        """The buffer may be reused after the event."""
        self.leaving.append((copied, buffer))


@dataclass(frozen=True)
class _FeedArguments:
    """The arguments of a feed."""

    spec: DatasetSpec
    dataset: Dataset
    transform: Transform
    seed: int
    requests: Iterable[Request]
    workers: LoaderWorkers
    times: FeedTimes
    fraction: GpuFraction | None = None

    def on_host(self, allocate: Allocate, route: Route | None = None) -> Generator[HostBatch, None, None]:
        """The batches as the workers make them."""
        self.times.account.adopt()  # in the feed's thread
        with closing(self._made(allocate, route)) as batches:
            for made in batches:
                self.times.by_python = self.times.by_python.plus(made.spent)
                yield made

    def _made(self, allocate: Allocate, route: Route | None) -> Generator[HostBatch, None, None]:
        dataset, transform, seed, workers = self.dataset, self.transform, self.seed, self.workers
        if workers.count and workers.kind == "processes":
            digest = "" if isinstance(dataset, ArrayDataset) else dataset.digest()
            made = process_batches(self.spec, digest, transform, seed, self.requests, workers.count)
            with closing(made):
                while True:
                    with self.times.account.within(MAKE):
                        batch = next(made, None)
                    if batch is None:
                        return
                    yield batch
        elif workers.count == 0 or isinstance(dataset, ArrayDataset):
            yield from (make_batch(dataset, transform, seed, request) for request in self.requests)
        else:
            yield from threaded_batches(
                dataset, transform, seed, self.requests, workers.count, allocate, route, self.times
            )


def _fresh(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8)


Ready = tuple[Batch, tuple[BadSample, ...], torch.cuda.Event | None, torch.cuda.Event | None]
"""A batch, its broken samples, and the events after which it is on the device and its copy began."""


def _on_host(asked: _FeedArguments) -> Generator[Ready, None, None]:
    with closing(asked.on_host(_fresh)) as host:
        for made in host:
            batch, plan = made.batch, made.plan
            yield batch._replace(images=apply(batch.images, plan)) if plan else batch, made.bad, None, None


def _on_device(asked: _FeedArguments, device: torch.device) -> Generator[Ready, None, None]:
    """Copies each batch on a side stream, decodes the remaining samples on the device, and augments the pixels
    there."""
    pinned, stream, dataset = PinnedPool(), _side_stream(device), asked.dataset
    with torch.cuda.device(device), ExitStack() as cleanup:
        decoder = None
        if asked.workers.decode != "cpu" and isinstance(dataset, EncodedDataset):
            with torch.cuda.stream(stream):
                decoder = cleanup.enter_context(
                    closing(DeviceDecoder(len(dataset), asked.transform, device, asked.fraction))
                )
        route = decoder.route if decoder else None
        host = cleanup.enter_context(closing(asked.on_host(pinned.take, route)))
        for made in asked.fraction.timed(host) if asked.fraction else host:
            batch, bad = made.batch, made.bad
            pixels = batch.images
            if not pixels.is_pinned():
                pixels = pinned.take(*batch.images.shape)
                pixels.copy_(batch.images)
            with torch.cuda.stream(stream):
                arrived = torch.cuda.Event(enable_timing=True)
                arrived.record(stream)
                images = pixels.to(device, non_blocking=True)
                if decoder and made.undecoded:
                    for slot in decoder.fill(images, made.undecoded).tolist():
                        assert isinstance(dataset, EncodedDataset)
                        request, key = made.request, int(made.request.keys[slot])
                        found = load_sample(dataset, asked.transform, asked.seed, request.epoch, key)
                        images[slot].copy_(torch.from_numpy(found.pixels))
                        batch.labels[slot] = found.label
                        bad += found.bad
                copied = torch.cuda.Event()
                copied.record(stream)
                for buffer in (pixels, made.undecoded.data) if made.undecoded else (pixels,):
                    pinned.give_back(buffer, copied)
                others = (tensor.pin_memory().to(device, non_blocking=True) for tensor in batch[1:4])
                moved = Batch(apply(images, made.plan) if made.plan else images, *others)
                ready = torch.cuda.Event(enable_timing=True)
                ready.record(stream)
            yield moved, bad, ready, arrived


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all feeds of a device: torch keeps freed memory for the stream that it was allocated on."""
    return torch.cuda.Stream(device)


def _handed_over(batch: Batch, ready: torch.cuda.Event | None, device: torch.device) -> Batch:
    """Makes the step's stream wait for the copy, and keeps the memory until that stream is done with it."""
    if ready is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(ready)
        for tensor in batch[:4]:
            tensor.record_stream(stream)
    return batch


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


Item = TypeVar("Item")
_END = object()


def prefetch(
    items: Generator[Item, None, None], ready: int, account: Account | None = None
) -> Generator[Item, None, None]:
    """The items of a generator, with up to `ready` of them waiting. Closes the generator at the end. `account` counts
    how long there is no space for the next one."""
    account = account or Account((SPACE,), SPACE)
    waiting: queue.Queue[tuple[object, BaseException | None]] = queue.Queue(ready)
    ending = threading.Event()

    def put(item: object, error: BaseException | None = None) -> bool:
        while not ending.is_set():
            try:
                waiting.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        failure: BaseException | None = None
        try:
            with closing(items):
                for item in items:
                    with account.within(SPACE):
                        taken = put(item)
                    if not taken:
                        break
        except BaseException as error:
            failure = error
        put(_END, failure)

    thread = threading.Thread(target=work, name="drumline-feed", daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item  # type: ignore[misc]
    finally:
        ending.set()
        thread.join()
