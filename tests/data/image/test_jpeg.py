"""The JPEG header: what Pillow reads, never an exception, and a clean end distinguished from a damaged one."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from drumline.data.image.jpeg import JpegHeader, chroma, clean_end, read_header, stream_fault

pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
SMOOTH = Image.fromarray(PIXELS).resize((75, 53), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image = SMOOTH, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def header_of(data: bytes) -> JpegHeader:
    header = read_header(data)
    assert header is not None
    return header


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    """The file with one more segment right after its start."""
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body + data[2:]


def directory(order: str, *entries: tuple[int, int, int, int]) -> bytes:
    """A TIFF directory of (tag, kind, count, value) entries whose values are shorts."""
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(entries))
    packed = (struct.pack(f"{order}HHIHH", tag, kind, count, value, 0) for tag, kind, count, value in entries)
    return b"Exif\0\0" + start + b"".join(packed) + bytes(4)


FILES = {
    "4:4:4": jpeg(subsampling=0),
    "4:2:2": jpeg(subsampling=1),
    "4:2:0": jpeg(subsampling=2),
    "progressive": jpeg(progressive=True),
    "grey": jpeg(SMOOTH.convert("L")),
    "cmyk": jpeg(SMOOTH.convert("CMYK")),
    "exif": jpeg(exif=directory("<", (0x0112, 3, 1, 6))),
    "comment": jpeg(comment=b"words \xff\xd9 and more"),
    "profile": jpeg(icc_profile=bytes(range(256)) * 300),
    "restarts by row": jpeg(restart_marker_rows=1),
    "restarts by block": jpeg(restart_marker_blocks=3, subsampling=0),
    "optimised": jpeg(optimize=True, quality=30),
    "kept as RGB": jpeg(keep_rgb=True, subsampling=0),
}


@pytest.mark.parametrize("name", FILES)
def test_size_layers_and_kind_are_those_that_pillow_reads(name: str) -> None:
    header, image = header_of(FILES[name]), Image.open(io.BytesIO(FILES[name]))
    assert (header.width, header.height) == image.size
    assert header.components == len(image.getbands())
    assert header.precision == image.bits == 8
    layers = [(identity, (h, v)) for identity, h, v, _ in image.layer]
    assert list(zip(header.component_ids, header.sampling, strict=True)) == layers
    assert header.progressive == bool(image.info.get("progressive", 0))
    assert header.baseline == (name != "progressive")
    assert header.jfif == ("jfif" in image.info)
    assert header.adobe_transform == image.info.get("adobe_transform")


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 8), (16, 16), (17, 33), (300, 2), (65500, 1)])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_any_size_reads_as_it_was_written(size: tuple[int, int], subsampling: int) -> None:
    data = jpeg(SMOOTH.resize(size), subsampling=subsampling, restart_marker_blocks=2)
    header = header_of(data)
    assert (header.width, header.height) == size
    assert header.restart_interval == 2
    assert clean_end(data, header)


def test_chroma_subsampling_has_its_usual_name() -> None:
    named = {name: chroma(header_of(FILES[name])) for name in ("4:4:4", "4:2:2", "4:2:0", "grey", "cmyk")}
    assert named == {"4:4:4": "444", "4:2:2": "422", "4:2:0": "420", "grey": "grey", "cmyk": "other"}


@pytest.mark.parametrize(
    ("factors", "name"),
    [
        ((0x12, 0x11, 0x11), "440"),
        ((0x22, 0x22, 0x22), "444"),
        ((0x22, 0x21, 0x21), "440"),
        ((0x41, 0x11, 0x11), "other"),
        ((0x31, 0x21, 0x21), "other"),
        ((0x22, 0x11, 0x12), "other"),
        ((0x11, 0x22, 0x22), "other"),
    ],
)
def test_chroma_subsampling_is_the_ratio_of_the_factors(factors: tuple[int, int, int], name: str) -> None:
    data = bytearray(FILES["4:4:4"])
    frame = data.index(b"\xff\xc0")
    data[frame + 11], data[frame + 14], data[frame + 17] = factors
    assert chroma(header_of(bytes(data))) == name


def test_the_scan_starts_where_the_compressed_bytes_do() -> None:
    for data in FILES.values():
        start = header_of(data).scan_start
        last = data.rindex(b"\xff\xda", 0, start)
        assert start == last + 2 + struct.unpack_from(">H", data, last + 2)[0]


def pillow_turns(data: bytes) -> int:
    """What Pillow's exif_transpose would do, as an orientation from 1 to 8."""
    value = Image.open(io.BytesIO(data)).getexif().get(0x0112, 1)
    return value if value in range(1, 9) else 1


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("value", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 300])
def test_exif_orientation_is_pillows_in_both_byte_orders(order: str, value: int) -> None:
    other = (0x0128, 3, 1, 2)
    for entries in ([(0x0112, 3, 1, value)], [other, (0x0112, 3, 1, value)], [(0x0112, 3, 1, value), other]):
        data = jpeg(exif=directory(order, *entries))
        assert header_of(data).orientation == pillow_turns(data)
    assert (header_of(data).orientation == value) == (1 <= value <= 8)


