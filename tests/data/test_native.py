"""The native part against Pillow: windows of JPEG files of every kind, pixel by pixel; threads that leave nothing."""

from __future__ import annotations

import ctypes
import io
import shutil
import struct
import subprocess
import sys
import threading
import time
from os import environ
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from drumline import native
from drumline.data.feed.transform import COLUMNS, evaluation_geometry
from drumline.data.image.decode import decode
from drumline.data.image.resize import Filter, Version, resize_by_pillow, vertical_first

FILTERS: tuple[Filter, ...] = ("bilinear", "bicubic", "box", "lanczos")
VERSIONS: tuple[Version, ...] = ("pillow12", "pillow13")
needs_jpeg = pytest.mark.skipif(not native.decodes_jpeg(), reason="the native part has no libjpeg-turbo")
needs_native = pytest.mark.skipif(not native.available(), reason="the native part is not built")
Pixels = NDArray[np.uint8]


def photo(seed: int, width: int, height: int) -> Pixels:
    """Smooth shapes with some grain, so that chroma smoothing has something to smooth."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (height // 9 + 2, width // 9 + 2, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    return np.clip(np.asarray(smooth) + draw.integers(-25, 26, (height, width, 3)), 0, 255).astype(np.uint8)


def jpeg(pixels: Pixels, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", **options)
    return file.getvalue()


def frame(data: bytes) -> int:
    """Where the frame header (SOF0 to SOF2) begins."""
    at = 2
    while not 0xC0 <= data[at + 1] <= 0xC2:
        filled = data[at + 1] == 0xFF
        at += 1 if filled else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return at


def reframed(data: bytes, width: int, height: int, luma: int) -> bytes:
    """The same coded blocks under another frame: other sides and another sampling of luma, with as many blocks in a
    unit and as many units. The picture is scrambled, but the file is sound: a kind that Pillow does not write."""
    at = frame(data)
    return (
        data[: at + 5]
        + struct.pack(">HH", height, width)
        + data[at + 9 : at + 11]
        + bytes([luma])
        + data[at + 12 :]
    )


def in_three_scans(width: int, height: int, halved: bool) -> bytes:
    """A baseline file that holds its three planes one after the other, of three grey files."""
    sides = (width, height), *[((width + 1) // 2, (height + 1) // 2) if halved else (width, height)] * 2
    planes = [jpeg(photo(seed, *side)[..., seed], quality=80) for seed, side in enumerate(sides)]
    at = frame(planes[0])
    sampling = (0x22 if halved else 0x11, 0x11, 0x11)
    components = b"".join(bytes([number + 1, sampling[number], 0]) for number in range(3))
    parts = [planes[0][:at], b"\xff\xc0", struct.pack(">HBHHB", 17, 8, height, width, 3), components]
    scans = [plane.index(b"\xff\xda") for plane in planes]
    parts.append(planes[0][at + 13 : scans[0]])
    for number, (plane, scan) in enumerate(zip(planes, scans, strict=True)):
        parts += [b"\xff\xda\0\x08\x01", bytes([number + 1]), b"\0\0\x3f\0", plane[scan + 10 : -2]]
    return b"".join([*parts, b"\xff\xd9"])


def kinds(seed: int, width: int, height: int) -> dict[str, bytes]:
    """One picture in every kind of file that the native part takes."""
    pixels = photo(seed, width, height)
    exif = Image.Exif()
    exif[0x0112] = 6
    # Whole units, so that the same number of blocks can be laid out otherwise.
    wide, high = -(-width // 16) * 16, -(-height // 16) * 16
    quality = 30 + seed * 17 % 70
    return {
        "4:4:4": jpeg(pixels, subsampling="4:4:4", quality=quality),
        "4:2:2": jpeg(pixels, subsampling="4:2:2", quality=quality),
        "4:2:0": jpeg(pixels, subsampling="4:2:0", quality=quality),
        "4:4:0": reframed(
            jpeg(photo(seed, height, width), subsampling="4:2:2", quality=90), width, height, 0x12
        ),
        "4:1:1": reframed(jpeg(photo(seed, wide, high), quality=90), 2 * wide - seed % 32, high // 2, 0x41),
        "1x4": reframed(jpeg(photo(seed, wide, high), quality=90), wide // 2, 2 * high - seed % 32, 0x14),
        "grey": jpeg(pixels[..., 0], quality=quality),
        "unconverted RGB": jpeg(pixels, keep_rgb=True, quality=quality),
        "progressive": jpeg(pixels, progressive=True, quality=quality),
        "progressive 4:4:4": jpeg(pixels, progressive=True, quality=quality, subsampling=0),
        "progressive grey": jpeg(pixels[..., 1], progressive=True, quality=quality),
        "optimised": jpeg(pixels, optimize=True, quality=quality),
        "restarts": jpeg(pixels, restart_marker_blocks=1 + seed % 5, quality=quality),
        "restarts by row": jpeg(pixels, restart_marker_rows=1, progressive=bool(seed % 2), quality=quality),
        "three scans": in_three_scans(width, height, halved=False),
        "three scans 4:2:0": in_three_scans(width, height, halved=True),
        "exif": jpeg(pixels, exif=exif, quality=quality),
        "profile and comment": jpeg(pixels, icc_profile=bytes(300), comment=b"words", quality=quality),
        "bytes after the end": jpeg(pixels, quality=quality) + b"\0\xff\xd8\xff\xda\xff" * 9,
        "filled before a marker": jpeg(pixels, quality=quality)[:2]
        + b"\xff\xff"
        + jpeg(pixels, quality=quality)[2:],
        "one quantisation for all": jpeg(pixels, qtables=[[1 + seed % 9] * 64]),
    }


def expected_window(
    image: Pixels, row: NDArray[np.int32], size: int, filter: Filter, version: Version
) -> Pixels:
    left, top, right, bottom, width, height, x, y, mirror = row.tolist()
    columns_first = vertical_first(version, right - left, bottom - top, width, height)
    resized = resize_by_pillow(image[top:bottom, left:right], (width, height), columns_first, filter)
    window = resized[y : y + size, x : x + size]
    return window[:, ::-1] if mirror else window


def random_row(draw: np.random.Generator, width: int, height: int) -> tuple[NDArray[np.int32], int]:
    """A geometry row inside an image, and the size of its window: crops, windows of an enlarged or reduced whole."""
    size = int(draw.integers(1, 33))
    mirror = int(draw.integers(0, 2))
    if draw.random() < 0.3:
        return evaluation_geometry(np.array([[width, height]]), size, float(draw.uniform(0.3, 1.0)))[0], size
    left, top = int(draw.integers(0, width)), int(draw.integers(0, height))
    if draw.random() < 0.3:  # only a few columns or rows, where chroma smoothing has no neighbours
        right, bottom = (
            min(width, left + int(draw.integers(1, 4))),
            min(height, top + int(draw.integers(1, 4))),
        )
    else:
        right, bottom = int(draw.integers(left + 1, width + 1)), int(draw.integers(top + 1, height + 1))
    wide, high = size + int(draw.integers(0, 9)), size + int(draw.integers(0, 9))
    x, y = int(draw.integers(0, wide - size + 1)), int(draw.integers(0, high - size + 1))
    return np.array([left, top, right, bottom, wide, high, x, y, mirror], np.int32), size


def stored_size(data: bytes) -> tuple[int, int]:
    stored = native.jpeg_size(data)
    assert stored is not None
    return stored[:2]


@needs_jpeg
@pytest.mark.parametrize("kind", kinds(0, 40, 30))
def test_windows_of_every_kind_of_jpeg_are_pillows(kind: str) -> None:
    draw = np.random.default_rng(1)
    for seed in range(24):
        width, height = (int(side) for side in draw.integers(1, 30 if seed < 5 else 110, 2))
        data = kinds(seed, width, height)[kind]
        image = np.asarray(decode(data, kind))
        assert stored_size(data) == image.shape[1::-1]
        for number in range(32):
            row, size = random_row(draw, image.shape[1], image.shape[0])
            filter, version = FILTERS[number % 4], VERSIONS[number // 4 % 2]
            found = native.jpeg_crop(data, image.shape[1::-1], row, size, filter, version)
            assert found is not None, (kind, row)
            assert np.array_equal(found, expected_window(image, row, size, filter, version)), (kind, row)


@needs_jpeg
@pytest.mark.parametrize("kind", ["4:2:0", "4:2:2", "4:4:0", "4:1:1", "progressive", "three scans 4:2:0"])
def test_every_single_column_and_row_is_pillows(kind: str) -> None:
    """libjpeg-turbo smooths a lone chroma sample otherwise than one that has neighbours."""
    for width, height in ((5, 6), (18, 17), (34, 33)):
        data = kinds(3, width, height)[kind]
        image = np.asarray(decode(data, kind))
        high, wide = image.shape[:2]
        boxes = [(x, y, x + 1, y + 1) for x in range(wide) for y in (0, high // 2, high - 1)]
        boxes += [(x, y, x + 1, y + 1) for y in range(high) for x in (0, wide // 2, wide - 1)]
        boxes += [(x, 0, x + 2, high) for x in range(wide - 1)] + [
            (0, y, wide, y + 2) for y in range(high - 1)
        ]
        for box in boxes:
            row = np.array([*box, 4, 4, 0, 0, 0], np.int32)
            found = native.jpeg_crop(data, (wide, high), row, 4, "bilinear", "pillow12")
            assert found is not None
            assert np.array_equal(found, expected_window(image, row, 4, "bilinear", "pillow12")), box


@needs_jpeg
@pytest.mark.parametrize(
    ("width", "height"), [(w, h) for w in range(1, 6) for h in range(1, 6)] + [(1, 300), (300, 1)]
)
def test_the_smallest_images_are_pillows(width: int, height: int) -> None:
    for kind, data in kinds(5, width, height).items():
        image = np.asarray(decode(data, kind))
        row = np.array([0, 0, *image.shape[1::-1], 7, 9, 0, 2, 1], np.int32)
        found = native.jpeg_crop(data, image.shape[1::-1], row, 7, "bilinear", "pillow13")
        assert found is not None
        assert np.array_equal(found, expected_window(image, row, 7, "bilinear", "pillow13")), kind


WHOLE = np.array([0, 0, 40, 30, 8, 8, 0, 0, 0], np.int32)


@needs_jpeg
def test_other_colour_spaces_and_other_formats_are_left_to_pillow() -> None:
    pixels = photo(1, 40, 30)
    file = io.BytesIO()
    Image.fromarray(pixels).convert("CMYK").save(file, "JPEG")
    assert native.jpeg_crop(file.getvalue(), (40, 30), WHOLE, 8, "bilinear", "pillow12") is None
    for format in ("PNG", "WEBP", "BMP", "GIF", "TIFF"):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format)
        assert native.jpeg_size(file.getvalue()) is None
        assert native.jpeg_crop(file.getvalue(), (40, 30), WHOLE, 8, "bilinear", "pillow12") is None


@needs_jpeg
def test_a_header_that_says_another_size_is_left_to_pillow() -> None:
    """Geometry was made for the size that was looked up; it must not be used for another."""
    data = jpeg(photo(1, 40, 30))
    for stored in ((41, 30), (40, 29), (30, 40), (400, 300)):
        assert native.jpeg_crop(data, stored, WHOLE, 8, "bilinear", "pillow12") is None


@needs_jpeg
def test_sizes_are_read_from_headers_of_any_length() -> None:
    data = jpeg(photo(1, 40, 30))
    assert native.jpeg_size(data) == (40, 30, 0)
    end = frame(data) + 9
    for length in range(end):
        assert native.jpeg_size(data[:length]) is None
    assert native.jpeg_size(data[: data.index(b"\xff\xda") + 14]) == (40, 30, 0)
    assert native.jpeg_size(b"") is None


@needs_jpeg
def test_metadata_that_may_hold_an_orientation_is_detected() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for options in ({"exif": exif}, {"xmp": b'<x tiff:Orientation="6"/>'}):
        assert native.jpeg_size(jpeg(photo(1, 40, 30), **options)) == (40, 30, 1)


@needs_jpeg
def test_warnings_of_libjpeg_are_counted_and_errors_reported() -> None:
    data = jpeg(photo(1, 40, 30))
    assert native.jpeg_warnings(data) == 0
    assert native.jpeg_warnings(data[:-40]) is not None
    assert native.jpeg_warnings(data[:-40]) != 0
    assert native.jpeg_warnings(data[:100]) == -1
    assert native.jpeg_warnings(b"") == -1


@needs_native
def test_windows_of_decoded_images_are_pillows() -> None:
    draw = np.random.default_rng(2)
    for number in range(400):
        width, height = (int(side) for side in draw.integers(1, 80, 2))
        image = draw.integers(0, 256, (height, width, (1, 3)[number % 2]), dtype=np.uint8)
        row, size = random_row(draw, width, height)
        filter, version = FILTERS[number % 4], VERSIONS[number // 4 % 2]
        left, top, right, bottom, wide, high = row[:6].tolist()
        order = vertical_first(version, right - left, bottom - top, wide, high)
        found = native.crop(image, row, (size, size), filter, order)
        assert np.array_equal(found, expected_window(image, row, size, filter, version)), row


@needs_native
def test_arrays_outlive_the_calls_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may take memory during a call, and would get memory that was freed."""
    seen: list[list[int]] = []

    def taking(*arguments: object) -> int:
        others = [np.full(count, 99, np.int32) for count in (2, 3, COLUMNS) for _ in range(20)]
        pointers = [(2, 2), (3, COLUMNS)] if len(arguments) == 8 else [(3, COLUMNS)]
        for place, count in pointers:
            seen.append(list((ctypes.c_int32 * count).from_address(arguments[place])))  # type: ignore[arg-type]
        return len(others) * 0

    library = SimpleNamespace(drum_make_window=taking, drum_resize=taking)
    monkeypatch.setattr(native, "_library", lambda: library)
    native.jpeg_crop(b"", (40, 30), WHOLE.astype(np.int64), 8, "bilinear", "pillow12")  # type: ignore[arg-type]
    native.crop(np.zeros((30, 40, 3), np.uint8), WHOLE.astype(np.int64), (8, 8), "box", False)  # type: ignore[arg-type]
    assert seen == [[40, 30], WHOLE.tolist(), WHOLE.tolist()]


