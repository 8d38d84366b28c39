"""Batches made by native threads: files are read ahead in the order of the requests, then cropped in place.

Promises: the batches of `make_batch`, bit for bit, whatever the number of threads. For a JPEG that the native part
decodes, Python only finds the path; other samples go through `load_sample` in Python threads. Memory is bounded: a
fixed number of batches is under way, and their buffers are reused.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from drumline import native
from drumline.core.errors import LostError, UserError
from drumline.data.feed.batch import (
    BadSample,
    HostBatch,
    LoadedSample,
    Undecoded,
    elongated,
    finished,
    load_sample,
    native_decodes,
)
from drumline.data.feed.own_transform import transform_images
from drumline.data.feed.sampler import Request
from drumline.data.feed.times import MAKE, READ, FeedTimes, Spent
from drumline.data.feed.transform import COLUMNS, Transform
from drumline.data.sources import EncodedDataset
from drumline.data.sources.base import MappedFiles
from drumline.native import Pool, Work

READ_AHEAD, MADE_AHEAD = 2, 2
"""Batches whose files are being read, and batches that are being cropped, beside the one that is waited for."""
READERS = 8
"""Threads that read files. They wait for the disk, not for a core."""
UNDECODED_ALIGNMENT, UNDECODED_LEAST = 16, 4 << 20
"""JPEG bytes for the device: each sample starts at a multiple of the first. The buffer has a power of two of bytes,
at least the second, so that it can be reused."""
Allocate = Callable[..., torch.Tensor]
"""Called with a shape, returns a uint8 buffer, which leaves with the batch."""
Route = Callable[
    [NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_]],
    NDArray[np.int8],
]
"""(samples, addresses, lengths, stored sizes, candidates) to the device's layout of each, or -1 if the CPU decodes
it."""


def threaded_batches(
    dataset: EncodedDataset,
    transform: Transform,
    seed: int,
    requests: Iterable[Request],
    threads: int,
    allocate: Allocate,
    route: Route | None = None,
    times: FeedTimes | None = None,
) -> Generator[HostBatch, None, None]:
    """The batches of the requests, in their order. Samples that `route` sends to the device stay undecoded. Close the
    generator to end the threads."""
    makers, readers = Pool(threads), Pool(READERS)
    times = times or FeedTimes()
    rest = ThreadPoolExecutor(threads, thread_name_prefix="drumline-sample")
    free: list[Slot] = []
    reading: deque[Slot] = deque()
    making: deque[Slot] = deque()

    def move(reads: int, makes: int) -> Generator[HostBatch, None, None]:
        """Moves batches on until no more than these are under way."""
        while len(reading) > reads:
            with times.account.within(READ):
                reading[0].wait_for_files()
            reading[0].make(readers, makers, rest)
            making.append(reading.popleft())
        while len(making) > makes:
            with times.account.within(MAKE):
                made = making[0].finish(rest)
            times.natively = Spent(*makers.spent()).plus(Spent(*readers.spent()))
            yield made
            free.append(making.popleft())

    try:
        for request in requests:
            slot = free.pop() if free else Slot(dataset, transform, seed, allocate, route)
            reading.append(slot)
            slot.read(request, readers, rest)
            yield from move(READ_AHEAD, MADE_AHEAD)
        yield from move(0, 0)
    finally:
        rest.shutdown(wait=True, cancel_futures=True)
        for slot in (*reading, *making):
            slot.wait()
        times.by_python = times.by_python.plus(Spent(*makers.spent())).plus(Spent(*readers.spent()))
        times.natively = Spent()
        readers.close()
        makers.close()
        for slot in (*free, *reading, *making):
            slot.arrays.free_files()


class Slot:
    """One batch under way, and its arrays, which the native threads use too."""

    def __init__(
        self,
        dataset: EncodedDataset,
        transform: Transform,
        seed: int,
        allocate: Allocate,
        route: Route | None,
    ) -> None:
        self.dataset, self.transform, self.seed, self.allocate, self.route = (
            dataset,
            transform,
            seed,
            allocate,
            route,
        )
        self.request = Request(0, np.empty(0, np.int64))
        self.images = torch.empty(0, dtype=torch.uint8)
        self.arrays = Arrays(0)
        self.borrowed: list[object] = []
        """Memory that native threads read and Python must keep alive: paths, or bytes that Python read."""
        self.sound: Future[NDArray[np.bool_]] | None = None
        self.loads: list[Future[tuple[bytes, float]]] = []
        self.loaded = Spent()
        self.by_python: dict[int, Future[LoadedSample]] = {}
        self.undecoded: Undecoded | None = None
        self.under_way: list[tuple[Pool, int]] = []

    def read(self, request: Request, readers: Pool, rest: ThreadPoolExecutor) -> None:
        """Starts to fetch the encoded samples."""
        count, samples = len(request.samples), request.samples
        self.request = request
        self.images = self.allocate(count, self.transform.size, self.transform.size, 3)
        if len(self.arrays.lengths) != count:
            self.arrays.free_files()
            self.arrays = Arrays(count)
        if isinstance(self.dataset, MappedFiles):
            self.arrays.data[:], self.arrays.lengths[:] = self.dataset.pointers(samples)
            self.dataset.read_ahead(samples)
            self.sound = rest.submit(self.dataset.sound_jpegs, samples)
            self._submit(readers, native.READ_SIZES)
        elif (files := self.dataset.file_paths(samples)) is not None:
            paths = (ctypes.c_char_p * count)(*files)
            self.borrowed = [paths]
            self._submit(readers, native.READ_FILES, paths)
        else:
            self.loads = [rest.submit(self._timed_read, sample) for sample in samples.tolist()]

    def wait_for_files(self) -> None:
        """Waits until the encoded samples are there."""
        for load in self.loads:
            load.exception()
        self.wait()

    def make(self, readers: Pool, makers: Pool, rest: ThreadPoolExecutor) -> None:
        """Decides the crops, once the stored sizes are known, and starts to make them."""
        if self.loads:
            self._take_loads(readers)
        self.wait()
        arrays, epoch, samples = self.arrays, self.request.epoch, self.request.samples
        natively = (arrays.status == 0) & native_decodes(arrays.stored, self.transform)
        if self.sound is not None:
            natively &= self.sound.result()
        sizes = np.where(natively[:, None], arrays.stored[:, :2], 1)
        arrays.geometry[:] = self.transform.geometry(self.seed, epoch, self.request.keys, sizes)
        natively &= ~elongated(arrays.geometry)
        for slot in np.flatnonzero(~natively).tolist():
            self._leave_to_python(slot, rest)
        if self.route is not None:
            layouts = self.route(samples, arrays.data, arrays.lengths, arrays.stored[:, :2], natively)
            self._gather(np.flatnonzero(layouts >= 0), layouts, readers)
            natively &= layouts < 0
        arrays.stored[~natively] = 0
        self._submit(makers, native.MAKE_CROPS)

    def finish(self, rest: ThreadPoolExecutor) -> HostBatch:
        """The batch, once it is complete."""
        self.wait()
        undone = self.arrays.status != native.DONE
        if self.undecoded is not None:
            undone[self.undecoded.slots] = False
        for slot in np.flatnonzero(undone).tolist():
            if slot not in self.by_python:
                self._leave_to_python(slot, rest)
        labels, bad, spent = self.dataset.labels[self.request.samples], list[BadSample](), self.loaded
        for slot in sorted(self.by_python):
            found = self.by_python[slot].result()
            self.images[slot] = torch.from_numpy(found.pixels)
            labels[slot] = found.label
            bad += found.bad
            spent = spent.plus(found.spent)
        pixels = self.images.numpy()
        own_s = transform_images(pixels, self.dataset, self.transform, self.seed, self.request, rest.map)
        spent = spent.plus(Spent(own_s=own_s))
        made = finished(self.images, labels, tuple(bad), self.transform, self.seed, self.request)
        made = made._replace(undecoded=self.undecoded, spent=spent)
        self.by_python, self.borrowed, self.sound, self.undecoded = {}, [], None, None
        self.loaded = Spent()
        return made

    def wait(self) -> None:
        """Waits for the native threads to be done with the arrays."""
        while self.under_way:
            pool, job = self.under_way[-1]
            pool.wait(job)
            self.under_way.pop()

    def _leave_to_python(self, slot: int, rest: ThreadPoolExecutor) -> None:
        key = int(self.request.keys[slot])
        self.by_python[slot] = rest.submit(
            load_sample, self.dataset, self.transform, self.seed, self.request.epoch, key
        )

    def _timed_read(self, sample: int) -> tuple[bytes, float]:
        began = perf_counter()
        return self.dataset.read(sample), perf_counter() - began

    def _take_loads(self, readers: Pool) -> None:
        """Takes the bytes that Python read. What could not be read is left to `load_sample`, which reports why."""
        for slot, load in enumerate(self.loads):
            error = load.exception()
            left = isinstance(error, UserError) and not isinstance(error, LostError)
            data, seconds = (b"", 0.0) if left else load.result()
            self.loaded = self.loaded.plus(Spent(read_s=seconds, megabytes=len(data) / 2**20))
            self.borrowed.append(data)
            self.arrays.data[slot] = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
            self.arrays.lengths[slot] = len(data)
        self.loads = []
        self._submit(readers, native.READ_SIZES)

    def _gather(self, slots: NDArray[np.int64], layouts: NDArray[np.int8], readers: Pool) -> None:
        """Starts to copy the bytes of these samples into one buffer for the device."""
        if len(slots) == 0:
            return
        arrays = self.arrays
        data, lengths = arrays.data[slots], arrays.lengths[slots]
        ends = np.cumsum(lengths + -lengths % UNDECODED_ALIGNMENT)
        offsets = np.concatenate([[0], ends[:-1]])
        target = self.allocate(max(UNDECODED_LEAST, 1 << int(ends[-1] - 1).bit_length()))
        self.undecoded = Undecoded(
            slots,
            self.request.samples[slots],
            target,
            offsets,
            lengths,
            arrays.stored[slots, :2].copy(),
            layouts[slots],
            arrays.geometry[slots].copy(),
            np.zeros(len(slots), np.int32),
        )
        self.borrowed.append(data)
        work = Work(
            kind=native.GATHER,
            count=len(slots),
            data=data.ctypes.data,
            lengths=lengths.ctypes.data,
            out=target.data_ptr(),
            offsets=offsets.ctypes.data,
            status=self.undecoded.status.ctypes.data,
        )
        self.under_way.append((readers, readers.submit(work)))

    def _submit(self, pool: Pool, kind: int, paths: ctypes.Array[ctypes.c_char_p] | None = None) -> None:
        transform, arrays = self.transform, self.arrays
        work = Work(
            kind=kind,
            count=len(arrays.lengths),
            size=transform.size,
            filter=native.FILTERS[transform.interpolation],
            version13=transform.resize == "pillow13",
            paths=ctypes.addressof(paths) if paths is not None else None,
            data=arrays.data.ctypes.data,
            lengths=arrays.lengths.ctypes.data,
            rooms=arrays.rooms.ctypes.data,
            stored=arrays.stored.ctypes.data,
            geometry=arrays.geometry.ctypes.data,
            out=self.images.data_ptr(),
            status=arrays.status.ctypes.data,
        )
        self.under_way.append((pool, pool.submit(work)))


class Arrays:
    """Arrays of a batch that the native threads use too, one row per sample."""

    def __init__(self, count: int) -> None:
        self.data = np.zeros(count, np.uint64)
        self.lengths = np.zeros(count, np.int64)
        self.rooms = np.zeros(count, np.int64)
        """Bytes that native threads allocated at `data`; 0 where they did not allocate it."""
        self.stored = np.zeros((count, native.STORED), np.int32)
        self.geometry = np.zeros((count, COLUMNS), np.int32)
        self.status = np.zeros(count, np.int32)

    def free_files(self) -> None:
        """Frees what native threads allocated."""
        if self.rooms.any():
            native.free_files(self.data, self.rooms)
