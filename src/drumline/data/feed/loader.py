"""Batches on the device, in order, ahead of the step.

Promises: the sequence of batches depends on the requests alone, never on the kind or number of workers; resuming
needs only the requests still to come; what is under way is bounded and its buffers are used again, so nothing grows.
The feed runs in a thread of its own and copies on a stream of its own: the step finds its batch on the device. A
broken sample is handled as `Transform.on_bad` says and recorded in `BadSamples`; a worker's `UserError` is raised.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from drumline.data.feed.bad_samples import BadSamples
from drumline.data.feed.batch import Batch, HostBatch, finished, make_batch
from drumline.data.feed.prefetch import prefetch
from drumline.data.feed.processes import process_batches
from drumline.data.feed.sample import BadSample, load_sample
from drumline.data.feed.sampler import Request
from drumline.data.feed.threads import Room, Route, threaded_batches
from drumline.data.feed.transform import Transform
from drumline.data.gpu.fraction import GpuFraction
from drumline.data.image.augment import apply
from drumline.data.sources import ArrayDataset, Dataset, DatasetSpec, EncodedDataset

Batches = Generator[Batch, None, None]
"""An iterator to be closed when no more batches are wanted: that ends its workers."""
RESIDENT_BATCHES = 8
KEPT = 8
"""Free page-locked buffers that wait to be used again."""
READY = 2
"""Batches that wait on the device for the step."""


@dataclass(frozen=True)
class Workers:
    """Who makes the batches: native threads, processes, or (0 of either) the feed's own thread."""

    kind: Literal["threads", "processes"]
    count: int
    decode: Literal["cpu", "gpu", "both"] = "cpu"
    """Whether the GPU decodes what it can beside the threads: all of it, or (both) what they are too slow for."""

    def __str__(self) -> str:
        if self.count == 0:
            return "no workers"
        return (
            f"{self.count} {self.kind if self.count > 1 else self.kind.removesuffix('s').removesuffix('e')}"
        )


def batches(
    spec: DatasetSpec,
    source: Dataset,
    transform: Transform,
    seed: int,
    requests: Iterable[Request],
    workers: Workers,
    device: torch.device,
    bad_samples: BadSamples,
) -> Batches:
    """The batches of the requests, in their order, on the device. Close the iterator to end the workers."""
    fraction = GpuFraction() if workers.decode == "both" and device.type == "cuda" else None
    asked = _Asked(spec, source, transform, seed, requests, workers, fraction)
    made = _on_device(asked, device) if device.type == "cuda" else _on_host(asked)
    # An array batch on a CPU is cut faster than another thread could be told to cut it.
    running_ahead = (
        prefetch(made, READY) if isinstance(source, EncodedDataset) or device.type == "cuda" else made
    )
    with closing(running_ahead) as feed:
        while True:
            wanted = fraction.wanted(device) if fraction else None
            item = next(feed, None)
            if item is None:
                return
            batch, bad, ready = item
            bad_samples.add(bad)
            if fraction and wanted and ready:
                fraction.handed(wanted, ready)
            yield _handed_over(batch, ready, device)


def resident_batches(
    source: Dataset,
    transform: Transform,
    seed: int,
    requests: Iterable[Request],
    first_step: int,
    device: torch.device,
) -> Batches:
    """A few batches made once and repeated for ever: what the model takes when data costs nothing. Used for
    synthetic data; step n always gets batch n mod RESIDENT_BATCHES."""
    pool = [
        Batch(*(tensor.to(device) for tensor in make_batch(source, transform, seed, request).batch))
        for request in itertools.islice(requests, RESIDENT_BATCHES)
    ]
    rotated = [pool[(first_step + i) % len(pool)] for i in range(len(pool))]
    yield from itertools.cycle(rotated)


def blank_batches(
    source: Dataset, transform: Transform, seed: int, requests: Iterable[Request], device: torch.device
) -> Batches:
    """The batches of the requests with images that take no memory and show nothing, and the labels that the source
    gives: for a process that computes a later part of the model and must keep step with those who read."""
    pixel = torch.zeros((1, 1, 1, 3), dtype=torch.uint8, device=device)
    for request in requests:
        made = finished(
            pixel.expand(len(request.samples), transform.size, transform.size, 3),
            source.labels[request.samples],
            (),
            transform,
            seed,
            request,
        )
        yield Batch(*(tensor.to(device, non_blocking=True) for tensor in made.batch))