@needs_native
def test_closing_a_pool_ends_its_threads() -> None:
    known = threading.active_count()
    before = tasks()
    pool = native.Pool(5)
    assert tasks() == before + 5
    assert threading.active_count() == known
    pool.close()
    assert tasks() == before
    pool.close()


@needs_native
def test_an_empty_job_and_many_jobs_at_once_are_done_in_any_order_of_waiting() -> None:
    data = jpeg(photo(1, 40, 30))
    pool = native.Pool(3)
    try:
        pool.wait(pool.submit(native.Work(kind=native.READ_SIZES, count=0)))
        jobs = []
        for count in (1, 7, 2, 30, 5):
            pointers = np.full(count, address_of(data), np.uint64)
            lengths = np.full(count, len(data), np.int64)
            stored, status = np.zeros((count, native.STORED), np.int32), np.full(count, 9, np.int32)
            work = native.Work(
                kind=native.READ_SIZES,
                count=count,
                data=pointers.ctypes.data,
                lengths=lengths.ctypes.data,
                stored=stored.ctypes.data,
                status=status.ctypes.data,
            )
            jobs.append((pool.submit(work), (pointers, lengths), stored, status))
        for job, _, stored, status in reversed(jobs):
            pool.wait(job)
            assert (stored == [40, 30, 0]).all()
            assert (status == 0).all()
    finally:
        pool.close()


