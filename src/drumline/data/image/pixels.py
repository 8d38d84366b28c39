"""Pillow's colour and geometry operations for a whole batch of uint8 images, on any device.

Promises: the bits of Pillow (as torchvision's PIL path calls it) on x86-64, equal on CPU and CUDA; every sample
has its own parameter; no host sync. Arithmetic is integer, table look-up, or separate float32 operations in
Pillow's order, so no kernel may fuse or reorder it. Parameters come from `augment` and are not checked here.

Images are (n, H, W, C) with C 1 or 3; parameters are tensors of n on the same device. A new tensor comes back.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Matrix = tuple[float, float, float, float, float, float]
"""Where an output pixel comes from: x' = a x + b y + c, y' = d x + e y + f, pixel centres at halves."""
COLOUR_BITS = 23
"""Fixed point of the way back from HSV: the most that 255 times a share fits into int32. Equal to Pillow for all
2^24 colours; with 22 bits three values differ."""


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """ImageEnhance.Brightness: 0 is black, 1 the image."""
    return _blended(torch.zeros((), device=images.device), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """ImageEnhance.Contrast: 0 is the mean grey of the image, 1 the image."""
    pixels = images.shape[1] * images.shape[2]
    total = grey(images).sum(dim=(1, 2, 3), dtype=torch.int64)
    mean = (2 * total + pixels) // (2 * pixels)
    return _blended(mean.float().view(-1, 1, 1, 1), images, factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """ImageEnhance.Color: 0 is the grey image, 1 the image. A grey image stays as it is."""
    if images.shape[3] == 1:
        return images.clone()
    return _blended(grey(images).float(), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """ImageEnhance.Sharpness: 0 is the smoothed image, 1 the image, above is sharper."""
    wide = images.to(torch.int16)
    columns = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    square = columns[:, :-2] + columns[:, 1:-1] + columns[:, 2:]
    # Pillow's kernel is 1/13 around 5/13 in float32, plus one half, truncated. The nearest that sum comes to a
    # whole number is 1/26, far above float32's error, so integers give the same.
    inner = (2 * square + 8 * wide[:, 1:-1, 1:-1] + 13) // 26
    smooth = images.float()  # The outermost pixels are not smoothed.
    smooth[:, 1:-1, 1:-1] = inner.float()
    return _blended(smooth, images, factor)


def hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turns the hue by `shift` 255ths of a circle through Pillow's HSV, as torchvision's adjust_hue does. The way
    there and back is lossy even for 0. A grey image stays as it is."""
    if images.shape[3] == 1:
        return images.clone()
    tables = _hue_tables(images.device)
    red, green, blue = images.int().unbind(dim=3)
    high = torch.maximum(torch.maximum(red, green), blue)
    spread = high - torch.minimum(torch.minimum(red, green), blue)
    # The highest channel, the first of equals, picks a sector; the difference of the other two the angle in it.
    place = torch.where(
        red == high, green - blue, torch.where(green == high, blue - red + 511, red - green + 2 * 511)
    )
    angle = tables.angle[(place + 255) * 256 + spread].int()
    angle = (angle + shift.int().view(-1, 1, 1)) & 255
    strength = tables.strength[high * 256 + spread].int()
    shares = tables.shares[angle * 256 + strength]
    value = high.unsqueeze(3) * shares
    return ((value + (1 << COLOUR_BITS - 1)) >> COLOUR_BITS).to(torch.uint8)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """ImageOps.posterize: keeps the upper 1 to 8 bits."""
    mask = (255 << (8 - bits.int())) & 255
    return images & mask.to(torch.uint8).view(-1, 1, 1, 1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """ImageOps.solarize: inverts values at or above the threshold, 0 to 256. For a fractional threshold give the
    next whole number."""
    return torch.where(images.int() < threshold.int().view(-1, 1, 1, 1), images, 255 - images)


def autocontrast(images: Tensor) -> Tensor:
    """ImageOps.autocontrast: each channel from 0 to 255; a channel of one value stays."""
    low, high = (edge.long().unsqueeze(2) for edge in (images.amin(dim=(1, 2)), images.amax(dim=(1, 2))))
    values = torch.arange(256, device=images.device)
    # From a table, because a device may divide by multiplying with the reciprocal.
    scale = _stretches(images.device)[high - low]
    stretched = (values.double() * scale + -low.double() * scale).clamp(0, 255)
    return _looked_up(images, torch.where(high > low, stretched.long(), values))


def equalize(images: Tensor) -> Tensor:
    """ImageOps.equalize: each channel's histogram as flat as Pillow makes it."""
    count, height, width, channels = images.shape
    index = images.long() + _table_starts(images)
    histogram = torch.zeros(count * channels * 256, dtype=torch.int32, device=images.device)
    # Whole numbers: the order in which they are added cannot matter.
    histogram.scatter_add_(0, index.flatten(), histogram.new_ones(1).expand(index.numel()))
    histogram = histogram.view(count, channels, 256).long()
    highest = images.amax(dim=(1, 2)).long().unsqueeze(2)
    step = (height * width - histogram.gather(2, highest)) // 255
    below = histogram.cumsum(dim=2) - histogram
    levels = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return _looked_up(images, torch.where(step > 0, levels, torch.arange(256, device=images.device)))


def affine(images: Tensor, coefficients: Tensor) -> Tensor:
    """Image.transform(AFFINE, NEAREST) on a black ground, by (n, 6) integers from `fixed_point`."""
    count, height, width, channels = images.shape
    a, b, c, d, e, f = coefficients.int().view(count, 6, 1, 1).unbind(dim=1)
    rows = torch.arange(height, dtype=torch.int32, device=images.device).view(1, -1, 1)
    columns = torch.arange(width, dtype=torch.int32, device=images.device).view(1, 1, -1)
    x = ((b * rows + c) + a * columns) >> 16
    y = ((e * rows + f) + d * columns) >> 16
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    first = torch.arange(0, count * height * width, height * width, device=images.device).view(-1, 1, 1)
    index = first + (y * width + x).masked_fill_(~inside, 0)
    return images.reshape(-1, channels)[index].mul_(inside.unsqueeze(3))


def erase(images: Tensor, box: Tensor, fill: Tensor) -> Tensor:
    """Each sample's box (n, 4), as x0, y0, x1, y1, in its colour (n, C)."""
    count, height, width, _ = images.shape
    x0, y0, x1, y1 = box.view(count, 4, 1, 1).unbind(dim=1)
    rows = torch.arange(height, device=images.device).view(1, -1, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, -1)
    inside = (columns >= x0) & (columns < x1) & (rows >= y0) & (rows < y1)
    return torch.where(inside.unsqueeze(3), fill.to(torch.uint8).view(count, 1, 1, -1), images)


def grey(images: Tensor) -> Tensor:
    """Image.convert("L"): int32 of one channel."""
    if images.shape[3] == 1:
        return images.int()
    red, green, blue = images.int().unbind(dim=3)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).unsqueeze(3)


