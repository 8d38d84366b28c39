"""The GPU's JPEG engine through libnvjpeg, by ctypes: JPEG bytes on the host to unconverted planes in a device arena.

Promises: never fails at import; reports why it cannot be used on this machine; checks every status and reports
failure per image, so that the caller can decode that one on the CPU; reuses its buffers, which grow to the largest
image. `layout.layout_of_file` decides which files are decoded correctly. The engine reports success for files that
are truncated or damaged inside, so the caller must have checked `jpeg.clean_end`.

Only the HARDWARE backend is used: the others round the inverse DCT differently from libjpeg (by at most 3).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import io
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from drumline.data.gpu.layout import Places, PlaneLayout, place


def unavailable(device: torch.device | None = None) -> str:
    """Why JPEGs cannot be decoded on this device (the current GPU if none is named), or nothing. Decodes a few images
    to find out: the rule was proved on one GPU and one nvJPEG, and others may round otherwise."""
    reason = _library()[1]
    if reason:
        return reason
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        return _trial(device or torch.device("cuda"))
    except NvJpegError as error:
        return "this GPU has no JPEG engine" if error.status == _ARCHITECTURE_MISMATCH else str(error)
    except Exception as error:  # Triton without a C compiler, a full GPU: then the CPU decodes
        return f"a trial failed: {type(error).__name__}: {str(error).strip().splitlines()[0]}"


class NvJpegError(Exception):
    """A call that is not about one image failed, and how."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} failed: {describe(status)}")
        self.status = status


def describe(status: int) -> str:
    """A status as text."""
    name = _STATUSES[status] if 0 <= status < len(_STATUSES) else "unknown status"
    return f"{name} ({status})"


class Arenas:
    """Two areas of device memory for the engine to write, in turns: one while queued work still reads the other.

    torch hands out freed memory that queued work still uses, because everything on a stream waits for that work. The
    engine does not wait, so the host does: for the last reader of an area, and for the whole stream if it grows.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._areas = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._read = [torch.cuda.Event() for _ in range(2)]

    def take(self, size: int) -> torch.Tensor:
        """An area of at least this size, which no queued work uses."""
        self._read.reverse()
        self._areas.reverse()
        self._read[0].synchronize()
        if self._areas[0].numel() < size:
            room = max(size, self._areas[0].numel() * 3 // 2)
            self._areas[0] = torch.empty(room, dtype=torch.uint8, device=self.device)
            torch.cuda.current_stream(self.device).synchronize()
        return self._areas[0]

    def read(self) -> None:
        """The current stream has got all work that reads the area taken last."""
        self._read[0].record(torch.cuda.current_stream(self.device))


class PlaneDecoder:
    """Decodes batches, for one thread at a time. That thread waits, without the GIL, while the engine works."""

    def __init__(self, device: torch.device) -> None:
        library, reason = _library()
        assert library is not None, reason
        self.device = device
        self._library = library
        self._handle = ctypes.c_void_p()
        # One state per layout: a state that changes between layouts rebuilds its surfaces, four times slower.
        self._states: dict[int, ctypes.c_void_p] = {}
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # nvJPEG needs a current context
            # Without NO_PIPELINE a call waits for everything queued on the GPU, training steps included.
            self._call("nvjpegCreateEx", _HARDWARE, None, None, _NO_PIPELINE, ctypes.byref(self._handle))

    def decode(
        self,
        encoded: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        arena: torch.Tensor,
        places: Places,
    ) -> NDArray[np.int32]:
        """Decodes the JPEGs encoded[offset : offset + length] into the arena, each at its place. Later work on the
        current stream sees them. Returns a status per image, 0 for success (see `describe`). The encoded bytes must
        not change until the stream is past this call; use pinned memory.

        The engine writes at once and does not wait for the stream. No queued work may use the arena, not even through
        a freed tensor whose memory it got: see `Arenas`."""
        assert places.end <= arena.numel()
        assert len(offsets) == len(lengths) == len(places.layout)
        statuses = np.zeros(len(offsets), np.int32)
        if len(offsets) == 0:
            return statuses
        assert offsets.min() >= 0
        assert (offsets + lengths).max() <= encoded.nbytes
        sources = (encoded.ctypes.data + offsets).astype(np.uint64)
        sizes = lengths.astype(np.uint64)
        images = np.zeros((len(offsets), 8), np.uint64)  # nvjpegImage_t: four plane pointers, four pitches
        images[:, :3] = arena.data_ptr() + places.offsets
        images[:, 4:7] = places.pitches
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            for layout in np.unique(places.layout).tolist():
                rows = np.flatnonzero(places.layout == layout)
                if not self._batch(layout, sources[rows], sizes[rows], images[rows], stream):
                    continue
                for row in rows:  # one bad image fails its batch: find it
                    one = slice(row, row + 1)
                    statuses[row] = self._batch(layout, sources[one], sizes[one], images[one], stream)
        return statuses

    def close(self) -> None:
        """Frees the memory of the engine. The decoder cannot be used afterwards."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            for state in self._states.values():
                self._call("nvjpegJpegStateDestroy", state)
            self._call("nvjpegDestroy", self._handle)
        self._states.clear()

    def __enter__(self) -> PlaneDecoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _batch(
        self,
        layout: int,
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        images: NDArray[np.uint64],
        stream: ctypes.c_void_p,
    ) -> int:
        if layout not in self._states:
            state = ctypes.c_void_p()
            self._call("nvjpegJpegStateCreate", self._handle, ctypes.byref(state))
            self._states[layout] = state
        state = self._states[layout]
        # Sets the batch's size and clears what a failed batch left; takes 6 microseconds.
        self._call("nvjpegDecodeBatchedInitialize", self._handle, state, len(sources), 1, _UNCHANGED)
        return int(
            self._library.nvjpegDecodeBatched(
                self._handle, state, sources.ctypes.data, sizes.ctypes.data, images.ctypes.data, stream
            )
        )

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise NvJpegError(name, status)


