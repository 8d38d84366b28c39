"""The exact resize against the installed Pillow, against Pillow 13 by its hashes, and against plain arithmetic."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from itertools import product
from os import environ

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import drumline
from drumline import native
from drumline.core.errors import UserError
from drumline.data.image.resize import (
    Box,
    Filter,
    Pixels,
    Version,
    coefficients,
    resize,
    resize_by_pillow,
    vertical_first,
)

FILTERS: tuple[Filter, ...] = ("bilinear", "bicubic", "box", "lanczos", "nearest")
SMOOTH: tuple[Filter, ...] = FILTERS[:4]
needs_native = pytest.mark.skipif(not native.available(), reason="the native part is not built")


def noise(draw: np.random.Generator, width: int, height: int, channels: int) -> Pixels:
    """(H, W, C); channels 0 stands for (H, W). Half the images are of the extremes, where rounding overshoots."""
    shape = (height, width, channels) if channels else (height, width)
    if draw.random() < 0.5:
        return draw.integers(0, 256, shape, dtype=np.uint8)
    return draw.integers(0, 2, shape, dtype=np.uint8) * np.uint8(255)


def by_pillow(image: Pixels, size: tuple[int, int], box: Box | None, filter: Filter) -> Pixels:
    """Image.crop(box).resize(size), as the installed Pillow does it."""
    picture = Image.fromarray(np.ascontiguousarray(image[..., 0] if image.shape[2:] == (1,) else image))
    if box is not None:
        picture = picture.crop(box)
    resized = np.asarray(picture.resize(size, Image.Resampling[filter.upper()]))
    return resized[..., None] if image.shape[2:] == (1,) else resized


INSTALLED: Version = "pillow13" if int(Image.__version__.split(".")[0]) >= 13 else "pillow12"


def random_case(draw: np.random.Generator) -> tuple[Pixels, tuple[int, int], Box | None]:
    """Sides from 1 to a few hundred, reductions and enlargements up to some hundred times, equal sides often."""

    def side() -> int:
        return int(draw.choice([1, 2, draw.integers(3, 20), draw.integers(20, 90), draw.integers(90, 400)]))

    width, height = side(), side()
    while width * height > 20_000:
        width, height = side(), side()
    image = noise(draw, width, height, int(draw.choice([0, 1, 3])))
    box = None
    if draw.random() < 0.6:
        left, top = int(draw.integers(0, width)), int(draw.integers(0, height))
        box = left, top, int(draw.integers(left + 1, width + 1)), int(draw.integers(top + 1, height + 1))
    inside = box or (0, 0, width, height)
    equal = inside[2] - inside[0], inside[3] - inside[1]
    size = tuple(same if draw.random() < 0.15 else side() for same in equal)
    if size[0] * size[1] > 20_000:
        size = min(size[0], 100), min(size[1], 100)
    return image, (size[0], size[1]), box


@pytest.mark.parametrize("block", range(8))
def test_thousands_of_random_resizes_are_pillows(block: int) -> None:
    draw = np.random.default_rng(block)
    for number in range(1000):
        image, size, box = random_case(draw)
        filter = FILTERS[number % 5]
        found = resize(image, size, box, INSTALLED, filter)
        assert found.dtype == np.uint8
        assert np.array_equal(found, by_pillow(image, size, box, filter)), (image.shape, size, box, filter)


def test_resizing_with_pillow_gives_the_pixels_of_the_native_part() -> None:
    """In both orders of passes; where the native part is not built, both sides are Pillow's."""
    draw = np.random.default_rng(9)
    for number in range(600):
        image, size, box = random_case(draw)
        filter, version = SMOOTH[number % 4], ("pillow12", "pillow13")[number // 4 % 2]
        left, top, right, bottom = box or (0, 0, image.shape[1], image.shape[0])
        crop = image[top:bottom, left:right]
        order = vertical_first(version, crop.shape[1], crop.shape[0], *size)  # type: ignore[arg-type]
        plain = resize_by_pillow(crop, size, order, filter)
        assert np.array_equal(resize(image, size, box, version, filter), plain)  # type: ignore[arg-type]


sides = st.integers(1, 60)


@settings(max_examples=150)
@given(
    width=sides, height=sides, new=st.tuples(sides, sides), channels=st.sampled_from([0, 1, 3]),
    filter=st.sampled_from(FILTERS), seed=st.integers(0, 2**32 - 1), data=st.data(),
)  # fmt: skip
def test_any_resize_is_pillows(
    width: int,
    height: int,
    new: tuple[int, int],
    channels: int,
    filter: Filter,
    seed: int,
    data: st.DataObject,
) -> None:
    image = noise(np.random.default_rng(seed), width, height, channels)
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    box = left, top, data.draw(st.integers(left + 1, width)), data.draw(st.integers(top + 1, height))
    assert np.array_equal(resize(image, new, box, INSTALLED, filter), by_pillow(image, new, box, filter))


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        (20_000, 3, (1, 1)),
        (3, 20_000, (2, 5)),
        (20_000, 1, (7, 3)),
        (1, 20_000, (2, 199)),
        (1, 1, (300, 200)),
        (2, 3, (4000, 2)),
        (1500, 1400, (3, 2)),
        (5, 5, (5, 5)),
        (5, 9, (5, 3)),
        (9, 5, (3, 5)),
    ],
)
def test_extreme_shapes_are_pillows(filter: Filter, width: int, height: int, size: tuple[int, int]) -> None:
    image = noise(np.random.default_rng(1), width, height, 3)
    assert np.array_equal(resize(image, size, None, INSTALLED, filter), by_pillow(image, size, None, filter))


