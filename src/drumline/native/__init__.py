"""The native part: exact resize, JPEG crops, and threads that make batches, all without the GIL.

It is optional: it is built on installation if there are a C compiler and libjpeg-turbo's headers, and Python with
Pillow does everything it does, with the same pixels. `DRUMLINE_NATIVE=0` in the environment turns it off. It is plain
C behind ctypes, so it does not depend on the Python version.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_ssize_t, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILTERS = {"box": 0, "bilinear": 1, "bicubic": 2, "lanczos": 3}
READ_FILES, READ_SIZES, MAKE_CROPS, GATHER = range(4)
DONE, LEFT_TO_PILLOW = 0, 1
STORED = 3
"""Numbers read from a JPEG's header: width, height, and whether there is EXIF."""
_PATIENCE_S = 0.1
"""How long a wait in C lasts before Python can handle signals."""


class Work(ctypes.Structure):
    """A batch for the threads, as `Work` in pool.c. Keep the arrays alive until the job is done."""

    _fields_ = (
        ("kind", c_int32),
        ("count", c_int32),
        ("size", c_int32),
        ("filter", c_int32),
        ("version13", c_int32),
        ("paths", c_void_p),
        ("data", c_void_p),
        ("lengths", c_void_p),
        ("rooms", c_void_p),
        ("stored", c_void_p),
        ("geometry", c_void_p),
        ("out", c_void_p),
        ("offsets", c_void_p),
        ("status", c_void_p),
    )


def available() -> bool:
    """Whether the native part is built and in use."""
    return _library() is not None


def decodes_jpeg() -> bool:
    """Whether it was built with libjpeg-turbo."""
    library = _library()
    return library is not None and library.drum_jpeg_version() > 0


def describe() -> str:
    """For `drumline doctor` and logs."""
    library, why_not = _loaded()
    if library is None:
        return str(why_not)
    number = library.drum_jpeg_version()
    if not number:
        return "built without libjpeg-turbo (install its headers and install drumline again)"
    return f"built with libjpeg-turbo {number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def resize(
    image: NDArray[np.uint8], size: tuple[int, int], filter: str, columns_first: bool
) -> NDArray[np.uint8]:
    """A whole image, (H, W) or (H, W, C) with C 1 or 3, resized to (width, height)."""
    height, width = image.shape[:2]
    geometry = np.array([0, 0, width, height, *size, 0, 0, 0], np.int32)
    return crop(image, geometry, size, filter, columns_first)


def crop(
    image: NDArray[np.uint8],
    geometry: NDArray[np.int32],
    size: tuple[int, int],
    filter: str,
    columns_first: bool,
) -> NDArray[np.uint8]:
    """The crop of `size` by a geometry row (`data/feed/transform.py`)."""
    channels = 1 if image.ndim == 2 else image.shape[2]
    if image.strides[1] != channels or image.strides[-1] != 1 or image.strides[0] < 0:
        image = np.ascontiguousarray(image)
    out = np.empty((size[1], size[0], *image.shape[2:]), np.uint8)
    row = np.ascontiguousarray(geometry, np.int32)  # named, so that it outlives the call
    failed = _built().drum_resize(
        image.ctypes.data,
        image.strides[0],
        channels,
        row.ctypes.data,
        *size,
        FILTERS[filter],
        columns_first,
        out.ctypes.data,
    )
    if failed:
        raise MemoryError(f"resize to {size[0]} x {size[1]}")
    return out


def jpeg_size(data: bytes) -> tuple[int, int, int] | None:
    """Width, height and whether there is EXIF; None if the native part does not accept it as a JPEG."""
    stored = np.zeros(STORED, np.int32)
    found = _built().drum_jpeg_size(data, len(data), stored.ctypes.data)
    return (int(stored[0]), int(stored[1]), int(stored[2])) if found else None


