"""The limits of a sample: checked by structure, before it is decoded, quickly, and in the same way on every path."""

from __future__ import annotations

import math
import os
import struct
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from drumline.config.rules import MAX_SIDE
from drumline.data.examine import examine_sample
from drumline.data.feed.batch import make_batch
from drumline.data.feed.sampler import Request
from drumline.data.feed.threads import threaded_batches
from drumline.data.feed.transform import Transform
from drumline.data.image.decode import (
    MAX_BYTES,
    MAX_PARTS,
    MAX_PIXELS,
    TooLarge,
    check_file,
    decode,
    scans_allowed,
)
from drumline.data.image.jpeg import clean_end, read_header, stream_fault
from drumline.data.packed.format import PackOptions
from drumline.data.packed.write import pack_set
from drumline.data.sources import DatasetSpec, EncodedDataset, open_dataset
from tests.data.damage import encoded, good_jpeg, picture, with_scans
from tests.data.feed.test_threads import assert_equal, fresh
from tests.data.test_native import needs_jpeg


def error_of(data: bytes, exif: str = "apply") -> str:
    started = time.monotonic()
    with pytest.raises(TooLarge) as caught:
        decode(data, "it", exif)  # type: ignore[arg-type]
    assert time.monotonic() - started < 5  # unlimited, each of them takes minutes, or all memory
    return caught.value.what