@pytest.mark.parametrize("filter", FILTERS)
def test_any_memory_layout_is_accepted_and_left_unchanged(filter: Filter) -> None:
    draw = np.random.default_rng(2)
    whole = draw.integers(0, 256, (60, 70, 3), dtype=np.uint8)
    frozen = whole.copy()
    frozen.flags.writeable = False
    wide = np.broadcast_to(whole[:1], (40, 70, 3))
    layouts = {
        "read-only": frozen,
        "every other pixel": whole[::2, ::2],
        "upside down": whole[::-1],
        "mirrored": whole[:, ::-1],
        "channels reversed": whole[..., ::-1],
        "transposed": whole.transpose(1, 0, 2),
        "planes": np.ascontiguousarray(whole.transpose(2, 0, 1)).transpose(1, 2, 0),
        "one channel of three": whole[..., 1],
        "one channel of three, kept": whole[..., 1:2],
        "columns of a wider image": whole[5:50, 7:33],
        "one column": whole[:, 3:4],
        "one row": whole[3:4],
        "the same row again": wide,
        "Fortran order": np.asfortranarray(whole),
    }
    for name, image in layouts.items():
        before = image.copy()
        for size in ((21, 13), (80, 90), image.shape[1::-1]):
            found = resize(image, size, None, INSTALLED, filter)
            assert np.array_equal(found, by_pillow(before, size, None, filter)), name
            assert not np.shares_memory(found, image)
            assert found.flags.writeable
        assert np.array_equal(image, before)


def test_resize_is_exported_and_accepts_integers_of_numpy() -> None:
    image = noise(np.random.default_rng(3), 30, 20, 3)
    size, box = (np.int64(9), np.int32(7)), tuple(np.array([1, 2, 25, 19]))
    found = drumline.resize(image, size, box)  # type: ignore[arg-type]
    assert (
        np.array_equal(found, by_pillow(image, (9, 7), (1, 2, 25, 19), "bilinear")) or INSTALLED != "pillow12"
    )
    assert np.array_equal(found, resize(image, (9, 7), (1, 2, 25, 19)))


