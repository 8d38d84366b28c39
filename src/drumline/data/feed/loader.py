"""Batches on the device, in order, ahead of the step.

Promises: the sequence of batches depends on the requests alone, never on the kind or number of workers; resuming
needs only the requests still to come; what is under way is bounded and its buffers are used again, so nothing grows.
The feed runs in a thread of its own and copies on a stream of its own: the step finds its batch on the device. A
broken sample is dealt with as the view says and noted in the ledger; a refusal surfaces as the `UserError` it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from drumline.data.feed.ahead import ahead
from drumline.data.feed.batch import Made, finished, make_batch
from drumline.data.feed.ledger import Ledger
from drumline.data.feed.order import Request
from drumline.data.feed.processes import process_batches
from drumline.data.feed.threads import Room, Route, threaded_batches
from drumline.data.feed.views import Batch, View
from drumline.data.gpu.share import Share
from drumline.data.image.augment import apply
from drumline.data.image.window import Bad, find_window
from drumline.data.sources import ArraySource, EncodedSource, Source, SourceSpec

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
    spec: SourceSpec,
    source: Source,
    view: View,
    seed: int,
    requests: Iterable[Request],
    workers: Workers,
    device: torch.device,
    ledger: Ledger,
) -> Batches:
    """The batches of the requests, in their order, on the device. Close the iterator to end the workers."""
    share = Share() if workers.decode == "both" and device.type == "cuda" else None
    asked = _Asked(spec, source, view, seed, requests, workers, share)
    made = _on_device(asked, device) if device.type == "cuda" else _on_host(asked)
    # An array batch on a CPU is cut faster than another thread could be told to cut it.
    running_ahead = ahead(made, READY) if isinstance(source, EncodedSource) or device.type == "cuda" else made
    with closing(running_ahead) as feed:
        while True:
            wanted = share.wanted(device) if share else None
            item = next(feed, None)
            if item is None:
                return
            batch, bad, ready = item
            ledger.add(bad)
            if share and wanted and ready:
                share.handed(wanted, ready)
            yield _handed_over(batch, ready, device)


def resident_batches(
    source: Source, view: View, seed: int, requests: Iterable[Request], first_step: int, device: torch.device
) -> Batches:
    """A few batches made once and repeated for ever: what the model takes when data costs nothing. Used for
    synthetic data; step n always gets batch n mod RESIDENT_BATCHES."""
    pool = [
        Batch(*(tensor.to(device) for tensor in make_batch(source, view, seed, request).batch))
        for request in itertools.islice(requests, RESIDENT_BATCHES)
    ]
    rotated = [pool[(first_step + i) % len(pool)] for i in range(len(pool))]
    yield from itertools.cycle(rotated)


def blank_batches(
    source: Source, view: View, seed: int, requests: Iterable[Request], device: torch.device
) -> Batches:
    """The batches of the requests with images that take no memory and show nothing, and the labels that the source
    gives: for a process that computes a later part of the model and must keep step with those who read."""
    pixel = torch.zeros((1, 1, 1, 3), dtype=torch.uint8, device=device)
    for request in requests:
        made = finished(
            pixel.expand(len(request.samples), view.size, view.size, 3),
            source.labels[request.samples],
            (),
            view,
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

    spec: SourceSpec
    source: Source
    view: View
    seed: int
    requests: Iterable[Request]
    workers: Workers
    share: Share | None = None

    def on_host(self, room: Room, route: Route | None = None) -> Generator[Made, None, None]:
        """The batches as the workers make them."""
        source, view, seed, workers = self.source, self.view, self.seed, self.workers
        if workers.count == 0 or isinstance(source, ArraySource):
            yield from (make_batch(source, view, seed, request) for request in self.requests)
        elif workers.kind == "processes":
            yield from process_batches(self.spec, source.digest(), view, seed, self.requests, workers.count)
        else:
            yield from threaded_batches(source, view, seed, self.requests, workers.count, room, route)


def _fresh(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8)


Ready = tuple[Batch, tuple[Bad, ...], torch.cuda.Event | None]


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
        if asked.workers.decode != "cpu" and isinstance(source, EncodedSource):
            from drumline.data.gpu.feed import DeviceDecoder

            with torch.cuda.stream(stream):
                decoder = cleanup.enter_context(
                    closing(DeviceDecoder(len(source), asked.view, device, asked.share))
                )
        route = decoder.route if decoder else None
        host = cleanup.enter_context(closing(asked.on_host(room.take, route)))
        for made in asked.share.timed(host) if asked.share else host:
            batch, bad = made.batch, made.bad
            pixels = batch.images
            if not pixels.is_pinned():
                pixels = room.take(*batch.images.shape)
                pixels.copy_(batch.images)
            with torch.cuda.stream(stream):
                images = pixels.to(device, non_blocking=True)
                if decoder and made.coded:
                    for slot in decoder.fill(images, made.coded).tolist():
                        assert isinstance(source, EncodedSource)
                        sample = int(batch.samples[slot])
                        found = find_window(source, asked.view, asked.seed, made.epoch, sample)
                        images[slot].copy_(torch.from_numpy(found.pixels))
                        batch.labels[slot] = found.label
                        bad += found.bad
                copied = torch.cuda.Event()
                copied.record(stream)
                for buffer in (pixels, made.coded.data) if made.coded else (pixels,):
                    room.give_back(buffer, copied)
                others = (tensor.pin_memory().to(device, non_blocking=True) for tensor in batch[1:4])
                moved = Batch(apply(images, made.plan) if made.plan else images, *others)
                ready = torch.cuda.Event(enable_timing=asked.share is not None)
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
