"""Decodes some samples of a batch on the GPU: chooses them, and makes their crops.

Promises: it decodes only JPEGs that `rule.py` accepts as bit-equal and that are clean up to their end marker. Samples
that nvJPEG rejects are returned, for the CPU to decode. What a header says is remembered, in one byte per sample.
Memory on the device is bounded by `ARENA_BYTES`. Damage that leaves a file's markers intact is not detected here, nor
by Pillow, which shows it as different garbage; checksums of packed sets and `drumline verify` find it.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.core.errors import UserError
from drumline.data.feed.batch import Undecoded
from drumline.data.feed.transform import Transform
from drumline.data.gpu import PITCH_MULTIPLE, place
from drumline.data.gpu.fraction import GpuFraction
from drumline.data.gpu.nvjpeg import NvJpegError, PlaneDecoder
from drumline.data.gpu.resample import Resampler
from drumline.data.gpu.rule import layout_of_file

ARENA_BYTES = 1 << 30
"""Decoded planes of one batch. The CPU decodes the samples beyond."""
_UNKNOWN, _ON_CPU = -2, -1


class DeviceDecoder:
    """Decodes and crops samples on a device, on the current stream, for one thread."""

    def __init__(
        self, samples: int, transform: Transform, device: torch.device, fraction: GpuFraction | None = None
    ) -> None:
        self.transform, self.device, self.fraction = transform, device, fraction
        self._layouts = np.full(samples, _UNKNOWN, np.int8)
        self._planes: PlaneDecoder | None = None  # made when first needed, which may be never
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
        arena = torch.empty(places.end, dtype=torch.uint8, device=self.device)
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
        rows = torch.from_numpy(undecoded.slots).pin_memory().to(self.device, non_blocking=True)
        images.index_copy_(0, rows, windows)
        failed = (statuses != 0) | (undecoded.status != 0)
        self._layouts[undecoded.samples[failed]] = _ON_CPU
        return undecoded.slots[failed]

    def close(self) -> None:
        """Frees what nvJPEG holds."""
        if self._planes is not None:
            self._planes.close()