def patterned(width: int, height: int, channels: int) -> Pixels:
    y, x, channel = np.ogrid[:height, :width, :channels]
    return (((x * 73 + y * 151 + x * y // 7 * 31 + channel * 89) ^ (x * 5 + y)) & 255).astype(np.uint8)


# Made by Pillow 13.0.0: sha256(np.asarray(picture.crop(box).resize(size, filter)).tobytes()), its first 16 digits, of
# Image.fromarray(patterned(width, height, channels)), one channel as mode L. The last column: whether 12.3.0 differs.
PILLOW_13: list[tuple[int, int, int, tuple[int, int], Box | None, Filter, str, bool]] = [
    (40, 200, 1, (30, 20), (5, 28, 36, 182), "bilinear", "5c6f451262291bf1", True),
    (40, 200, 3, (30, 20), None, "bicubic", "5ce74acbb5037713", True),
    (40, 200, 3, (30, 20), (5, 28, 36, 182), "box", "3cdb50cf3cd09193", True),
    (40, 200, 1, (30, 20), None, "lanczos", "d069a494fe22cb2a", True),
    (200, 40, 3, (20, 30), None, "bicubic", "8b77a025cb229bf7", False),
    (200, 40, 3, (20, 30), (25, 5, 178, 37), "box", "4e895ceae0a90ad3", False),
    (200, 40, 1, (20, 30), None, "lanczos", "575b0c852e29c082", False),
    (200, 40, 3, (20, 30), (25, 5, 178, 37), "bilinear", "32ca989dbbbb645f", False),
    (64, 64, 3, (16, 16), (8, 9, 57, 59), "box", "474a8c44f867637f", False),
    (64, 64, 1, (16, 16), None, "lanczos", "16e4d367187779c6", False),
    (64, 64, 3, (16, 16), (8, 9, 57, 59), "bilinear", "36221b1e0e0a2820", False),
    (64, 64, 3, (16, 16), None, "bicubic", "a58e655751da0c58", False),
    (33, 90, 1, (32, 9), None, "lanczos", "0e7a98a76c627511", True),
    (33, 90, 3, (32, 9), (4, 12, 30, 82), "bilinear", "e9eea75738f88449", True),
    (33, 90, 3, (32, 9), None, "bicubic", "75473691b4d5df58", True),
    (33, 90, 1, (32, 9), (4, 12, 30, 82), "box", "a1eca55068bda892", False),
    (90, 33, 3, (9, 32), (11, 4, 80, 30), "bilinear", "32dfdb5ed2bdde80", False),
    (90, 33, 3, (9, 32), None, "bicubic", "801fdd20244af8d0", False),
    (90, 33, 1, (9, 32), (11, 4, 80, 30), "box", "1970d6f0b4cca81e", False),
    (90, 33, 3, (9, 32), None, "lanczos", "ed7cbcf5bbf1f0db", False),
    (17, 101, 3, (17, 50), None, "bicubic", "a214a3735c774701", False),
    (17, 101, 1, (17, 50), (2, 14, 16, 92), "box", "37f4eaafe0ec80ba", False),
    (17, 101, 3, (17, 50), None, "lanczos", "ed798ee41e483001", False),
    (17, 101, 3, (17, 50), (2, 14, 16, 92), "bilinear", "5fef97dc0cb02b9e", True),
    (101, 17, 1, (50, 17), (12, 2, 90, 16), "box", "039f46f234faf000", False),
    (101, 17, 3, (50, 17), None, "lanczos", "8f2c639c1ad8d80e", False),
    (7, 300, 3, (5, 3), None, "lanczos", "2918d4020e9202d8", True),
    (7, 300, 3, (5, 3), (0, 42, 7, 273), "bilinear", "ff9673125186fe6d", True),
    (50, 60, 3, (70, 10), (6, 8, 45, 55), "bilinear", "728d72a06b597a80", True),
    (50, 60, 1, (70, 10), None, "bicubic", "b37c01f39f25d721", True),
    (50, 60, 1, (80, 59), None, "bicubic", "17e512981ce85e3a", True),
    (50, 60, 3, (80, 59), (6, 8, 45, 55), "box", "989feae771cd1030", False),
    (64, 80, 3, (60, 64), (8, 11, 57, 73), "box", "f79b0c2664485440", False),
    (64, 80, 3, (60, 64), None, "lanczos", "98f9a419f994c29c", True),
    (1, 90, 3, (1, 7), None, "lanczos", "243844b0217ef064", False),
    (1, 90, 1, (1, 7), (0, 12, 1, 82), "bilinear", "a53070c6ed430edb", False),
    (90, 1, 1, (7, 1), (11, 0, 80, 1), "bilinear", "7c404650d2a73f35", False),
    (90, 1, 3, (7, 1), None, "bicubic", "f7d0f2871e0cabaf", False),
    (45, 45, 3, (224, 224), None, "bicubic", "b2eaad9accfc801c", False),
    (45, 45, 3, (224, 224), (5, 6, 40, 41), "box", "ee97aaea491a0a84", False),
    (300, 260, 3, (128, 96), (37, 37, 267, 237), "box", "b8ff2b4c1f871bdb", False),
    (300, 260, 1, (128, 96), None, "lanczos", "9d20ceda71906a74", False),
]


@pytest.mark.parametrize(
    ("width", "height", "channels", "size", "box", "filter", "digest", "differs"), PILLOW_13
)
def test_the_pixels_of_pillow_13_have_its_hashes(
    width: int,
    height: int,
    channels: int,
    size: tuple[int, int],
    box: Box | None,
    filter: Filter,
    digest: str,
    differs: bool,
) -> None:
    image = patterned(width, height, channels)

    def hashed(pixels: Pixels) -> str:
        return hashlib.sha256(pixels.tobytes()).hexdigest()[:16]

    assert hashed(resize(image, size, box, "pillow13", filter)) == digest
    assert (hashed(resize(image, size, box, "pillow12", filter)) != digest) == differs
    left, top, right, bottom = box or (0, 0, width, height)
    crop = image[top:bottom, left:right]
    columns_first = vertical_first("pillow13", right - left, bottom - top, *size)
    assert hashed(resize_by_pillow(crop, size, columns_first, filter)) == digest


def test_the_order_of_passes_is_that_of_pillow_12_and_13() -> None:
    for w, h, a, b in product((1, 10, 30), (1, 20, 50, 101), (1, 9, 10, 31), (1, 19, 20, 51)):
        assert vertical_first("pillow12", w, h, a, b) == (h > b and (w, h) == (1, 101))
        assert vertical_first("pillow13", w, h, a, b) == (h > b and (h - b) > 2 * (w - a))


def test_without_the_native_part_the_pixels_are_the_same() -> None:
    """In a process that runs without it: all of Pillow 13's hashes, and the same digest over random cases."""
    code = """
import hashlib, numpy as np
from drumline import native
from drumline.data.image.resize import resize
from tests.data.image.test_resize import FILTERS, PILLOW_13, patterned, random_case
assert not native.available() and not native.decodes_jpeg(), native.describe()
for width, height, channels, size, box, filter, digest, _ in PILLOW_13:
    found = resize(patterned(width, height, channels), size, box, "pillow13", filter)
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == digest, (width, height, size, filter)
draw, total = np.random.default_rng(77), hashlib.sha256()
for number in range(300):
    image, size, box = random_case(draw)
    total.update(resize(image, size, box, ("pillow12", "pillow13")[number % 2], FILTERS[number % 5]).tobytes())
print(total.hexdigest())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "DRUMLINE_NATIVE": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    draw, total = np.random.default_rng(77), hashlib.sha256()
    versions: tuple[Version, Version] = ("pillow12", "pillow13")
    for number in range(300):
        image, size, box = random_case(draw)
        total.update(resize(image, size, box, versions[number % 2], FILTERS[number % 5]).tobytes())
    assert done.stdout.strip() == total.hexdigest()


def scalar_weights(source: int, target: int, filter: Filter) -> list[tuple[int, list[int]]]:
    """Pillow's published rule, one number at a time: (first source pixel, weights) of each target pixel."""

    def sinc(x: float) -> float:
        return math.sin(math.pi * x) / (math.pi * x) if x else 1.0

    def triangle(x: float) -> float:
        return max(0.0, 1.0 - abs(x))

    def cubic(x: float) -> float:
        x, a = abs(x), -0.5
        if x < 1:
            return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
        return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0

    shapes = {
        "box": (lambda x: 1.0 if -0.5 < x <= 0.5 else 0.0, 0.5),
        "bilinear": (triangle, 1.0),
        "bicubic": (cubic, 2.0),
        "lanczos": (lambda x: sinc(x) * sinc(x / 3) if -3 <= x < 3 else 0.0, 3.0),
    }
    shape, reach = shapes[filter]
    scale = source / target
    wide = max(scale, 1.0)
    rows = []
    for i in range(target):
        centre = (i + 0.5) * scale
        first = max(0, int(centre - reach * wide + 0.5))
        end = min(source, int(centre + reach * wide + 0.5))
        raw = [shape((x - centre + 0.5) * (1.0 / wide)) for x in range(first, end)]
        total = 0.0
        for value in raw:
            total += value
        exact = [value / total if total else value for value in raw]
        # Half away from zero, by truncation.
        rows.append((first, [int(w * 2**22 + (0.5 if w >= 0 else -0.5)) for w in exact]))
    return rows


AXES = [
    *product((1, 2, 3, 7, 50, 333), (1, 2, 5, 49, 224)),
    (20_000, 3), (3, 2000), (500, 224), (375, 256), (224, 224), (6_550, 1), (1, 4000),
]  # fmt: skip


@pytest.mark.parametrize("filter", SMOOTH)
def test_weights_are_those_of_the_published_rule(filter: Filter) -> None:
    for source, target in AXES:
        first, counts, weights = coefficients(source, target, filter)
        for i, (begin, expected) in enumerate(scalar_weights(source, target, filter)):
            assert first[i] == begin
            assert counts[i] == len(expected)
            assert weights[i, : counts[i]].tolist() == expected
            assert not weights[i, counts[i] :].any()


@pytest.mark.parametrize("filter", SMOOTH)
def test_weights_sum_to_one_and_stay_inside(filter: Filter) -> None:
    for source, target in AXES:
        first, counts, weights = coefficients(source, target, filter)
        assert (np.abs(weights.sum(axis=1, dtype=np.int64) - (1 << 22)) <= counts).all()
        assert (first >= 0).all()
        assert (counts > 0).all()
        assert (first + counts <= source).all()
        # Whatever the pixels, a sum with its rounding stays within 32 bits.
        most = 255 * np.where(weights > 0, weights, 0).sum(axis=1, dtype=np.int64) + (1 << 21)
        assert most.max() < 2**31


def test_weights_are_cached_and_read_only() -> None:
    assert coefficients(40, 7) is coefficients(40, 7)
    with pytest.raises(ValueError, match="read-only"):
        coefficients(40, 7).weights[0, 0] = 1


IMAGE = np.zeros((20, 30, 3), np.uint8)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((IMAGE.astype(np.float32), (5, 5)), "float32"),
        ((IMAGE.tolist(), (5, 5)), "list"),
        ((Image.fromarray(IMAGE), (5, 5)), "Image"),
        ((np.zeros((5, 5, 4), np.uint8), (5, 5)), r"\(5, 5, 4\)"),
        ((np.zeros((5, 5, 2), np.uint8), (5, 5)), r"\(5, 5, 2\)"),
        ((np.zeros((2, 5, 5, 3), np.uint8), (5, 5)), r"\(2, 5, 5, 3\)"),
        ((np.zeros((0, 5, 3), np.uint8), (5, 5)), r"\(0, 5, 3\)"),
        ((np.zeros(7, np.uint8), (5, 5)), r"\(7,\)"),
        ((IMAGE, (0, 5)), r"size = \(0, 5\)"),
        ((IMAGE, (5, -1)), r"size = \(5, -1\)"),
        ((IMAGE, (5.0, 5)), r"size = \(5\.0, 5\)"),
        ((IMAGE, (5,)), r"size = \(5,\)"),
        ((IMAGE, (True, 5)), r"size = \(True, 5\)"),
        ((IMAGE, (10**6, 10**6)), "too large for an image of 30 x 20 pixels"),
        ((IMAGE, (2**40, 1)), "size = "),
        ((np.zeros((20000, 2), np.uint8), (80000, 1)), "size = "),
        ((IMAGE, (5, 5, 3)), r"size = \(5, 5, 3\)"),
        ((IMAGE, (5, 5), (0, 0, 31, 20)), "30 x 20"),
        ((IMAGE, (5, 5), (0, 0, 30, 21)), "30 x 20"),
        ((IMAGE, (5, 5), (-1, 0, 30, 20)), r"box = \(-1, 0, 30, 20\)"),
        ((IMAGE, (5, 5), (7, 0, 7, 20)), r"box = \(7, 0, 7, 20\)"),
        ((IMAGE, (5, 5), (0, 9, 30, 8)), r"box = \(0, 9, 30, 8\)"),
        ((IMAGE, (5, 5), (0, 0, 9.5, 8)), r"box = \(0, 0, 9\.5, 8\)"),
        ((IMAGE, (5, 5), (0, 0, 9)), r"box = \(0, 0, 9\)"),
        ((IMAGE, (5, 5), None, "pillow11"), "version = 'pillow11'"),
        ((IMAGE, (5, 5), None, "pillow12", "cubic"), "filter = 'cubic'"),
    ],
)  # fmt: skip
def test_an_image_that_cannot_be_resized_is_rejected_with_a_fix(
    arguments: tuple[object, ...], named: str
) -> None:
    with pytest.raises(UserError, match=f"resize: .*{named}") as caught:
        drumline.resize(*arguments)  # type: ignore[arg-type]
    assert caught.value.fix


@pytest.mark.parametrize("wrong", [{"size": 224}, {"size": None}, {"size": (5, 5), "box": 3}])
def test_a_size_or_box_of_a_wrong_type_is_rejected_with_a_fix(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"resize: (size|box) = ") as caught:
        drumline.resize(IMAGE, **wrong)  # type: ignore[arg-type]
    assert caught.value.fix