@needs_native
def test_buffers_of_files_are_reused_and_large_ones_freed(tmp_path: Path) -> None:
    small, smaller, large = tmp_path / "small", tmp_path / "smaller", tmp_path / "large"
    small.write_bytes(jpeg(photo(1, 40, 30)))
    smaller.write_bytes(jpeg(photo(1, 20, 10), quality=20))
    large.write_bytes(jpeg(photo(1, 40, 30)) + bytes(3 << 20))
    pool = native.Pool(2)
    data, lengths, rooms = np.zeros(1, np.uint64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    stored, status = np.zeros((1, native.STORED), np.int32), np.zeros(1, np.int32)

    def read(path: Path) -> None:
        paths = (ctypes.c_char_p * 1)(str(path).encode())
        work = native.Work(
            kind=native.READ_FILES,
            count=1,
            paths=ctypes.addressof(paths),
            data=data.ctypes.data,
            lengths=lengths.ctypes.data,
            rooms=rooms.ctypes.data,
            stored=stored.ctypes.data,
            status=status.ctypes.data,
        )
        pool.wait(pool.submit(work))

    try:
        read(small)
        assert ctypes.string_at(int(data[0]), int(lengths[0])) == small.read_bytes()
        assert stored[0].tolist() == [40, 30, 0]
        first, room = int(data[0]), int(rooms[0])
        for _ in range(20):
            read(smaller)
            assert lengths[0] == smaller.stat().st_size
            read(small)
            assert (int(data[0]), int(rooms[0])) == (first, room)
        read(large)
        assert large.stat().st_size <= rooms[0] <= large.stat().st_size + (64 << 10)
        read(small)
        assert small.stat().st_size <= rooms[0] <= 64 << 10
        read(tmp_path / "missing")
        assert status[0] == 2
        read(tmp_path)
        assert status[0] != 0
        before = descriptors()
        for _ in range(30):
            read(small)
            read(tmp_path)
        assert descriptors() == before
    finally:
        pool.close()
        native.free_files(data, rooms)
    assert data[0] == 0
    assert rooms[0] == 0


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_machines_without_vector_units_give_the_same_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain loops, built here without their twins for AVX2."""
    folder = Path(native.__file__).parent
    for file in (*folder.glob("*.c"), *folder.glob("*.h")):
        text = file.read_text()
        (tmp_path / file.name).write_text(text.replace("#define HAVE_AVX2_VERSION 1", ""))
    assert "HAVE_AVX2_VERSION 1" in (folder / "resample.c").read_text()
    sources = [str(file) for file in sorted(tmp_path.glob("*.c"))]
    flags = ["-O2", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC", "-o", str(tmp_path / "plain.so")]
    subprocess.run(["cc", *sources, *flags, "-lm", "-lpthread"], check=True)
    library = ctypes.CDLL(str(tmp_path / "plain.so"))
    native._declare(library)
    monkeypatch.setattr(native, "_loaded", lambda: (library, ""))
    assert not native.decodes_jpeg()
    assert "without libjpeg-turbo" in native.describe()
    test_windows_of_decoded_images_are_pillows()


@needs_native
def test_a_build_of_other_sources_is_not_used(tmp_path: Path) -> None:
    """As after an update without a new install: another layout would overwrite memory."""
    code = """
import ctypes, sys
from drumline import native
native.Work._fields_  # what Python believes
class Longer(ctypes.Structure):
    _fields_ = (*native.Work._fields_, ("more", ctypes.c_int64))
native.Work = Longer
print(native.available(), native.describe())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False was built from other sources: install drumline again"


def test_the_native_part_can_be_turned_off_and_reports_that() -> None:
    code = "from drumline import native; print(native.available(), native.decodes_jpeg(), native.describe())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "DRUMLINE_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False False turned off by DRUMLINE_NATIVE=0"


def test_the_geometry_has_as_many_columns_as_the_native_part_reads() -> None:
    header = Path(native.__file__).with_name("drumline.h").read_text()
    names = header.split("enum { LEFT", 1)[1].split("}", 1)[0]
    assert names.count(",") == COLUMNS


def tasks() -> int:
    """Threads of this process, Python's and others; one that has ended may take a moment to leave."""
    time.sleep(0.02)
    return len(list(Path("/proc/self/task").iterdir()))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