@pytest.mark.parametrize(
    ("pixels", "scans"), [(1, 100), (12_000_000, 100), (MAX_PIXELS // 2, 40), (MAX_PIXELS, 20)]
)
def test_large_images_may_have_fewer_scans_and_no_photograph_reaches_the_limit(
    pixels: int, scans: int
) -> None:
    assert scans_allowed(pixels) == scans
    assert scans > 2 * 8  # what libjpeg writes for colour is 10


def test_scans_are_counted_as_libjpeg_counts_them() -> None:
    assert "is a JPEG of more than 100 scans" in error_of(with_scans(good_jpeg(1), 101))
    inside = b"\xff\xfe" + (2 + 800).to_bytes(2, "big") + b"\xff\xda" * 400
    thumbnails = good_jpeg(1)[:2] + inside * 2 + good_jpeg(1)[2:]
    video_behind = good_jpeg(1) + b"\xff\xda" * 1_000
    for data in (thumbnails, video_behind, with_scans(good_jpeg(1), 100)):
        decode(data, "it")
    between = with_scans(good_jpeg(1), 60)
    at = between.rindex(b"\xff\xda")
    decode(between[:at] + inside + between[at:], "it")
    sequential = good_jpeg(1)
    again = sequential[sequential.index(b"\xff\xda") : -2]
    assert "scans" in error_of(sequential[:-2] + again * 100 + sequential[-2:])


def gif(blocks: bytes) -> bytes:
    data = encoded(picture().convert("P"), "GIF")
    at = 13 + 3 * 2 ** ((data[10] & 7) + 1)
    return data[:at] + blocks + data[at:]


def tiff(*tags: tuple[int, int, int, int], tail: bytes = b"") -> bytes:
    directory = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + directory + bytes(4) + tail


def repeated_strips() -> bytes:
    """Strips of one-bit pixels, the same ones named over and over: the image is decoded 2,500 times."""
    count, start = 5_000, 14 + 12 * 8
    tags = [(256, 4, 1, 800), (257, 4, 1, 800), (258, 3, 1, 1), (259, 3, 1, 1), (262, 3, 1, 1)]
    tags += [(273, 4, count, start), (278, 4, 1, 799), (279, 4, count, start + 4 * count)]
    offsets = struct.pack(f"<{count}I", *[start + 8 * count] * count)
    return tiff(*tags, tail=offsets + struct.pack(f"<{count}I", *[80_000] * count) + bytes(80_000))


def bmp_rle(side: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 0, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + 40 + 1024) + header + bytes(1024) + b"\0\0" * side


HOSTILE = {
    "fill bytes": (b"\xff\xd8" + b"\xff" * 3_000_000, "segments"),
    "junk before a marker": (b"\xff\xd8\xff\xe0\0\2" + b"a" * 3_000_000 + b"\xff\xda\0\2", "segments"),
    "many exif tags in segments": (
        good_jpeg()[:2]
        + (b"\xff\xe1\xff\xffExif\0\0" + struct.pack("<2sHIH", b"II", 42, 8, 60_000)).ljust(65_537, b"\x07")
        + b"".join(b"\xff\xe1\xff\xffExif\0\0" + b"\x07\0" * 32_763 + b"\x07" for _ in range(12))
        + good_jpeg()[2:],
        "tags",
    ),
    "gif comments": (gif(b"!\xfe" + b"\1a" * MAX_PARTS + b"\0"), "blocks"),
    "gif stray bytes": (gif(b"\1" * 3_000_000), "blocks"),
    "ppm comment": (b"P6\n#" + b"a" * 3_000_000 + b"\n2 2\n255\n" + bytes(12), "header"),
    "ppm decoded in python": (b"P5\n5000 5000\n254\n" + bytes(25_000_000), "decodes slowly"),
    "plain ppm": (b"P2\n5000 5000\n255\n" + b"0 " * 1_000, "decodes slowly"),
    "bmp decoded in python": (bmp_rle(5_000), "decodes slowly"),
    "tiff of many strips": (tiff((273, 4, 200_000, 8)), "strips or tiles"),
    "tiff of huge tiles": (tiff((322, 4, 1, 60_000), (323, 4, 1, 60_000)), "tiles of 60,000"),
    "tiff of repeated strips": (repeated_strips(), "times over"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_would_take_minutes_or_all_memory_are_rejected_at_once(name: str) -> None:
    data, words = HOSTILE[name]
    assert words in error_of(data)


def test_ordinary_files_of_every_format_are_within_the_limits() -> None:
    image = picture(1, 300, 200)
    for kind in ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF"):
        decode(encoded(image, kind), "it", "apply")
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "raw"):
        decode(encoded(image, "TIFF", compression=compression), "it", "apply")
    progressive = encoded(image, progressive=True)
    assert progressive.count(b"\xff\xda") == 10
    frames = [image.rotate(turn) for turn in range(0, 360, 30)]
    for kind in ("PNG", "GIF", "WEBP", "TIFF"):
        decode(encoded(image, kind, save_all=True, append_images=frames), "it", "apply")
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a" * 60_000
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        assert decode(encoded(image, kind, exif=exif), "it", "apply").size == (200, 300)


def test_the_walk_over_headers_and_markers_is_bounded() -> None:
    started = time.monotonic()
    assert read_header(b"\xff\xd8" + b"\xff" * 5_000_000) is None
    assert read_header(good_jpeg()[:2] + b"\xff\xfe\0\2" * 1_000_000 + good_jpeg()[2:]) is None
    at = good_jpeg().index(b"\xff\xda") + 14
    restarts = good_jpeg()[:at] + b"\xff\xd0" * 3_000_000 + good_jpeg()[at:]
    header = read_header(restarts)
    assert header is not None
    assert "markers" in stream_fault(restarts, header)
    assert not clean_end(restarts, header)
    assert time.monotonic() - started < 5


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A folder of two classes with a sparse file of 10 GB under an image's name."""
    for name in ("a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg"):
        place = tmp_path / "photos" / "train" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(good_jpeg(int(name[2]) + (name[0] == "b")))
    with (tmp_path / "photos/train/a/3.jpg").open("wb") as file:
        file.write(good_jpeg())
        os.truncate(file.fileno(), 10_000_000_000)
    return tmp_path / "photos"


@needs_jpeg
def test_a_huge_sparse_file_is_a_broken_sample_on_every_path_and_is_not_read(sparse: Path) -> None:
    source = open_dataset(DatasetSpec("folder", str(sparse), "train"))
    assert isinstance(source, EncodedDataset)
    transform, request = Transform(16, "crop-flip", on_bad="substitute"), Request(0, np.arange(5))
    started = time.monotonic()
    made = make_batch(source, transform, 3, request)
    assert [bad.sample for bad in made.bad] == [2]
    assert f"is too large: 10,000,000,000 bytes (the limit is {MAX_BYTES:,})" in made.bad[0].what
    for threads in (1, 3):
        (threaded,) = threaded_batches(source, transform, 3, [request], threads, fresh)
        assert_equal(threaded, made)
    assert examine_sample(source, 2).findings[0][0] == "bomb"
    assert time.monotonic() - started < 5


@needs_jpeg
def test_a_huge_member_of_an_archive_is_a_broken_sample(sparse: Path, tmp_path: Path) -> None:
    archive = tmp_path / "photos.tar"
    with archive.open("wb") as file:
        for name in ("a/1.jpg", "b/1.jpg", "b/2.jpg"):
            member = tarfile.TarInfo(f"train/{name}")
            data = (sparse / "train" / name).read_bytes()
            member.size = len(data)
            file.write(member.tobuf() + data.ljust(-(-len(data) // 512) * 512, b"\0"))
        huge = tarfile.TarInfo("train/b/3.jpg")
        huge.size = 10_000_000_000 - 10_000_000_000 % 512
        file.write(huge.tobuf(tarfile.GNU_FORMAT))
        os.truncate(file.fileno(), file.tell() + huge.size)
        file.seek(0, 2)
        file.write(bytes(1024))
    source = open_dataset(DatasetSpec("tar", str(archive), "train"))
    assert isinstance(source, EncodedDataset)
    transform = Transform(16, "crop-flip", on_bad="substitute")
    made = make_batch(source, transform, 3, Request(0, np.arange(4)))
    assert {bad.sample for bad in made.bad} == {3}
    assert "is too large" in made.bad[0].what
    (threaded,) = threaded_batches(source, transform, 3, [Request(0, np.arange(4))], 2, fresh)
    assert_equal(threaded, made)


def test_samples_over_the_limits_are_packed_as_unreadable_and_rejected_as_before(tmp_path: Path) -> None:
    for name, data in (("a/1", good_jpeg(1)), ("b/1", with_scans(good_jpeg(2), 150)), ("b/2", good_jpeg(3))):
        place = tmp_path / "photos" / f"{name}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    pack_set(
        "folder", str(tmp_path / "photos"), tmp_path / "packed", PackOptions(), 1, False, lambda text: None
    )
    transform, request = Transform(16, "crop-flip", on_bad="substitute"), Request(0, np.arange(3))
    batches = [
        make_batch(open_dataset(DatasetSpec(kind, str(tmp_path / place), "train")), transform, 3, request)
        for kind, place in (("folder", "photos"), ("packed", "packed"))
    ]
    assert [bad.sample for bad in batches[0].bad] == [bad.sample for bad in batches[1].bad] == [1]
    assert all("scans" in made.bad[0].what for made in batches)
    assert (batches[0].batch.images == batches[1].batch.images).all()


def test_files_that_are_not_images_are_left_to_decode() -> None:
    for data in (b"", b"\xff\xd8\xff", b"II", b"MM\0*\0\0", b"GIF89a", b"P6", b"\x89PNG", b"RIFF"):
        check_file(data, "it")


def test_the_largest_image_size_of_a_recipe_is_within_the_limit_of_pixels() -> None:
    assert math.isqrt(MAX_PIXELS) == MAX_SIDE