def test_the_size_is_the_stored_one_whatever_the_orientation() -> None:
    header = header_of(FILES["exif"])
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(FILES["exif"])))
    assert (header.width, header.height) == (turned.height, turned.width)


def xmp(text: bytes) -> bytes:
    return b"http://ns.adobe.com/xap/1.0/\0" + text


@pytest.mark.parametrize(
    "text",
    [
        b'tiff:Orientation="6"',
        b"<tiff:Orientation>3<",
        b'tiff:Orientation="9"',
        b'tiff:Orientation="0"',
        b"none",
    ],
)
def test_the_orientation_is_that_of_xmp_if_exif_has_none(text: bytes) -> None:
    plain = with_segment(jpeg(), 0xE1, xmp(text))
    silent = with_segment(plain, 0xE1, directory("<", (0x0128, 3, 1, 2)))
    spoken = with_segment(plain, 0xE1, directory("<", (0x0112, 3, 1, 8)))
    for data in (plain, silent, spoken):
        assert header_of(data).orientation == pillow_turns(data)
    assert header_of(spoken).orientation == 8


@pytest.mark.parametrize(
    "body",
    [
        b"Exif\0\0not a directory",
        b"Exif\0\0II*\0",
        b"Exif\0\0II*\0" + struct.pack("<I", 4_000_000_000),
        b"Exif\0\0II*\0" + struct.pack("<IH", 8, 60000),
        directory("<", (0x0112, 4, 1, 6)),
        directory("<", (0x0112, 3, 9, 6)),
        directory("<", (0x0112, 3, 1, 6), (0x0112, 3, 1, 3)),
    ],
)
def test_unusual_exif_is_left_to_pillow(body: bytes) -> None:
    assert header_of(with_segment(jpeg(), 0xE1, body)).orientation == 0


def test_two_exif_segments_are_left_to_pillow() -> None:
    body = directory("<", (0x0112, 3, 1, 6))
    assert header_of(with_segment(with_segment(jpeg(), 0xE1, body), 0xE1, body)).orientation == 0


def test_an_empty_exif_segment_is_ignored() -> None:
    data = with_segment(jpeg(), 0xE1, b"Exif\0\0")
    assert header_of(data).orientation == 1 == pillow_turns(data)


def test_fill_bytes_and_unknown_segments_are_skipped() -> None:
    plain = jpeg()
    for marker in (*range(0xE2, 0xEE), 0xEF, 0xFE):
        data = with_segment(plain, marker, b"\xff\xc0\xff\xda anything")
        assert header_of(data).width == 75
    frame = plain.index(b"\xff\xc0")
    filled = plain[:frame] + b"\xff" * 5 + plain[frame:]
    assert header_of(filled).width == 75
    assert header_of(filled).scan_start == header_of(plain).scan_start + 5


@pytest.mark.parametrize(
    "marker", [0x00, 0x01, 0xC3, 0xC5, 0xC8, 0xCB, 0xD0, 0xD7, 0xD8, 0xD9, 0xDE, 0xDF, 0xF0, 0xFD]
)
def test_markers_that_do_not_belong_in_a_header_are_rejected(marker: int) -> None:
    assert read_header(with_segment(jpeg(), marker, b"body")) is None


