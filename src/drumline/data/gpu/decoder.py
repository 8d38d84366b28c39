"""Decodes some samples of a batch on the GPU: chooses how many and which, and makes their crops.

Promises: it decodes only JPEGs that `layout_of_file` accepts as bit-equal and that are clean up to their end marker.
Samples that nvJPEG rejects are returned, for the CPU to decode. The layout of each header is remembered, in one byte
per sample. Memory on the device is bounded by `ARENA_BYTES`. Damage that leaves a file's markers intact is not
detected here, nor by Pillow, which shows it as different garbage; checksums of packed sets and `drumline verify` find
it.

Decoding on the GPU takes time from the model, so with `GpuFraction` the GPU decodes nothing while the CPU keeps up.
When the device runs out of work, a fraction of each batch moves to it; when decoding there becomes the slower half,
some of it moves back. Only the speed depends on the fraction, never a pixel. Nothing waits for a measurement.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.data.feed.batch import Undecoded
from drumline.data.feed.transform import Transform
from drumline.data.gpu.layout import PITCH_MULTIPLE, layout_of_file, place
from drumline.data.gpu.nvjpeg import Arenas, NvJpegError, PlaneDecoder

ARENA_BYTES = 1 << 30
"""Decoded planes of one batch; there is room for two. The CPU decodes the samples beyond."""
_UNKNOWN, _ON_CPU = -2, -1


class DeviceDecoder:
    """Decodes and crops samples on a device, on the current stream, for one thread."""

    def __init__(
        self, samples: int, transform: Transform, device: torch.device, fraction: GpuFraction | None = None
    ) -> None:
        self.transform, self.device, self.fraction = transform, device, fraction
        self._layouts = np.full(samples, _UNKNOWN, np.int8)
        self._planes: PlaneDecoder | None = None  # made when first needed, which may be never
        self._arenas = Arenas(device)
        from drumline.data.gpu.resample import Resampler  # needs Triton

        self._resample = Resampler(device, transform.size, transform.resize, transform.interpolation)

    def route(
        self,
        samples: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.int64],
        sizes: NDArray[np.int32],
        candidates: NDArray[np.bool_],
    ) -> NDArray[np.int8]:
        """The layout of each sample in the arena once it is decoded, or -1 if the CPU decodes it."""
        layouts = np.where(candidates, self._layouts[samples], np.int8(_ON_CPU))
        wanted = len(samples) if self.fraction is None else round(self.fraction.value * len(samples))
        missing = wanted - int((layouts >= 0).sum())
        for slot in np.flatnonzero(layouts == _UNKNOWN).tolist():
            if missing <= 0:
                break
            layouts[slot] = self._learn(int(samples[slot]), int(addresses[slot]), int(lengths[slot]))
            missing -= layouts[slot] >= 0
        layouts[(layouts == _UNKNOWN) | (np.cumsum(layouts >= 0) > wanted)] = _ON_CPU
        planes = np.where(layouts >= 0, 3 * (sizes[:, 0] + PITCH_MULTIPLE).astype(np.int64) * sizes[:, 1], 0)
        return np.where(np.cumsum(planes) <= ARENA_BYTES, layouts, np.int8(_ON_CPU))

    def _learn(self, sample: int, address: int, length: int) -> int:
        """A sample's layout, by its bytes."""
        layout = layout_of_file(memoryview((ctypes.c_char * length).from_address(address)).cast("B"))
        self._layouts[sample] = _ON_CPU if layout is None else layout
        return int(self._layouts[sample])

    def fill(self, images: torch.Tensor, undecoded: Undecoded) -> NDArray[np.int64]:
        """Puts the crops of the undecoded samples into their rows of `images`. Returns the rows that failed."""
        places = place(undecoded.layouts, undecoded.sizes[:, 0], undecoded.sizes[:, 1])
        arena = self._arenas.take(places.end)
        try:
            self._planes = self._planes or PlaneDecoder(self.device)
            statuses = self._planes.decode(
                undecoded.data.numpy(), undecoded.offsets, undecoded.lengths, arena, places
            )
        except NvJpegError as error:
            raise UserError(f"decoding on the GPU: {error}", "use data.decode cpu") from error
        windows = torch.empty(
            (len(undecoded.slots), *images.shape[1:]), dtype=torch.uint8, device=self.device
        )
        self._resample(arena, places, undecoded.geometry, windows)
        self._arenas.read()
        rows = torch.from_numpy(undecoded.slots).pin_memory().to(self.device, non_blocking=True)
        images.index_copy_(0, rows, windows)
        failed = (statuses != 0) | (undecoded.status != 0)
        self._layouts[undecoded.samples[failed]] = _ON_CPU
        return undecoded.slots[failed]

    def close(self) -> None:
        """Frees what nvJPEG holds."""
        if self._planes is not None:
            self._planes.close()


