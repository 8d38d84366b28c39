"""Which JPEGs may be decoded on the GPU, and how images lie in the arena. Needs no GPU."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from drumline.data.gpu.layout import MAX_SIDE, PlaneLayout, decodes_equal, layout_of, layout_of_file, place
from drumline.data.image.jpeg import JpegHeader, read_header


def jpeg(mode: str = "RGB", **save: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (40, 30)).save(file, "JPEG", **save)
    return file.getvalue()


def header(mode: str = "RGB", **save: object) -> JpegHeader:
    read = read_header(jpeg(mode, **save))
    assert read is not None
    return read


@pytest.mark.parametrize(
    ("made", "layout"),
    [
        (header(subsampling=0), PlaneLayout.YCC_444),
        (header(subsampling=1), PlaneLayout.YCC_422),
        (header(subsampling=2), PlaneLayout.YCC_420),
        (header("L"), PlaneLayout.GREY),
        (header(optimize=True, restart_marker_rows=1), PlaneLayout.YCC_420),
        (replace(header(), sampling=((1, 2), (1, 1), (1, 1))), PlaneLayout.YCC_440),
        (replace(header(), jfif=False, adobe_transform=1), PlaneLayout.YCC_420),
        (replace(header(), jfif=False, component_ids=(0, 1, 2)), PlaneLayout.YCC_420),
        (
            replace(header(subsampling=0), adobe_transform=0),
            PlaneLayout.YCC_444,
        ),  # libjpeg: JFIF outranks Adobe
        (replace(header(subsampling=0), jfif=False, adobe_transform=0), PlaneLayout.RGB_PLANES),
        (replace(header(subsampling=0), jfif=False, component_ids=(82, 71, 66)), PlaneLayout.RGB_PLANES),
    ],
)
def test_kinds_of_jpeg_that_were_tested_equal_are_decoded_on_the_gpu(
    made: JpegHeader, layout: PlaneLayout
) -> None:
    assert decodes_equal(made) == ""
    assert layout_of(made) == layout


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (header(progressive=True), "progressive"),
        (header("CMYK"), "4 components"),
        (replace(header(), frame=0xC1), "not a baseline frame"),
        (replace(header(), precision=12), "not a baseline frame"),
        (replace(header(), scan_components=1), "several scans"),
        (replace(header(), sampling=((4, 1), (1, 1), (1, 1))), "unusual sampling"),
        (replace(header(), sampling=((2, 2), (1, 2), (1, 1))), "unusual sampling"),
        (replace(header("L"), sampling=((2, 2),)), "unusual sampling"),
        (replace(header(), adobe_transform=3), "Adobe transform 3"),
        (replace(header(), jfif=False, adobe_transform=0), "RGB with subsampling"),
        (replace(header(), width=MAX_SIDE + 1), "larger than what was tried"),
        (replace(header(), width=5000, height=5000), "larger than what was tried"),
    ],
)
def test_other_files_stay_on_the_cpu_with_a_reason(made: JpegHeader, reason: str) -> None:
    assert reason in decodes_equal(made)
    assert layout_of(made) is None


def test_a_file_is_accepted_by_its_header_and_its_restart_markers() -> None:
    restarts = jpeg(restart_marker_blocks=2)
    assert layout_of_file(restarts) == layout_of_file(jpeg()) == PlaneLayout.YCC_420
    assert layout_of_file(restarts.replace(b"\xff\xd1", b"\xff\xd3", 1)) is None, "one is out of order"
    assert layout_of_file(jpeg(progressive=True)) is None
    assert layout_of_file(b"GIF89a") is None


def test_places_never_overlap_and_rows_are_aligned() -> None:
    draws = np.random.default_rng(0)
    layouts, widths, heights = (
        draws.integers(0, 7, 200),
        draws.integers(1, 60, 200),
        draws.integers(1, 60, 200),
    )
    places = place(layouts, widths, heights)
    owner = np.full(places.end, -1)
    for image in range(200):
        layout, width, height = PlaneLayout(layouts[image]), widths[image], heights[image]
        half_x = layout in (PlaneLayout.YCC_422, PlaneLayout.YCC_420)
        half_y = layout in (PlaneLayout.YCC_440, PlaneLayout.YCC_420)
        chroma = (-(-width // 2) if half_x else width, -(-height // 2) if half_y else height)
        planes = [(3 * width if layout == PlaneLayout.RGB else width, height)]
        if layout > PlaneLayout.GREY:
            planes += [chroma, chroma]
        for number, (across, down) in enumerate(planes):
            start, pitch = places.offsets[image, number], places.pitches[image, number]
            assert start % 16 == 0
            assert pitch % 16 == 0
            assert pitch >= across
            for row in range(down):
                begin = start + row * pitch
                assert (owner[begin : begin + across] == -1).all()
                owner[begin : begin + across] = image
    assert np.array_equal(places.rows(np.array([7, 3])).offsets, places.offsets[[7, 3]])


def test_no_images_need_no_bytes() -> None:
    nothing = np.empty(0, np.int64)
    assert place(nothing, nothing, nothing).end == 0
