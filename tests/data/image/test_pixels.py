"""Pixel operations beside Pillow's own, image by image: not one pixel may differ."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from drumline.data.image import pixels

Images = NDArray[np.uint8]
SHAPES = ((32, 32, 3), (33, 47, 3), (28, 28, 1), (5, 70, 1), (2, 3, 3))


def noise(shape: tuple[int, int, int], count: int, seed: int = 0) -> Images:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def photographs(shape: tuple[int, int, int], count: int, seed: int = 0) -> Images:
    """Smooth light, a few edges, a little grain, narrow or clipped ranges: histograms like a camera's."""
    height, width, channels = shape
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j][..., None]
    images = np.empty((count, *shape), np.uint8)
    for slot in range(count):
        waves, phases = draw.uniform(-4, 4, (2, 3, channels)), draw.uniform(0, 6, (3, channels))
        light = sum(np.sin(waves[0, k] * x + waves[1, k] * y + phases[k]) for k in range(3)) / 3
        edge = np.where(x * draw.uniform(-1, 1) + y > draw.uniform(0, 1), draw.uniform(0, 0.6), 0.0)
        values = (
            draw.uniform(20, 235) + draw.uniform(5, 150) * (light + edge) + draw.normal(0, 3, light.shape)
        )
        images[slot] = np.clip(values, 0, 255)
    return images


def flat(shape: tuple[int, int, int]) -> Images:
    """Images of one value, and of two."""
    images = np.stack([np.full(shape, value, np.uint8) for value in (0, 1, 128, 254, 255, 7, 200)])
    images[5, 0, 0], images[6, 0, 0, 0] = 9, 30
    return images


def every_kind(shape: tuple[int, int, int], count: int) -> Images:
    return np.concatenate([noise(shape, count), photographs(shape, count), flat(shape)])


def pillow(operation: Callable[..., Image.Image], images: Images, *parameters: object) -> Images:
    """Pillow on each image with its own parameters."""
    results = []
    for slot, image in enumerate(images):
        picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
        result = operation(picture, *(values[slot] for values in parameters))  # type: ignore[index]
        results.append(np.asarray(result).reshape(image.shape))
    return np.stack(results)


def differing(ours: Tensor, theirs: Images) -> int:
    assert ours.dtype == torch.uint8
    assert tuple(ours.shape) == theirs.shape
    return int((ours.numpy() != theirs).sum())


def enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Callable[..., Image.Image]:
    return lambda picture, factor: kind(picture).enhance(factor)


def hue_by_pillow(picture: Image.Image, shift: int) -> Image.Image:
    """torchvision's adjust_hue on a PIL image; `shift` is int(hue_factor * 255)."""
    if picture.mode == "L":
        return picture
    angle, strength, value = picture.convert("HSV").split()
    turned = (np.asarray(angle).astype(np.int32) + shift).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned), strength, value)).convert("RGB")


def transformed(picture: Image.Image, matrix: pixels.Matrix) -> Image.Image:
    return picture.transform(
        picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=0
    )


def coefficients(matrices: list[pixels.Matrix]) -> Tensor:
    return torch.tensor([pixels.fixed_point(matrix) for matrix in matrices], dtype=torch.int32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (pixels.brightness, ImageEnhance.Brightness),
        (pixels.contrast, ImageEnhance.Contrast),
        (pixels.saturation, ImageEnhance.Color),
        (pixels.sharpness, ImageEnhance.Sharpness),
    ],
)
def test_blends_are_pillows(
    ours: Callable[[Tensor, Tensor], Tensor],
    theirs: Callable[[Image.Image], ImageEnhance._Enhance],
    shape: tuple[int, int, int],
) -> None:
    images = every_kind(shape, 60)
    draw = np.random.default_rng(1)
    for low, high in ((0.0, 1.0), (1.0, 2.0), (0.0, 6.0)):
        factors = draw.uniform(low, high, len(images)).astype(np.float32)
        factors[:4] = 0.0, 1.0, 0.1, 1.9
        expected = pillow(enhanced(theirs), images, factors.astype(float))
        assert differing(ours(torch.from_numpy(images), torch.from_numpy(factors)), expected) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_hue_is_pillows(shape: tuple[int, int, int]) -> None:
    images = every_kind(shape, 80)
    shifts = np.random.default_rng(2).integers(-127, 128, len(images))
    ours = pixels.hue(torch.from_numpy(images), torch.from_numpy(shifts))
    assert differing(ours, pillow(hue_by_pillow, images, shifts)) == 0


