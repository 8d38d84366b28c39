"""The resampling kernel beside Pillow, libjpeg's upsampling and `Normalise`: zero differing pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from drumline.data.gpu.layout import Places, PlaneLayout, chroma_size, place
from drumline.data.image.resize import Version, coefficients, vertical_first

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
Pixels = NDArray[np.uint8]


@pytest.mark.parametrize("version", ["pillow12", "pillow13"])
@pytest.mark.parametrize("size", [1, 31, 64, 224])
def test_1600_random_crops_equal_pillow(version: Version, size: int) -> None:
    draws = np.random.default_rng(size)
    layouts = draws.integers(0, 3, 200)
    images = [
        draws.integers(
            0, 256, (*draws.integers(1, 420, 2), 1 if layout == PlaneLayout.GREY else 3), dtype=np.uint8
        )
        for layout in layouts
    ]
    places, arena = stored(layouts, images)
    geometry = random_geometry(draws, places, size)
    got = resampled(arena, places, geometry, size, version)
    for image, row, window in zip(images, geometry, got, strict=True):
        rgb = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
        assert np.array_equal(window, by_pillow(rgb, row, size, version))


@pytest.mark.parametrize(
    "layout", [PlaneLayout.YCC_444, PlaneLayout.YCC_422, PlaneLayout.YCC_420, PlaneLayout.YCC_440]
)
def test_planes_are_upsampled_and_converted_as_libjpeg_does(layout: PlaneLayout) -> None:
    draws = np.random.default_rng(layout)
    heights, widths = draws.integers(1, 90, (2, 150))
    heights[:8], widths[:8] = [1, 1, 2, 3, 60, 5, 7, 8], [1, 2, 3, 4, 5, 60, 6, 1]
    layouts = np.full(150, int(layout))
    places = place(layouts, widths, heights)
    arena = draws.integers(0, 256, places.end, dtype=np.uint8)
    size = 40
    geometry = random_geometry(draws, places, size)
    got = resampled(arena, places, geometry, size)
    for image, (row, window) in enumerate(zip(geometry, got, strict=True)):
        assert np.array_equal(window, by_pillow(by_libjpeg(arena, places, image), row, size, "pillow12"))


def test_weights_stay_right_when_the_table_grows_or_is_rebuilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from drumline.data.gpu import resample

    monkeypatch.setattr(resample, "TABLE_BYTES", 3 << 20)
    table = resample._WeightTable(DEVICE, "bilinear")
    peak = 0
    for start in range(1, 1200, 100):
        sources = np.arange(start, start + 100)
        targets = np.full(100, 224)
        entries = table.find(sources, targets)
        words = table.table.cpu().numpy()
        for source, (at, taps) in zip(sources, entries, strict=True):
            first, count, weights = coefficients(int(source), 224)
            entry = words[at : at + 224 * (2 + taps)].reshape(2 + taps, 224)
            assert np.array_equal(entry, np.concatenate([[first], [count], weights.T]))
        peak = max(peak, table.used)
    assert 4 * peak <= 3 << 20


def test_a_batch_costs_under_2_ms() -> None:
    from triton.testing import do_bench

    from drumline.data.gpu.resample import Resampler

    places = place(np.full(256, PlaneLayout.YCC_420), np.full(256, 500), np.full(256, 375))
    arena = torch.randint(0, 256, (places.end,), dtype=torch.uint8, device=DEVICE)
    geometry = np.tile(np.array([0, 0, 500, 375, 224, 224, 0, 0, 1], np.int32), (256, 1))
    out = torch.empty((256, 224, 224, 3), dtype=torch.uint8, device=DEVICE)
    resample = Resampler(DEVICE, 224)
    assert do_bench(lambda: resample(arena, places, geometry, out), rep=50, return_mode="median") < 2


def stored(layouts: NDArray[np.int64], images: list[Pixels]) -> tuple[Places, Pixels]:
    """RGB, grey and planar RGB images in an arena."""
    places = place(
        layouts,
        np.array([image.shape[1] for image in images]),
        np.array([image.shape[0] for image in images]),
    )
    arena = np.full(places.end, 77, np.uint8)
    for number, (layout, image) in enumerate(zip(layouts, images, strict=True)):
        parts = (
            np.moveaxis(image, 2, 0) if layout == PlaneLayout.RGB_PLANES else [image.reshape(len(image), -1)]
        )
        for part, start, pitch in zip(parts, places.offsets[number], places.pitches[number], strict=False):
            rows = arena[start : start + pitch * len(part)].reshape(len(part), pitch)
            rows[:, : part.shape[1]] = part
    return places, arena


def random_geometry(draws: np.random.Generator, places: Places, size: int) -> NDArray[np.int32]:
    rows = []
    for width, height in zip(places.width, places.height, strict=True):
        left, top = draws.integers(0, width), draws.integers(0, height)
        right, bottom = draws.integers(left, width) + 1, draws.integers(top, height) + 1
        across, down = size + draws.integers(0, 60, 2) * draws.integers(0, 2)
        x, y = draws.integers(0, across - size + 1), draws.integers(0, down - size + 1)
        rows.append((left, top, right, bottom, across, down, x, y, draws.integers(0, 2)))
    return np.array(rows, np.int32)


def resampled(
    arena: Pixels, places: Places, geometry: NDArray[np.int32], size: int, version: Version = "pillow12"
) -> Pixels:
    from drumline.data.gpu.resample import Resampler

    out = torch.full((len(geometry), size, size, 3), 9, dtype=torch.uint8, device=DEVICE)
    Resampler(DEVICE, size, version)(torch.from_numpy(arena).to(DEVICE), places, geometry, out)
    return out.cpu().numpy()


def by_pillow(image: Pixels, row: NDArray[np.int32], size: int, version: Version) -> Pixels:
    """One axis at a time, which every version of Pillow does alike."""
    left, top, right, bottom, width, height, x, y, mirror = row.tolist()
    picture = Image.fromarray(image).crop((left, top, right, bottom))
    columns_first = vertical_first(version, picture.width, picture.height, width, height)
    between = (picture.width, height) if columns_first else (width, picture.height)
    picture = picture.resize(between, Image.Resampling.BILINEAR)
    window = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))[
        y : y + size, x : x + size
    ]
    return window[:, ::-1] if mirror else window


def by_libjpeg(arena: Pixels, places: Places, image: int) -> Pixels:
    """Planes to RGB, written after libjpeg's description, whole planes at a time."""
    layout = PlaneLayout(places.layout[image])
    width, height = int(places.width[image]), int(places.height[image])
    one = places.rows(np.array([image]))
    across, down = (int(side[0]) for side in chroma_size(one.layout, one.width, one.height))
    planes = []
    for number, (columns, rows) in enumerate([(width, height), (across, down), (across, down)]):
        start, pitch = places.offsets[image, number], places.pitches[image, number]
        planes.append(arena[start : start + pitch * rows].reshape(rows, pitch)[:, :columns].astype(np.int64))
    luma, *chroma = planes
    blue_difference, red_difference = (upsampled(plane, layout)[:height, :width] - 128 for plane in chroma)
    red = luma + ((91881 * red_difference + 32768) >> 16)
    green = luma + ((-22554 * blue_difference - 46802 * red_difference + 32768) >> 16)
    blue = luma + ((116130 * blue_difference + 32768) >> 16)
    return np.clip(np.stack([red, green, blue], axis=-1), 0, 255).astype(np.uint8)


def upsampled(plane: NDArray[np.int64], layout: PlaneLayout) -> NDArray[np.int64]:
    wider, taller = (
        layout in (PlaneLayout.YCC_422, PlaneLayout.YCC_420),
        layout in (PlaneLayout.YCC_440, PlaneLayout.YCC_420),
    )
    if wider and plane.shape[1] <= 2:
        return plane.repeat(2, axis=1).repeat(2 if taller else 1, axis=0)
    before, after = 1, 2
    if taller:
        above, below = np.vstack([plane[:1], plane[:-1]]), np.vstack([plane[1:], plane[-1:]])
        pair = np.stack([3 * plane + above, 3 * plane + below], axis=1)
        if not wider:
            return ((pair + np.array([1, 2])[:, None]) >> 2).reshape(-1, plane.shape[1])
        plane, before, after = pair.reshape(-1, plane.shape[1]), 8, 7
    if wider:
        left, right = np.hstack([plane[:, :1], plane[:, :-1]]), np.hstack([plane[:, 1:], plane[:, -1:]])
        pair = np.stack([3 * plane + left + before, 3 * plane + right + after], axis=2)
        return (pair >> (4 if taller else 2)).reshape(len(plane), -1)
    return plane