def _trial(device: torch.device) -> str:
    """Decodes a few JPEGs made here. Empty if they equal Pillow's, or which do not."""
    from drumline.data.gpu.resample import Resampler

    size = 64
    files, kinds, pictures = [], [], []
    for kind, (mode, subsampling) in _TRIALS.items():
        for side in (size, size + 33):
            y, x = np.mgrid[:side, : side + 6]
            colours = np.stack([x * 7 + y * 3, x * y // 5, (x - y) ** 2 // 9], axis=-1).astype(np.uint8)
            file = io.BytesIO()
            picture = Image.fromarray(colours).convert(mode)
            picture.save(file, "JPEG", quality=92, subsampling=subsampling)
            files.append(np.frombuffer(file.getvalue(), np.uint8))
            kinds.append(kind)
            with Image.open(file) as decoded:
                pictures.append(np.asarray(decoded.convert("RGB"))[:size, :size])
    widths = np.array([size + 6, size + 39] * len(_TRIALS))
    places = place(np.array(kinds), widths, widths - 6)
    lengths = np.array([len(file) for file in files])
    geometry = np.zeros((len(files), 9), np.int32)
    geometry[:, 2] = geometry[:, 4] = places.width
    geometry[:, 3] = geometry[:, 5] = places.height
    out = torch.empty((len(files), size, size, 3), dtype=torch.uint8, device=device)
    arena = Arenas(device).take(places.end)
    with PlaneDecoder(device) as decoder:
        statuses = decoder.decode(np.concatenate(files), np.cumsum(lengths) - lengths, lengths, arena, places)
        Resampler(device, size)(arena, places, geometry, out)
        same = (out.cpu().numpy() == np.stack(pictures)).all(axis=(1, 2, 3)) & (statuses == 0)
    wrong = sorted({PlaneLayout(kinds[row]).name for row in np.flatnonzero(~same)})
    return f"nvJPEG does not decode as Pillow does here ({', '.join(wrong)})" if wrong else ""


_TRIALS = {
    PlaneLayout.YCC_444: ("RGB", 0),
    PlaneLayout.YCC_422: ("RGB", 1),
    PlaneLayout.YCC_420: ("RGB", 2),
    PlaneLayout.GREY: ("L", 0),
}
_HARDWARE, _NO_PIPELINE, _UNCHANGED, _ARCHITECTURE_MISMATCH = 3, 1, 0, 7
_STATUSES = (
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
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "nvjpegCreateEx": (_INT, _POINTER, _POINTER, ctypes.c_uint, _POINTER),
    "nvjpegDestroy": (_POINTER,),
    "nvjpegJpegStateCreate": (_POINTER, _POINTER),
    "nvjpegJpegStateDestroy": (_POINTER,),
    "nvjpegDecodeBatchedInitialize": (_POINTER, _POINTER, _INT, _INT, _INT),
    "nvjpegDecodeBatched": (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
}


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
            tried.append(str(error))
            continue
        return library, ""
    missing = "libnvjpeg is not installed (it comes with CUDA's toolkit and with torchvision for CUDA)"
    return None, "; ".join(tried) or missing


def _candidates() -> Iterator[str]:
    """Where libnvjpeg may be: Python packages, CUDA's toolkit, torchvision's own copy, the system's folders."""
    major = (torch.version.cuda or "0").split(".")[0]
    folders: list[Path] = []
    nvidia = importlib.util.find_spec("nvidia")
    for package in (nvidia.submodule_search_locations or []) if nvidia else []:
        folders += [Path(package, f"cu{major}", "lib"), Path(package, "nvjpeg", "lib")]
    folders.append(Path("/usr/local/cuda/lib64"))
    vision = importlib.util.find_spec("torchvision")
    if vision is not None and vision.origin is not None:
        folders.append(Path(vision.origin).parents[1] / "torchvision.libs")
    for folder in folders:
        yield from (str(path) for path in sorted(folder.glob("libnvjpeg*.so*")))
    found = ctypes.util.find_library("nvjpeg")
    if found:
        yield found