WINDOW = 4
"""Batches per decision."""
UNDER_WAY = 8
"""Batches under way when the fraction changes. They were made with the old one."""
IDLE, HOST_WAIT = 0.005, 0.05
"""Fractions of the time above which the device counts as waiting for batches, and the feed for the CPU's half."""
FIRST_RISE, RETREAT, FALL = 1 / 8, 31 / 32, 1 / 128

Item = TypeVar("Item")


def next_fraction(fraction: float, idle: float, host_wait: float) -> float:
    """The next fraction, from the fraction of time that the device was idle for want of a batch, and that in which
    the feed waited for the CPU's half. Moves no more than was missing, and not beyond the point where both halves
    take the same time."""
    if idle < IDLE:
        return max(0.0, fraction - FALL)
    if host_wait < HOST_WAIT:  # the GPU's half is the slower one
        return fraction * RETREAT
    if fraction == 0.0:
        return min(idle, FIRST_RISE)
    level = fraction / ((1.0 - fraction) * (1.0 - host_wait) + fraction)
    return fraction + min(idle, level - fraction)


class GpuFraction:
    """The fraction, adjusted by what the two ends of a feed measure: its own thread, and the one that takes
    batches."""

    def __init__(self) -> None:
        self.value = 0.0
        self._handed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._skip, self._batches = UNDER_WAY, 0
        self._idle_ms = self._took_ms = 0.0
        # Written by the feed's thread alone; the other one reads differences.
        self._host_s = self._fed_s = 0.0
        self._host_before = self._fed_before = 0.0

    def timed(self, items: Iterator[Item]) -> Iterator[Item]:
        """For the feed's thread: the CPU's halves of the batches. Records how long it waits for each."""
        last = time.perf_counter()
        while True:
            began = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            now = time.perf_counter()
            self._host_s += now - began
            self._fed_s += now - last
            last = now
            yield item

    def wanted(self, device: torch.device) -> torch.cuda.Event:
        """For the thread that takes the batches: marks the point on its stream where the next one is needed."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def handed(self, wanted: torch.cuda.Event, ready: torch.cuda.Event) -> None:
        """A batch was needed at one event and ready at the other. Decides every `WINDOW` batches."""
        self._handed.append((wanted, ready))
        while len(self._handed) > 1 and self._handed[0][1].query() and self._handed[1][0].query():
            (needed, came), (next_needed, _) = self._handed.popleft(), self._handed[0]
            if self._skip:
                self._skip -= 1
                self._host_before, self._fed_before = self._host_s, self._fed_s
                continue
            self._idle_ms += max(0.0, needed.elapsed_time(came))
            self._took_ms += needed.elapsed_time(next_needed)
            self._batches += 1
            if self._batches == WINDOW:
                self._decide()

    def _decide(self) -> None:
        waited, fed = self._host_s - self._host_before, self._fed_s - self._fed_before
        idle = self._idle_ms / self._took_ms if self._took_ms > 0 else 0.0
        fraction = next_fraction(self.value, idle, waited / fed if fed > 0 else 0.0)
        self._skip = UNDER_WAY if fraction > self.value or idle >= IDLE else 0
        self._batches, self._idle_ms, self._took_ms = 0, 0.0, 0.0
        self._host_before, self._fed_before = self._host_s, self._fed_s
        self.value = fraction