def fixed_point(matrix: Matrix) -> tuple[int, ...]:
    """A matrix in Pillow's 16-bit fixed point, moved to pixel centres. Pillow takes this way for all images whose
    sides and whose transformed corners are below 32768."""
    a, b, c, d, e, f = matrix
    centred = (a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5)
    return tuple(math.floor(value * 65536.0 + 0.5) for value in centred)


def shear_x(level: float) -> Matrix:
    """Rows move by `level` per row from the top, as torchvision's RandAugment shears: through degrees and back."""
    return (1.0, math.tan(math.radians(math.degrees(math.atan(level)))), 0.0, 0.0, 1.0, 0.0)


def shear_y(level: float) -> Matrix:
    """Columns move by `level` per column from the left, through degrees and back."""
    angle = math.radians(math.degrees(math.atan(level)))
    return (1.0, 0.0, 0.0, -math.sin(-angle) / math.cos(angle), 1.0, 0.0)


def translate(right: int, down: int) -> Matrix:
    """The image moves by whole pixels."""
    return (1.0, 0.0, -float(right), 0.0, 1.0, -float(down))


def rotate(degrees: float, width: int, height: int) -> Matrix:
    """Image.rotate: counter-clockwise around the centre, the frame stays."""
    angle = -math.radians(degrees % 360.0)
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return (cosine, sine, cosine * -x + sine * -y + x, -sine, cosine, -sine * -x + cosine * -y + y)