def jpeg_crop(
    data: bytes, stored: tuple[int, int], geometry: NDArray[np.int32], size: int, filter: str, version: str
) -> NDArray[np.uint8] | None:
    """The crop of one sample; None if it is left to Pillow."""
    out = np.empty((size, size, 3), np.uint8)
    sides, row = np.array(stored, np.int32), np.ascontiguousarray(geometry, np.int32)
    status = _built().drum_make_window(
        data,
        len(data),
        sides.ctypes.data,
        row.ctypes.data,
        size,
        FILTERS[filter],
        version == "pillow13",
        out.ctypes.data,
    )
    return out if status == DONE else None


def jpeg_warnings(data: bytes) -> int | None:
    """The number of libjpeg's warnings about a file, -1 if it rejects it; None without the native part."""
    return int(_built().drum_jpeg_warnings(data, len(data))) if decodes_jpeg() else None


class Pool:
    """Native threads. Wait for all jobs before you close it."""

    def __init__(self, threads: int) -> None:
        assert threads > 0, threads
        self.threads = threads
        self._pool: int | None = _built().drum_pool_open(threads)
        if not self._pool:
            raise MemoryError(f"starting {threads} threads")

    def submit(self, work: Work) -> int:
        """Submits a batch. Returns the job to wait for."""
        job = _built().drum_submit(self._pool, ctypes.byref(work))
        if not job:
            raise MemoryError("handing over a batch")
        return int(job)

    def wait(self, job: int) -> None:
        """Waits for the job. Ctrl-C interrupts the wait, not the job."""
        while not _built().drum_wait(self._pool, job, _PATIENCE_S):
            pass

    def spent(self) -> tuple[float, float, float, float]:
        """Seconds that the threads have read, and made samples, of these on a core; and megabytes read."""
        numbers = (c_int64 * 4)()
        _built().drum_spent(self._pool, numbers)
        read, made, on_core, size = numbers
        return read / 1e9, made / 1e9, on_core / 1e9, size / 2**20

    def close(self) -> None:
        """Ends the threads after their current samples."""
        if self._pool:
            pool, self._pool = self._pool, None
            _built().drum_pool_close(pool)


def free_files(data: NDArray[np.uint64], rooms: NDArray[np.int64]) -> None:
    """Frees the buffers of files that a pool read."""
    _built().drum_free_files(data.ctypes.data, rooms.ctypes.data, len(data))


def _built() -> Any:
    library = _library()
    assert library is not None, "the native part is not built"
    return library


def _library() -> Any:
    return _loaded()[0]


@cache
def _loaded() -> tuple[Any, str]:
    """The library, or None and the reason. Prefers a build for this Python; any other works too, since it does not
    use Python."""
    if os.environ.get("DRUMLINE_NATIVE") == "0":
        return None, "turned off by DRUMLINE_NATIVE=0"
    folder = Path(__file__).parent
    names = [f"_core{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = [folder / name for name in names if (folder / name).exists()] or sorted(folder.glob("_core*.so"))
    if not found:
        return None, "not built (needs a C compiler on install)"
    try:
        library = ctypes.CDLL(str(found[0]))
        _declare(library)
    except (OSError, AttributeError) as error:  # libjpeg is gone, or it was built from other sources
        return None, f"cannot be used ({error}): install drumline again"
    if library.drum_work_bytes() != ctypes.sizeof(Work):
        return None, "was built from other sources: install drumline again"
    return library, ""


def _declare(library: Any) -> None:
    pointer, number = c_void_p, c_int
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "drum_resize": (c_int, (pointer, c_ssize_t, *[number] * 1, pointer, *[number] * 4, pointer)),
        "drum_make_window": (c_int, (c_char_p, c_int64, pointer, pointer, number, number, number, pointer)),
        "drum_jpeg_size": (c_int, (c_char_p, c_int64, pointer)),
        "drum_jpeg_warnings": (c_int, (c_char_p, c_ssize_t)),
        "drum_jpeg_version": (c_int, ()),
        "drum_work_bytes": (c_int, ()),
        "drum_pool_open": (c_void_p, (number,)),
        "drum_pool_close": (None, (pointer,)),
        "drum_submit": (c_void_p, (pointer, POINTER(Work))),
        "drum_wait": (c_int, (pointer, pointer, c_double)),
        "drum_spent": (None, (pointer, pointer)),
        "drum_free_files": (None, (pointer, pointer, number)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
