"""NVIDIA's JPEG decoder by ctypes: JPEG bytes on the host to unconverted planes in a device arena.

Promises: never fails at import; says in words why it cannot be used here; checks every status; reports failure per
image, so that the caller can decode that one on the CPU; keeps one decoder state, whose buffers the library reuses.
Refuses nothing by itself: which JPEGs come out bit-equal to Pillow is for `drumline.data.gpu.rule` to say.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.data.gpu.resample import Places


class Backend(IntEnum):
    """Who decodes. HARDWARE is the JPEG engine beside the multiprocessors (A100, H100 and their like); GPU_HYBRID
    computes on the multiprocessors."""

    DEFAULT = 0
    HYBRID = 1
    GPU_HYBRID = 2
    HARDWARE = 3


STATUSES = (
    "success",
    "not initialised",
    "invalid parameter",
    "bad JPEG",
    "JPEG not supported",
    "allocator failure",
    "execution failed",
    "architecture mismatch",
    "internal error",
    "implementation not supported",
    "incomplete bitstream",
)


def unavailable() -> str:
    """Why nvJPEG cannot be used here, or nothing."""
    return _library()[1]


class NvJpegError(Exception):
    """A call that is not about one image failed, and how."""

    def __init__(self, call: str, status: int) -> None:
        words = STATUSES[status] if 0 <= status < len(STATUSES) else "unknown status"
        super().__init__(f"{call} failed: {words} ({status})")
        self.status = status


class PlaneDecoder:
    """A decoder for batches, for one thread at a time."""

    def __init__(self, device: torch.device, backend: Backend = Backend.HARDWARE) -> None:
        library, reason = _library()
        assert library is not None, reason
        self.device, self.backend = device, backend
        self._library = library
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        self._size = 0
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # nvJPEG wants a context to be current
            self._call("nvjpegCreateEx", int(backend), None, None, 0, ctypes.byref(self._handle))
            self._call("nvjpegJpegStateCreate", self._handle, ctypes.byref(self._state))

    def decode(
        self,
        encoded: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        arena: torch.Tensor,
        places: Places,
    ) -> NDArray[np.int32]:
        """Puts the JPEGs encoded[offset : offset + length] into the arena, each at its place, on the current stream.
        Gives a status per image, 0 for success. The encoded bytes must stay as they are until the stream is
        past this call; in pinned memory they are copied without a detour."""
        count = len(offsets)
        statuses = np.zeros(count, np.int32)
        if count == 0:
            return statuses
        sources = (encoded.ctypes.data + offsets).astype(np.uint64)
        sizes = lengths.astype(np.uint64)
        images = np.zeros((count, 8), np.uint64)
        images[:, :3] = (arena.data_ptr() + places.offsets).astype(np.uint64)
        images[:, 4:7] = places.pitches
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = self._batch(sources, sizes, images, stream)
            if status:
                # One bad image fails the batch: take them one by one, and name the bad ones.
                for i in range(count):
                    statuses[i] = self._batch(sources[i : i + 1], sizes[i : i + 1], images[i : i + 1], stream)
        return statuses

    def _batch(
        self,
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        images: NDArray[np.uint64],
        stream: ctypes.c_void_p,
    ) -> int:
        if self._size != len(sources):
            self._call(
                "nvjpegDecodeBatchedInitialize", self._handle, self._state, len(sources), 1, _UNCHANGED
            )
            self._size = len(sources)
        status = self._library.nvjpegDecodeBatched(
            self._handle, self._state, _pointer(sources), _pointer(sizes), _pointer(images), stream
        )
        if status:
            self._size = 0  # a failed batch leaves a state that must be set up anew
        return int(status)

    def close(self) -> None:
        if self._handle:
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                self._call("nvjpegJpegStateDestroy", self._state)
                self._call("nvjpegDestroy", self._handle)
            self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()

    def __enter__(self) -> PlaneDecoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise NvJpegError(name, status)


_UNCHANGED = 0
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "nvjpegCreateEx": (_INT, _POINTER, _POINTER, ctypes.c_uint, _POINTER),
    "nvjpegDestroy": (_POINTER,),
    "nvjpegJpegStateCreate": (_POINTER, _POINTER),
    "nvjpegJpegStateDestroy": (_POINTER,),
    "nvjpegDecode": (_POINTER, _POINTER, _POINTER, ctypes.c_size_t, _INT, _POINTER, _POINTER),
    "nvjpegDecodeBatchedInitialize": (_POINTER, _POINTER, _INT, _INT, _INT),
    "nvjpegDecodeBatched": (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
}


def _pointer(array: NDArray[np.uint64]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    if not torch.cuda.is_available():
        return None, "there is no CUDA device"
    tried = []
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
            for function, arguments in _SIGNATURES.items():
                getattr(library, function).argtypes = arguments
                getattr(library, function).restype = _INT
        except (OSError, AttributeError) as error:
            tried.append(f"{name}: {error}")
            continue
        return library, ""
    return None, "; ".join(
        tried
    ) or "libnvjpeg is not installed (CUDA's toolkit and torchvision's wheel bring it)"


def _candidates() -> Iterator[str]:
    """The toolkit's and pip's own before torchvision's copy, which may be older."""
    major = (torch.version.cuda or "0").split(".")[0]
    folders: list[Path] = []
    nvidia = importlib.util.find_spec("nvidia")
    for place in (nvidia.submodule_search_locations or []) if nvidia else []:
        folders += [Path(place, f"cu{major}", "lib"), Path(place, "nvjpeg", "lib")]
    folders.append(Path("/usr/local/cuda/lib64"))
    vision = importlib.util.find_spec("torchvision")
    if vision is not None and vision.origin is not None:
        folders.append(Path(vision.origin).parents[1] / "torchvision.libs")
    for folder in folders:
        yield from (str(path) for path in sorted(folder.glob("libnvjpeg*.so*")))
    found = ctypes.util.find_library("nvjpeg")
    if found:
        yield found
