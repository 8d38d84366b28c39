"""Decoding: Pillow's pixels in every ordinary mode, and a clear error for everything else."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageOps

from drumline.core.errors import UserError
from drumline.data.image.decode import MAX_PIXELS, decode

# pytest replaces the filter that decode.py sets; test_no_warning_reaches_stderr looks at it from outside.
pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (23, 37, 3), np.uint8)


def picture(mode: str) -> Image.Image:
    image = Image.fromarray(PIXELS)
    if mode in ("RGBA", "LA", "PA"):
        image = image.convert("RGBA" if mode == "RGBA" else "LA")
        image.putalpha(Image.fromarray(PIXELS[..., 1]))
        return image.convert(mode)
    return image.convert(mode)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


SMOOTH = Image.fromarray(PIXELS).resize((64, 48), Image.Resampling.BICUBIC)
FILES = {
    "jpeg 4:4:4": saved(SMOOTH, "JPEG", subsampling=0),
    "jpeg 4:2:0": saved(SMOOTH, "JPEG", subsampling=2),
    "jpeg progressive": saved(SMOOTH, "JPEG", progressive=True),
    "jpeg grey": saved(SMOOTH.convert("L"), "JPEG"),
    "jpeg cmyk": saved(SMOOTH.convert("CMYK"), "JPEG"),
    **{f"png {mode}": saved(picture(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA")},
    "png P with one transparent colour": saved(picture("P"), "PNG", transparency=3),
    "png P with alpha for each colour": saved(picture("P"), "PNG", transparency=bytes(range(256))),
    "png RGB with a transparent colour": saved(picture("RGB"), "PNG", transparency=(1, 2, 3)),
    "tiff CMYK": saved(picture("CMYK"), "TIFF"),
    "tiff packed": saved(picture("RGB"), "TIFF", compression="tiff_lzw"),
    "tiff with jpeg inside": saved(SMOOTH, "TIFF", compression="jpeg"),
    "tiff LAB": saved(picture("RGB").convert("LAB"), "TIFF"),
    "bmp": saved(picture("RGB"), "BMP"),
    "ppm": saved(picture("RGB"), "PPM"),
    "pgm": saved(picture("L"), "PPM"),
    "webp": saved(picture("RGBA"), "WEBP"),
    "webp lossless": saved(picture("RGB"), "WEBP", lossless=True),
    "gif": saved(picture("P"), "GIF"),
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_pillows(name):
    image = decode(FILES[name], name)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), pillow(FILES[name]))


def test_palette_with_alpha_beside_its_index_gives_pillows_pixels():
    """Mode PA has no file format of its own here; the conversion is the same call."""
    from drumline.data.image.decode import to_rgb

    image = picture("PA")
    assert image.mode == "PA"
    assert np.array_equal(np.asarray(to_rgb(image, "x")), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG", "MPO"])
def test_an_animation_gives_its_first_frame(kind):
    first, second = Image.new("RGB", (8, 8), (250, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 250))
    data = saved(first, kind, save_all=True, append_images=[second])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    red, _, blue = np.asarray(decode(data, "x")).mean(axis=(0, 1))
    assert red > 200
    assert blue < 50


def grey16() -> np.ndarray:
    return (np.arange(24 * 32, dtype=np.uint32) * 85 % 65536).astype(np.uint16).reshape(24, 32)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "big-endian TIFF"])
def test_16_bit_grey_is_divided_by_256_instead_of_clipped(kind):
    if kind == "big-endian TIFF":
        data = saved(Image.frombytes("I;16B", (32, 24), grey16().astype(">u2").tobytes()), "TIFF")
    else:
        data = saved(Image.fromarray(grey16()), kind)
    assert Image.open(io.BytesIO(data)).mode[0] == "I"
    got = np.asarray(decode(data, "x"))
    assert np.array_equal(got, np.repeat((grey16() >> 8)[..., None], 3, axis=2))


def test_32_bit_grey_is_accepted_within_16_bits_and_rejected_beyond():
    data = saved(Image.fromarray(grey16().astype(np.int32)), "TIFF")
    assert np.array_equal(np.asarray(decode(data, "x"))[..., 0], grey16() >> 8)
    data = saved(Image.fromarray(grey16().astype(np.int32) * 2), "TIFF")
    assert "32-bit grey values from 0 to" in error_of(data).what


def error_of(data: bytes) -> UserError:
    with pytest.raises(UserError) as caught:
        decode(data, "/set/cat/7.jpg")
    assert caught.value.what.startswith("/set/cat/7.jpg ")
    assert caught.value.fix
    return caught.value


def test_float_images_are_rejected():
    assert "floating-point" in error_of(saved(Image.fromarray(grey16().astype(np.float32)), "TIFF")).what


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_only_on_request(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    data = saved(SMOOTH, "JPEG", exif=tags)
    assert np.array_equal(np.asarray(decode(data, "x")), pillow(data))
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    applied = decode(data, "x", "apply")
    assert np.array_equal(np.asarray(applied), np.asarray(turned))
    assert applied.size == ((48, 64) if orientation > 4 else (64, 48))


def test_exif_apply_without_exif_changes_nothing():
    for name in ("jpeg 4:2:0", "png LA", "webp", "gif"):
        assert np.array_equal(np.asarray(decode(FILES[name], "x", "apply")), pillow(FILES[name]))


def empty_png(width: int, height: int) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("size", "words"), [((9460, 9460), "9460 x 9460 pixels"), ((40000, 30000), "1200000000 pixels")]
)
def test_bombs_are_rejected_with_their_size_before_decoding(size, words):
    assert size[0] * size[1] > MAX_PIXELS
    error = error_of(empty_png(*size))
    assert "is too large" in error.what
    assert words in error.what


def test_an_image_just_below_the_limit_is_not_called_a_bomb():
    assert "is too large" not in error_of(empty_png(9459, 9459)).what


@pytest.mark.parametrize(
    "name", ["jpeg 4:2:0", "jpeg progressive", "png RGB", "webp", "bmp", "gif", "tiff packed"]
)
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_truncated_file_is_rejected(name, share):
    error = error_of(FILES[name][: int(len(FILES[name]) * share)])
    assert any(words in error.what for words in ("truncated", "damaged"))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty (0 bytes)"),
        (b"hello, this is text", "is not an image in a supported format (JPEG, PNG, PPM, BMP, TIFF, WEBP);"),
        (b"<!DOCTYPE html><html>404", "is a web page"),
        (b"\n <html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
        (b"%PDF-1.7", "is a PDF document"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is a PostScript document"),
        (b"PK\x03\x04....", "is a zip archive"),
        (b"\0\0\0\x18ftypheic....", "is a heic file"),
        (bytes(5000), "contains only zeros (5000 bytes)"),
        (FILES["jpeg grey"][:12], "is truncated"),
        (FILES["jpeg grey"][:3] + b"nonsense", "begins like a JPEG"),
        (FILES["png L"][:12], "begins like a PNG"),
        (b"P6\n4 4\n2\xc25\n" + bytes(48), "is damaged: invalid literal"),
    ],
)
def test_the_error_names_what_a_file_is_if_it_is_not_an_image(data, words):
    assert words in error_of(data).what


@pytest.mark.parametrize("name", ["jpeg 4:2:0", "png P", "webp lossless", "tiff packed", "gif", "bmp", "ppm"])
def test_damage_anywhere_gives_an_image_or_a_user_error_and_nothing_else(name):
    rng = np.random.default_rng(1)
    for _ in range(60):
        data = bytearray(FILES[name])
        for place in rng.integers(0, len(data), 6):
            data[place] = rng.integers(0, 256)
        with contextlib.suppress(UserError):
            assert decode(bytes(data), "x", "apply").mode == "RGB"


def test_threads_get_the_same_pixels():
    with ThreadPoolExecutor(4) as pool:
        for name in ("jpeg 4:2:0", "png P with alpha for each colour"):
            expected = pillow(FILES[name])
            assert all(
                np.array_equal(np.asarray(image), expected)
                for image in pool.map(lambda _, name=name: decode(FILES[name], "x"), range(40))
            )


def test_no_warning_reaches_stderr(tmp_path):
    """In a process of its own, since pytest puts its own warning filters in place."""
    (tmp_path / "palette").write_bytes(FILES["png P with alpha for each colour"])
    (tmp_path / "large").write_bytes(empty_png(9460, 9460))
    (tmp_path / "exif").write_bytes(FILES["jpeg 4:2:0"].replace(b"\xff\xd8", b"\xff\xd8" + BROKEN_EXIF, 1))
    (tmp_path / "cut").write_bytes(FILES["tiff packed"][:-30])
    samples = (0x0115).to_bytes(2, "little") + b"\x03\0\1\0\0\0"
    many = saved(picture("RGB"), "TIFF").replace(samples + b"\3", samples + b"\x18", 1)
    (tmp_path / "many").write_bytes(many)
    code = (
        "import sys, pathlib\n"
        "from drumline.data.image.decode import decode\n"
        "from drumline.core.errors import UserError\n"
        "for file in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    try: decode(file.read_bytes(), file.name, 'apply'); print(file.name, 'image')\n"
        "    except UserError as error: print(file.name, 'rejected')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "cut rejected",
        "exif image",
        "large rejected",
        "many rejected",
        "palette image",
    ]


BROKEN_EXIF = b"\xff\xe1\x00\x22Exif\0\0II*\0\x08\0\0\0\x05\x00\x12\x01\x03\x00\x09\0\0\0\xff\xff\xff\x7f"