class PinnedRing:
    """Page-locked buffers for the pixels of batches on their way to the device, each used again once copied."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []
        self.leaving: list[tuple[torch.cuda.Event, torch.Tensor]] = []

    def take(self, *shape: int) -> torch.Tensor:
        """Room for uint8 pixels."""
        while self.leaving and self.leaving[0][0].query():
            self.free.append(self.leaving.pop(0)[1])
        del self.free[:-KEPT]
        for place, buffer in enumerate(self.free):
            if buffer.shape == shape:
                return self.free.pop(place)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def give_back(self, buffer: torch.Tensor, copied: torch.cuda.Event) -> None:
        """The buffer may be used again after the event."""
        self.leaving.append((copied, buffer))


@dataclass(frozen=True)
class _Asked:
    """What a feed was asked for; each part of the way takes what it needs."""

    spec: DatasetSpec
    source: Dataset
    transform: Transform
    seed: int
    requests: Iterable[Request]
    workers: Workers
    fraction: GpuFraction | None = None

    def on_host(self, room: Room, route: Route | None = None) -> Generator[HostBatch, None, None]:
        """The batches as the workers make them."""
        source, transform, seed, workers = self.source, self.transform, self.seed, self.workers
        if workers.count == 0 or isinstance(source, ArrayDataset):
            yield from (make_batch(source, transform, seed, request) for request in self.requests)
        elif workers.kind == "processes":
            yield from process_batches(
                self.spec, source.digest(), transform, seed, self.requests, workers.count
            )
        else:
            yield from threaded_batches(source, transform, seed, self.requests, workers.count, room, route)


def _fresh(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8)


Ready = tuple[Batch, tuple[BadSample, ...], torch.cuda.Event | None]


def _on_host(asked: _Asked) -> Generator[Ready, None, None]:
    with closing(asked.on_host(_fresh)) as host:
        for made in host:
            batch, plan = made.batch, made.plan
            yield batch._replace(images=apply(batch.images, plan)) if plan else batch, made.bad, None


def _on_device(asked: _Asked, device: torch.device) -> Generator[Ready, None, None]:
    """Copies each batch on a side stream, decodes what was left to the device, and augments the pixels there."""
    room, stream, source = PinnedRing(), _side_stream(device), asked.source
    with torch.cuda.device(device), ExitStack() as cleanup:
        decoder = None
        if asked.workers.decode != "cpu" and isinstance(source, EncodedDataset):
            from drumline.data.gpu.decoder import DeviceDecoder

            with torch.cuda.stream(stream):
                decoder = cleanup.enter_context(
                    closing(DeviceDecoder(len(source), asked.transform, device, asked.fraction))
                )
        route = decoder.route if decoder else None
        host = cleanup.enter_context(closing(asked.on_host(room.take, route)))
        for made in asked.fraction.timed(host) if asked.fraction else host:
            batch, bad = made.batch, made.bad
            pixels = batch.images
            if not pixels.is_pinned():
                pixels = room.take(*batch.images.shape)
                pixels.copy_(batch.images)
            with torch.cuda.stream(stream):
                images = pixels.to(device, non_blocking=True)
                if decoder and made.undecoded:
                    for slot in decoder.fill(images, made.undecoded).tolist():
                        assert isinstance(source, EncodedDataset)
                        sample = int(batch.samples[slot])
                        found = load_sample(source, asked.transform, asked.seed, made.epoch, sample)
                        images[slot].copy_(torch.from_numpy(found.pixels))
                        batch.labels[slot] = found.label
                        bad += found.bad
                copied = torch.cuda.Event()
                copied.record(stream)
                for buffer in (pixels, made.undecoded.data) if made.undecoded else (pixels,):
                    room.give_back(buffer, copied)
                others = (tensor.pin_memory().to(device, non_blocking=True) for tensor in batch[1:4])
                moved = Batch(apply(images, made.plan) if made.plan else images, *others)
                ready = torch.cuda.Event(enable_timing=asked.fraction is not None)
                ready.record(stream)
            yield moved, bad, ready


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all feeds of a device: torch keeps freed memory for the stream that it was taken on."""
    return torch.cuda.Stream(device)


def _handed_over(batch: Batch, ready: torch.cuda.Event | None, device: torch.device) -> Batch:
    """The step's stream waits for the copy, and the memory is kept until that stream is done with it."""
    if ready is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(ready)
        for tensor in batch[:4]:
            tensor.record_stream(stream)
    return batch