def test_damaged_headers_are_rejected() -> None:
    plain = jpeg()
    frame, scan = plain.index(b"\xff\xc0"), plain.index(b"\xff\xda")

    def changed(at: int, *values: int) -> bytes:
        return plain[:at] + bytes(values) + plain[at + len(values) :]

    cases = {
        "no height": changed(frame + 5, 0, 0),
        "no width": changed(frame + 7, 0, 0),
        "no component": changed(frame + 9, 0),
        "components beyond the segment": changed(frame + 9, 4),
        "sampling factor 0": changed(frame + 11, 0x01),
        "sampling factor 5": changed(frame + 11, 0x51),
        "two components of one name": changed(frame + 13, plain[frame + 10]),
        "a scan of nothing": changed(scan + 4, 0),
        "a scan of five": changed(scan + 4, 5),
        "a scan of a component that is not there": changed(scan + 5, 77),
        "two components of one name in frame and scan": (
            plain[: frame + 13]
            + plain[frame + 10 : frame + 11]
            + plain[frame + 14 : scan + 7]
            + plain[frame + 10 : frame + 11]
            + plain[scan + 8 :]
        ),
        "a scan header that is too long": changed(scan + 2, 0, 13),
        "two frames": plain[:frame] + plain[frame : frame + 19] + plain[frame:],
        "no frame": plain[:frame] + plain[frame + 19 :],
        "a segment shorter than its length": changed(frame + 2, 0, 1),
        "a segment longer than the file": changed(frame + 2, 0xFF, 0xFF),
        "stray bytes": plain[:frame] + b"stray" + plain[frame:],
        "another file": b"\x89PNG\r\n\x1a\n" + plain,
    }
    kept = [name for name, data in cases.items() if read_header(data) is not None]
    assert kept == []


def test_a_memoryview_reads_as_its_bytes_do() -> None:
    for data in FILES.values():
        padded = memoryview(b"before" + data)[6:]
        assert read_header(padded) == read_header(data)
        assert clean_end(padded, header_of(data)) == clean_end(data, header_of(data))


def pillow_opens(data: bytes) -> Image.Image | None:
    try:
        return Image.open(io.BytesIO(data), formats=("JPEG",))
    except Exception:
        return None


def test_a_header_truncated_anywhere_is_rejected_without_an_exception() -> None:
    for data in FILES.values():
        start = header_of(data).scan_start
        for length in range(0, start, 1 if start < 4000 else 97):
            assert read_header(data[:length]) is None
        for length in range(start, min(len(data), start + 40)):
            assert read_header(data[:length]) == header_of(data)
            assert not clean_end(data[:length], header_of(data))


@pytest.mark.parametrize("name", ["4:2:0", "exif", "grey", "progressive"])
def test_a_flipped_bit_never_raises_and_never_disagrees_with_pillow_about_the_size(name: str) -> None:
    data = bytearray(FILES[name])
    for at in range(header_of(FILES[name]).scan_start):
        for bit in range(8):
            data[at] ^= 1 << bit
            header = read_header(bytes(data))
            if header is not None and at % 3 == 0:
                image = pillow_opens(bytes(data))
                if image is not None:
                    assert (header.width, header.height) == image.size
            if header is not None:
                stream_fault(bytes(data), header)
                chroma(header)
            data[at] ^= 1 << bit


@settings(max_examples=300)
@given(
    st.binary(max_size=400),
    st.sampled_from([b"", b"\xff\xd8\xff", b"\xff\xd8\xff\xe1\x00\x40Exif\0\0II*\0", FILES["4:2:0"][:180]]),
)
def test_no_bytes_make_it_raise(rest: bytes, start: bytes) -> None:
    header = read_header(start + rest)
    if header is not None:
        stream_fault(start + rest, header)
        chroma(header)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_no_exif_makes_it_raise_or_disagree_with_pillow(noise: bytes) -> None:
    data = with_segment(FILES["4:4:4"], 0xE1, b"Exif\0\0II*\0\x08\0\0\0" + noise)
    found = header_of(data).orientation
    assert 0 <= found <= 8
    if found != 0:
        assert found == pillow_turns(data)


