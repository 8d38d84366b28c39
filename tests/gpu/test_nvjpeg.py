"""The GPU's JPEG engine and our kernel beside Pillow: zero differing pixels for what the rule lets through."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile

from drumline.data.gpu.layout import PlaneLayout, layout_of, place
from drumline.data.gpu.nvjpeg import PlaneDecoder, describe, unavailable
from drumline.data.image.jpeg import read_header

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
# Noise of quality 100 with tables of its own does not fit into the buffer that Pillow's encoder has by default.
ImageFile.MAXBLOCK = 1 << 22
SIZE = 48


@pytest.fixture
def decoder() -> Iterator[PlaneDecoder]:
    if reason := unavailable(DEVICE):
        pytest.skip(reason)
    with PlaneDecoder(DEVICE) as made:
        yield made


def test_jpegs_of_all_sizes_samplings_and_qualities_equal_pillow(decoder: PlaneDecoder) -> None:
    draws = np.random.default_rng(0)
    files = []
    for number in range(480):
        width, height = draws.integers(1, 41, 2) if number % 2 else draws.integers(1, 300, 2)
        mode = "L" if number % 9 == 0 else "RGB"
        options = {"quality": int(draws.choice([10, 50, 75, 92, 100]))}
        if mode == "RGB":  # grey with sampling factors is not for the GPU
            options["subsampling"] = int(draws.integers(0, 3))
        if number % 5 == 0:
            options["optimize"] = True
        if number % 7 == 0:
            options["restart_marker_blocks"] = int(draws.integers(1, 20))
        files.append(jpeg(picture(draws, int(width), int(height)).convert(mode), **options))
    windows, statuses, expected = round_trip(decoder, files)
    assert not statuses.any()
    for window, wanted in zip(windows, expected, strict=True):
        assert np.array_equal(window, wanted)


def test_a_second_batch_of_different_sizes_is_right(decoder: PlaneDecoder) -> None:
    draws = np.random.default_rng(1)
    for count, side in ((3, 20), (40, 200), (1, 700), (9, 60)):
        files = [jpeg(picture(draws, side, side + k), subsampling=k % 3) for k in range(count)]
        windows, statuses, expected = round_trip(decoder, files)
        assert not statuses.any()
        assert np.array_equal(windows, expected)


def test_an_image_the_engine_rejects_is_named_and_the_others_are_right(decoder: PlaneDecoder) -> None:
    draws = np.random.default_rng(2)
    files = [jpeg(picture(draws, 100, 80), subsampling=2) for _ in range(12)]
    files[5] = jpeg(picture(draws, 100, 80), subsampling=2, progressive=True)
    layouts = np.full(12, int(PlaneLayout.YCC_420))
    windows, statuses, expected = round_trip(decoder, files, layouts)
    assert np.flatnonzero(statuses).tolist() == [5]
    assert "not supported" in describe(int(statuses[5]))
    fine = statuses == 0
    assert np.array_equal(windows[fine], expected[fine])


def test_an_empty_batch_is_valid(decoder: PlaneDecoder) -> None:
    nothing = np.empty(0, np.int64)
    arena = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    places = place(nothing, nothing, nothing)
    assert len(decoder.decode(np.empty(0, np.uint8), nothing, nothing, arena, places)) == 0


def test_decoding_does_not_wait_for_work_queued_on_another_stream(decoder: PlaneDecoder) -> None:
    draws = np.random.default_rng(3)
    files = [jpeg(picture(draws, 300, 200), subsampling=0) for _ in range(32)]
    round_trip(decoder, files)
    matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    done = torch.cuda.Event()

    def decode() -> None:
        with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            round_trip(decoder, files)

    thread = threading.Thread(target=decode)
    for _ in range(3000):  # some four seconds
        torch.mm(matrix, matrix, out=torch.empty_like(matrix))
    done.record()
    thread.start()
    thread.join()
    assert not done.query()


def picture(draws: np.random.Generator, width: int, height: int) -> Image.Image:
    """Something smooth with noise on it."""
    coarse = draws.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + draws.integers(-25, 26, smooth.shape)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def round_trip(
    decoder: PlaneDecoder, files: list[bytes], layouts: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.uint8]]:
    """Windows by the GPU, statuses, and the windows Pillow makes of the same files: the whole image, resized."""
    from drumline.data.gpu.resample import Resampler

    headers = [read_header(file) for file in files]
    assert all(header is not None for header in headers)
    if layouts is None:
        layouts = np.array([layout_of(header) for header in headers if header is not None])
    widths = np.array([header.width for header in headers if header is not None])
    heights = np.array([header.height for header in headers if header is not None])
    places = place(layouts, widths, heights)
    geometry = np.zeros((len(files), 9), np.int32)
    geometry[:, 2], geometry[:, 3], geometry[:, 4:6] = widths, heights, SIZE
    lengths = np.array([len(file) for file in files])
    arena = torch.full((places.end,), 77, dtype=torch.uint8, device=DEVICE)
    torch.cuda.current_stream().synchronize()  # the engine would not wait for the fill
    encoded = np.frombuffer(b"".join(files), np.uint8)
    statuses = decoder.decode(encoded, np.cumsum(lengths) - lengths, lengths, arena, places)
    out = torch.empty((len(files), SIZE, SIZE, 3), dtype=torch.uint8, device=DEVICE)
    Resampler(DEVICE, SIZE)(arena, places, geometry, out)
    pillow = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    expected = [np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)) for image in pillow]
    host = torch.empty(out.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(out, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return host.numpy(), statuses, np.stack(expected)