def _blended(ground: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Image.blend: ground + factor * (image - ground) in float32, clipped, truncated. `ground` is float."""
    return (
        images.sub(ground).mul_(factor.float().view(-1, 1, 1, 1)).add_(ground).clamp_(0, 255).to(torch.uint8)
    )


def _looked_up(images: Tensor, tables: Tensor) -> Tensor:
    """Every value through the table (n, C, 256) of its sample and channel."""
    return tables.to(torch.uint8).flatten()[images.long() + _table_starts(images)]


def _table_starts(images: Tensor) -> Tensor:
    """Where each sample's and channel's 256 entries begin, shaped to add to the images."""
    count, _, _, channels = images.shape
    return torch.arange(0, count * channels * 256, 256, device=images.device).view(count, 1, 1, channels)


@lru_cache
def _stretches(device: torch.device) -> Tensor:
    """255 / width for each width of a histogram; 1 for a width of 0."""
    return torch.tensor([1.0, *(255.0 / width for width in range(1, 256))], dtype=torch.float64).to(device)


class _HueTables(NamedTuple):
    """Pillow's HSV conversion, computed once in its own mixture of float32 and float64."""

    angle: Tensor
    """uint8 by (sector, difference of the other two channels + 255, spread): 3 x 511 x 256."""
    strength: Tensor
    """uint8 by (highest channel, spread): 256 x 256."""
    shares: Tensor
    """int32 by (hue, saturation): 256 x 256 rows of three shares of the value, in COLOUR_BITS."""


@lru_cache
def _hue_tables(device: torch.device) -> _HueTables:
    parts = (_angles().ravel(), _strengths().ravel(), _shares().reshape(-1, 3))
    return _HueTables(*(torch.from_numpy(part).to(device) for part in parts))


def _angles() -> NDArray[np.uint8]:
    spread = np.maximum(np.arange(256, dtype=np.float32), 1)
    apart = np.arange(-255, 256, dtype=np.float32)[:, None]
    # The lowest channel is a whole spread below the highest, so one of the two quotients is 1.
    first = np.where(apart >= 0, np.float32(1), (spread + apart) / spread).astype(np.float64)
    second = np.where(apart >= 0, (spread - apart) / spread, np.float32(1)).astype(np.float64)
    sixths = (2.0 * np.arange(3)[:, None, None] + first - second).astype(np.float32)
    turns = sixths.astype(np.float64) / 6.0 + 1.0
    angle = np.clip((turns - np.floor(turns)).astype(np.float32).astype(np.float64) * 255.0, 0, 255)
    return angle.astype(np.uint8)


def _strengths() -> NDArray[np.uint8]:
    high = np.maximum(np.arange(256, dtype=np.float32), 1)[:, None]
    share = np.arange(256, dtype=np.float32) / high
    return np.clip(share.astype(np.float64) * 255.0, 0, 255).astype(np.uint8)


def _shares() -> NDArray[np.int32]:
    place = np.arange(256) * 6.0 / 255.0
    sector = np.floor(place)
    rest = (place - sector).astype(np.float32)[:, None]
    strength = (np.arange(256) / 255.0).astype(np.float32)
    full = np.ones((256, 256))
    low = full - strength
    falling = 1.0 - (strength * rest).astype(np.float64)
    rising = 1.0 - strength.astype(np.float64) * (1.0 - rest.astype(np.float64))
    orders = (
        (full, rising, low),
        (falling, full, low),
        (low, full, rising),
        (low, falling, full),
        (rising, low, full),
        (full, low, falling),
    )
    by_sector = np.stack([np.stack(order, axis=-1) for order in orders])
    shares = by_sector[sector.astype(np.int64) % 6, np.arange(256)]
    return np.rint(shares * (1 << COLOUR_BITS)).astype(np.int32)