def test_sound_sequential_files_end_clean() -> None:
    ends = {name: clean_end(data, header_of(data)) for name, data in FILES.items()}
    assert ends == {name: name != "progressive" for name in FILES}


def test_bytes_after_the_end_do_not_matter_and_fill_bytes_are_allowed() -> None:
    data = FILES["4:2:0"]
    assert clean_end(data + b"\xff\xc4 more \xff", header_of(data))
    assert clean_end(data[:-2] + b"\xff\xff\xff\xd9", header_of(data))


@pytest.mark.parametrize("name", ["4:4:4", "grey", "restarts by row"])
def test_a_truncated_stream_or_one_with_markers_does_not_end_clean(name: str) -> None:
    data, header = FILES[name], header_of(FILES[name])
    middle = (header.scan_start + len(data)) // 2
    while 0xFF in data[middle - 2 : middle + 4]:
        middle += 1
    assert clean_end(data, header)
    assert not clean_end(data[:-1], header)
    assert not clean_end(data[:middle], header)
    for marker in (0x01, 0xC4, 0xD3, 0xDA, 0xD8, 0xE0, 0xFE):
        assert not clean_end(data[:middle] + bytes((0xFF, marker)) + data[middle + 2 :], header)
    assert clean_end(data[:middle] + b"\xff\x00" + data[middle + 2 :], header)


def test_restart_markers_must_be_all_there_and_in_order() -> None:
    data, header = FILES["restarts by block"], header_of(FILES["restarts by block"])
    at = data.index(b"\xff\xd1", header.scan_start)
    assert clean_end(data, header)
    assert not clean_end(data[: at + 1] + b"\xd2" + data[at + 2 :], header)
    assert not clean_end(data[:at] + data[at + 2 :], header)
    assert not clean_end(data[:at] + b"\xff\xd1" + data[at:], header)


def _commented(data: bytes) -> bytes:
    second = data.index(b"\xff\xc4", header_of(data).scan_start)
    return data[:second] + b"\xff\xfe\x00\x0aab\xff\x01\xff\xc0cd" + data[second:]


def test_no_restart_marker_may_be_missing_at_the_end_or_too_many() -> None:
    data, header = FILES["restarts by block"], header_of(FILES["restarts by block"])
    last = max(data.rindex(bytes((0xFF, code))) for code in range(0xD0, 0xD8))
    following = 0xD0 + (data[last + 1] - 0xCF) % 8
    assert not clean_end(data[:last] + data[last + 2 :], header)
    assert not clean_end(data[:-2] + bytes((0xFF, following)) + data[-2:], header)


def test_a_grey_scan_counts_single_blocks_whatever_its_factors() -> None:
    data = bytearray(jpeg(SMOOTH.convert("L"), restart_marker_blocks=3))
    data[data.index(b"\xff\xc0") + 11] = 0x22
    assert clean_end(bytes(data), header_of(bytes(data)))


def test_an_adobe_segment_that_is_too_short_is_ignored() -> None:
    assert header_of(with_segment(jpeg(), 0xEE, b"Adobe\0\x64")).adobe_transform is None
    assert header_of(with_segment(jpeg(), 0xEE, b"Adobe\0\x64\0\0\0\0\x02")).adobe_transform == 2


def test_every_sound_file_has_no_fault_in_its_stream() -> None:
    several = {
        **FILES,
        "progressive with restarts": jpeg(progressive=True, restart_marker_rows=1),
        "progressive with a comment between scans": _commented(jpeg(progressive=True)),
        "progressive grey": jpeg(SMOOTH.convert("L"), progressive=True),
    }
    assert {name: stream_fault(data, header_of(data)) for name, data in several.items()} == dict.fromkeys(
        several, ""
    )


def test_faults_in_a_progressive_stream_are_reported() -> None:
    data = jpeg(progressive=True, restart_marker_rows=1)
    header = header_of(data)
    restart = data.index(b"\xff\xd1", header.scan_start)
    assert "out of order" in stream_fault(data[:restart] + b"\xff\xd5" + data[restart + 2 :], header)
    assert "FF 01" in stream_fault(data[:restart] + b"\xff\x01" + data[restart + 2 :], header)
    assert "end-of-image" in stream_fault(data[: len(data) // 2], header)