def test_the_conversion_to_hsv_and_back_is_pillows_for_every_colour() -> None:
    """All 2^24 colours, each red at its own shift; and every hue, saturation and value on the way back."""
    plane = np.stack(np.meshgrid(np.arange(256), np.arange(256), indexing="ij"), axis=-1).astype(np.uint8)
    shifts = np.random.default_rng(3).integers(-127, 128, 256)
    for first in range(0, 256, 8):
        colours = np.empty((8, 256, 256, 3), np.uint8)
        colours[..., 0] = np.arange(first, first + 8)[:, None, None]
        colours[..., 1:] = plane
        part = shifts[first : first + 8]
        ours = pixels.hue(torch.from_numpy(colours), torch.from_numpy(part))
        assert differing(ours, pillow(hue_by_pillow, colours, part)) == 0
    shares = pixels._hue_tables(torch.device("cpu")).shares.numpy().reshape(256, 256, 3)
    angle, strength = np.meshgrid(np.arange(256), np.arange(256), indexing="ij")
    half = 1 << pixels.COLOUR_BITS - 1
    for value in range(256):
        hsv = np.stack([angle, strength, np.full_like(angle, value)], axis=-1).astype(np.uint8)
        theirs = np.asarray(Image.frombytes("HSV", (256, 256), hsv.tobytes()).convert("RGB"))
        assert np.array_equal((value * shares + half) >> pixels.COLOUR_BITS, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_tone_operations_are_pillows(shape: tuple[int, int, int]) -> None:
    images = every_kind(shape, 60)
    tensor = torch.from_numpy(images)
    draw = np.random.default_rng(4)
    bits = draw.integers(1, 9, len(images))
    assert (
        differing(pixels.posterize(tensor, torch.from_numpy(bits)), pillow(ImageOps.posterize, images, bits))
        == 0
    )
    thresholds = draw.uniform(0, 256, len(images))
    thresholds[:3] = 0, 255, 256
    above = torch.from_numpy(np.ceil(thresholds).astype(np.int32))
    assert differing(pixels.solarize(tensor, above), pillow(ImageOps.solarize, images, thresholds)) == 0


@pytest.mark.parametrize("shape", [*SHAPES, (300, 300, 1)])
def test_histogram_operations_are_pillows(shape: tuple[int, int, int]) -> None:
    images = every_kind(shape, 100 if shape[0] < 100 else 4)
    tensor = torch.from_numpy(images)
    assert differing(pixels.autocontrast(tensor), pillow(ImageOps.autocontrast, images)) == 0
    assert differing(pixels.equalize(tensor), pillow(ImageOps.equalize, images)) == 0


def test_autocontrast_is_pillows_for_every_range() -> None:
    low, high = np.triu_indices(256)
    ramps = np.minimum(low[:, None] + np.arange(256), high[:, None]).astype(np.uint8)
    chosen = np.random.default_rng(5).permutation(len(ramps))[:4000]
    images = ramps[chosen].reshape(-1, 16, 16, 1)
    assert (
        differing(pixels.autocontrast(torch.from_numpy(images)), pillow(ImageOps.autocontrast, images)) == 0
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_shears_and_translations_are_pillows(shape: tuple[int, int, int]) -> None:
    images = every_kind(shape, 80)
    draw = np.random.default_rng(6)
    levels = draw.uniform(-0.3, 0.3, len(images))
    levels[:2] = 0.0, 0.3
    moves = draw.integers(-shape[1] - 2, shape[1] + 3, (len(images), 2))
    for matrices in (
        [pixels.shear_x(level) for level in levels],
        [pixels.shear_y(level) for level in levels],
        [pixels.translate(int(x), 0) for x, _ in moves],
        [pixels.translate(0, int(y)) for _, y in moves],
    ):
        ours = pixels.affine(torch.from_numpy(images), coefficients(matrices))
        assert differing(ours, pillow(transformed, images, matrices)) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_is_pillows(shape: tuple[int, int, int]) -> None:
    images = every_kind(shape, 150)
    angles = np.random.default_rng(7).uniform(-180, 180, len(images))
    angles[:9] = 0, 90, -90, 180, 270, 30, -30, 9, -9
    matrices = [pixels.rotate(angle, shape[1], shape[0]) for angle in angles]
    ours = pixels.affine(torch.from_numpy(images), coefficients(matrices))
    assert differing(ours, pillow(Image.Image.rotate, images, angles)) == 0


def test_matrices_are_those_of_torchvisions_formula() -> None:
    """Its inverse of rotation, shear and scale 1 around a centre, written out."""

    def inverse(
        centre: tuple[float, float], move: tuple[int, int], shear: tuple[float, float]
    ) -> list[float]:
        sx, sy = math.radians(shear[0]), math.radians(shear[1])
        a, b = math.cos(-sy) / math.cos(sy), -math.cos(-sy) * math.tan(sx) / math.cos(sy)
        c, d = math.sin(-sy) / math.cos(sy), -math.sin(-sy) * math.tan(sx) / math.cos(sy) + 1.0
        x, y = -centre[0] - move[0], -centre[1] - move[1]
        return [d, -b, d * x - b * y + centre[0], -c, a, -c * x + a * y + centre[1]]

    for level in np.linspace(-0.3, 0.3, 61):
        degrees = math.degrees(math.atan(level))
        assert list(pixels.shear_x(level)) == inverse((0, 0), (0, 0), (degrees, 0.0))
        assert list(pixels.shear_y(level)) == inverse((0, 0), (0, 0), (0.0, degrees))
    for move in range(-40, 40):
        assert list(pixels.translate(move, 0)) == inverse((16.5, 8.0), (move, 0), (0.0, 0.0))
        assert list(pixels.translate(0, move)) == inverse((16.5, 8.0), (0, move), (0.0, 0.0))


def test_erasing_fills_the_box_and_nothing_else() -> None:
    images = noise((9, 12, 3), 3)
    boxes = [(2, 1, 5, 9), (0, 0, 0, 0), (11, 8, 12, 9)]
    fill = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    expected = images.copy()
    for slot, (x0, y0, x1, y1) in enumerate(boxes):
        expected[slot, y0:y1, x0:x1] = fill[slot]
    ours = pixels.erase(torch.from_numpy(images), torch.tensor(boxes), torch.tensor(fill))
    assert differing(ours, expected) == 0


def test_operations_do_not_change_their_argument() -> None:
    images = torch.from_numpy(noise((8, 8, 3), 4))
    before, ones = images.clone(), torch.full((4,), 0.5)
    for operation in (pixels.brightness, pixels.contrast, pixels.saturation, pixels.sharpness, pixels.hue):
        operation(images, ones)
    pixels.affine(images, coefficients([pixels.translate(1, 1)] * 4))
    pixels.equalize(images)
    assert torch.equal(images, before)
