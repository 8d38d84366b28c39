"""Crop, Pillow-exact resize and mirror for a ragged batch on the GPU: one Triton kernel, one launch.

Promises: the pixels of `drumline.data.image.resize` to the bit, and for Y, Cb, Cr planes those of libjpeg's fancy
upsampling and integer colour conversion before it.
Places and boxes are checked on the host before a kernel reads them.

A program makes a tile of OUTER x INNER target pixels. It walks the source lines that the tile needs, LINES at a time:
resamples each along the line (Pillow's first pass, rounded to uint8) and adds it, weighted, to the targets it
belongs to (the second pass). Source pixels are converted to RGB as they are read; each is read about 2.5 times,
which costs less than a pass of its own through memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from drumline.data.gpu.layout import Places, PlaneLayout, chroma_size, halved
from drumline.data.image.resize import FRACTION_BITS, Smooth, Version, coefficients, vertical_first

TABLE_BYTES = 64 << 20
"""What the weights of all pairs of sizes seen so far may take on the device before they are forgotten."""


class Resampler:
    """Calls as `resample(arena, places, geometry, out)` on the current stream, always the same one.

    `out` is uint8 (n, size, size, 3). Keeps the weights of each pair of sizes it has met on the device.
    """

    def __init__(
        self, device: torch.device, size: int, version: Version = "pillow12", filter: Smooth = "bilinear"
    ) -> None:
        self.device, self.size, self.version = device, size, version
        self._weights = _WeightTable(device, filter)

    def __call__(
        self, arena: torch.Tensor, places: Places, geometry: NDArray[np.int32], out: torch.Tensor
    ) -> None:
        count = len(geometry)
        if count == 0:
            return
        self._check(arena, places, geometry, out)
        rows = _rows(places, geometry, self.size, self.version, self._weights)
        samples = _to_device(rows, self.device)
        tiles = triton.cdiv(self.size, _OUTER) * triton.cdiv(self.size, _INNER)
        _resample[(tiles, count)](
            arena,
            self._weights.table,
            samples,
            out,
            self.size,
            COLUMNS=_COLUMNS,
            AXIS=len(_AXIS),
            FRACTION=FRACTION_BITS,
            OUTER=_OUTER,
            INNER=_INNER,
            LINES=_LINES,
            num_warps=_INNER // 32,
        )

    def _check(
        self, arena: torch.Tensor, places: Places, geometry: NDArray[np.int32], out: torch.Tensor
    ) -> None:
        left, top, right, bottom, width, height, x, y, _ = geometry.T
        assert arena.dtype == torch.uint8
        assert places.end <= arena.numel()
        assert len(places.layout) == len(geometry)
        assert ((left >= 0) & (left < right) & (right <= places.width)).all()
        assert ((top >= 0) & (top < bottom) & (bottom <= places.height)).all()
        assert ((x >= 0) & (x + self.size <= width) & (y >= 0) & (y + self.size <= height)).all()
        assert out.dtype == torch.uint8
        assert out.shape == (len(geometry), self.size, self.size, 3)
        assert out.is_contiguous()


class _WeightTable:
    """Weights on the device by (source, target). A pair's entry: first[target], count[target], then each tap's
    weights[target], so that neighbouring targets read neighbouring words."""

    def __init__(self, device: torch.device, filter: Smooth) -> None:
        self.device, self.filter = device, filter
        self.table = torch.empty(1 << 18, dtype=torch.int32, device=device)
        self._forget()

    def find(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 2): where each pair's entry begins, and its number of taps. Adds pairs not met before."""
        wanted = source << 32 | target
        found = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        known = self.keys[found] == wanted
        if not known.all():
            self._add(np.unique(wanted[~known]), wanted)
            found = np.searchsorted(self.keys, wanted)
        return self.entries[found]

    def _forget(self) -> None:
        self.keys = np.full(1, -1, np.int64)  # never looked up: no search meets an empty table
        self.entries = np.zeros((1, 2), np.int64)
        self.used = 0

    def _add(self, missing: NDArray[np.int64], wanted: NDArray[np.int64]) -> None:
        packed = [_packed(int(key), self.filter) for key in missing]
        if 4 * (self.used + sum(len(words) for words in packed)) > TABLE_BYTES and self.used:
            self._forget()
            missing = np.unique(wanted)
            packed = [_packed(int(key), self.filter) for key in missing]
        lengths = np.array([len(words) for words in packed], np.int64)
        starts = self.used + np.cumsum(lengths) - lengths
        end = self.used + int(lengths.sum())
        if end > self.table.numel():
            # The old table goes back to torch's allocator, which reuses it only behind the kernels that read it.
            grown = torch.empty(max(end, 2 * self.table.numel()), dtype=torch.int32, device=self.device)
            grown[: self.used].copy_(self.table[: self.used])
            self.table = grown
        self.table[self.used : end].copy_(_to_device(np.concatenate(packed), self.device))
        taps = lengths // (missing & 0xFFFFFFFF) - 2
        keys = np.concatenate([self.keys, missing])
        order = np.argsort(keys)
        self.keys = keys[order]
        self.entries = np.concatenate([self.entries, np.stack([starts, taps], axis=1)])[order]
        self.used = end


def _packed(key: int, filter: Smooth) -> NDArray[np.int32]:
    first, count, weights = coefficients(key >> 32, key & 0xFFFFFFFF, filter)
    return np.concatenate([first, count, weights.T.ravel()])


def _to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(array)
    if device.type != "cuda":  # Triton's interpreter, which runs on the host
        return host
    # torch keeps pinned memory until the copy out of it is done, and then reuses it.
    return host.pin_memory().to(device, non_blocking=True)


_AXIS = (
    "step",  # bytes from one to the next in the first plane, and in the chroma planes
    "chroma_step",
    "chroma_count",
    "halved",
    "smooth",
    "bias",
    "origin",  # of the crop
    "count",  # in the crop
    "table",  # the weights' entry
    "taps",
    "target",
    "window",
    "mirror",
    "out_step",
)
"""What the kernel reads about each axis of a sample, behind the three planes' offsets, the kind (0: a byte per colour
and pixel; 1: full-size Y, Cb, Cr; 2: subsampled Cb, Cr) and the bias: first of pixels, then of lines. A line is what
the first pass resamples: a row, or a column in Pillow 13's other order. The swap is done here, not in the kernel."""
_COLUMNS = 5 + 2 * len(_AXIS)


def _rows(
    places: Places, geometry: NDArray[np.int32], size: int, version: Version, weights: _WeightTable
) -> NDArray[np.int64]:
    left, top, right, bottom, width, height, x, y, mirror = np.ascontiguousarray(geometry.T, np.int64)
    layout, count = places.layout, len(geometry)
    halves_width, halves_height = halved(layout)
    chroma_width, chroma_height = chroma_size(layout, places.width, places.height)
    # libjpeg repeats samples instead of smoothing where two or fewer of them make a row.
    narrow = halves_width & (chroma_width <= 2)
    smooth_x, smooth_y = halves_width & ~narrow, halves_height & ~narrow
    interleaved = layout == PlaneLayout.RGB
    spread = np.where(interleaved[:, None], np.arange(3), 0)
    crop_width, crop_height = right - left, bottom - top
    entries = weights.find(np.concatenate([crop_width, crop_height]), np.concatenate([width, height])).T

    rows = np.empty((count, _COLUMNS), np.int64)
    rows[:, :3] = np.where(
        (layout <= PlaneLayout.GREY)[:, None], places.offsets[:, :1] + spread, places.offsets
    )
    rows[:, 3] = np.where(layout < PlaneLayout.YCC_444, 0, np.where(layout == PlaneLayout.YCC_444, 1, 2))
    # libjpeg alternates the rounding: 8, 7 along x when both axes are smoothed, else 1, 2 along the one that is.
    rows[:, 4] = np.where(smooth_x & smooth_y, 8, smooth_x | smooth_y)
    bias_x = np.where(smooth_y, -1, 1) * smooth_x
    along_x = (
        np.where(interleaved, 3, 1), 1, chroma_width, halves_width, smooth_x, bias_x, left, crop_width,
        entries[0, :count], entries[1, :count], width, x, mirror, 3,
    )  # fmt: skip
    along_y = (
        places.pitches[:, 0], places.pitches[:, 1], chroma_height, halves_height, smooth_y, smooth_y & ~smooth_x, top,
        crop_height, entries[0, count:], entries[1, count:], height, y, 0, 3 * size,
    )  # fmt: skip
    pixels, lines = np.split(rows[:, 5:], 2, axis=1)
    for column, (of_x, of_y) in enumerate(zip(along_x, along_y, strict=True)):
        pixels[:, column], lines[:, column] = of_x, of_y
    sides = zip(*(side.tolist() for side in (crop_width, crop_height, width, height)), strict=True)
    swapped = np.array([vertical_first(version, *side) for side in sides])
    if swapped.any():
        pixels[swapped], lines[swapped] = lines[swapped], pixels[swapped]
    return rows


_OUTER, _INNER, _LINES = 8, 32, 4


@triton.jit
def _clip(value):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(value, 0), 255)


@triton.jit
def _convert(y, cb, cr):  # type: ignore[no-untyped-def]
    """libjpeg's integer YCbCr to RGB: 16 fraction bits, rounded half up per term (red, blue) or sum (green)."""
    cb -= 128
    cr -= 128
    red = y + ((91881 * cr + 32768) >> 16)
    green = y + ((-22554 * cb - 46802 * cr + 32768) >> 16)
    blue = y + ((116130 * cb + 32768) >> 16)
    return _clip(red), _clip(green), _clip(blue)


@triton.jit
def _fetch(plane, at):  # type: ignore[no-untyped-def]
    """Bytes as integers. Flattened for the load, since Triton would else spread a line over few threads."""
    return (
        tl.load(plane + at.reshape(at.shape[0] * at.shape[1])).reshape(at.shape[0], at.shape[1]).to(tl.int32)
    )


@triton.jit
def _chroma(plane, near, beside, across, corner, near_x, far_x, near_y, far_y, bias, shift):  # type: ignore[no-untyped-def]
    """One upsampled chroma value out of the nearest sample and its neighbours."""
    line = near_x * _fetch(plane, near) + far_x * _fetch(plane, beside)
    other = near_x * _fetch(plane, across) + far_x * _fetch(plane, corner)
    return (near_y * line + far_y * other + bias) >> shift


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    arena, table, row, inner, outer, AXIS: tl.constexpr, FRACTION: tl.constexpr, OUTER: tl.constexpr,
    INNER: tl.constexpr, LINES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The three colours of a tile whose targets are `inner` along lines and `outer` across them."""
    first = arena + tl.load(row)
    second = arena + tl.load(row + 1)
    third = arena + tl.load(row + 2)
    bias = tl.load(row + 4).to(tl.int32)
    of_pixels, of_lines = row + 5, row + 5 + AXIS
    pixel_step, line_step = tl.load(of_pixels).to(tl.int32), tl.load(of_lines).to(tl.int32)
    chroma_pixel_step, chroma_line_step = (
        tl.load(of_pixels + 1).to(tl.int32),
        tl.load(of_lines + 1).to(tl.int32),
    )
    chroma_pixels, chroma_lines = tl.load(of_pixels + 2).to(tl.int32), tl.load(of_lines + 2).to(tl.int32)
    pixels_halved, lines_halved = tl.load(of_pixels + 3).to(tl.int32), tl.load(of_lines + 3).to(tl.int32)
    pixels_smooth, lines_smooth = tl.load(of_pixels + 4).to(tl.int32), tl.load(of_lines + 4).to(tl.int32)
    bias_pixel, bias_line = tl.load(of_pixels + 5).to(tl.int32), tl.load(of_lines + 5).to(tl.int32)
    pixel_origin, line_origin = tl.load(of_pixels + 6).to(tl.int32), tl.load(of_lines + 6).to(tl.int32)
    pixels, lines = tl.load(of_pixels + 7).to(tl.int32), tl.load(of_lines + 7).to(tl.int32)
    inner_table, outer_table = table + tl.load(of_pixels + 8), table + tl.load(of_lines + 8)
    inner_taps = tl.load(of_pixels + 9).to(tl.int32)
    inner_target, outer_target = tl.load(of_pixels + 10).to(tl.int32), tl.load(of_lines + 10).to(tl.int32)

    inner_first = tl.load(inner_table + inner)
    outer_first = tl.load(outer_table + outer)
    outer_count = tl.load(outer_table + outer_target + outer)
    begin = tl.min(outer_first, axis=0)
    end = tl.max(outer_first + outer_count, axis=0)

    near_x = 1 + 2 * pixels_smooth
    near_y = 1 + 2 * lines_smooth
    shift = 2 * (pixels_smooth + lines_smooth)
    half = 1 << (FRACTION - 1)
    red = tl.full((OUTER, INNER), half, tl.int32)
    green = tl.full((OUTER, INNER), half, tl.int32)
    blue = tl.full((OUTER, INNER), half, tl.int32)
    for start in range(begin, end, LINES):
        line = start + tl.arange(0, LINES)
        y = (line_origin + tl.minimum(line, lines - 1))[:, None]
        red_line = tl.full((LINES, INNER), half, tl.int32)
        green_line = tl.full((LINES, INNER), half, tl.int32)
        blue_line = tl.full((LINES, INNER), half, tl.int32)
        for tap in range(inner_taps):
            weight = tl.load(inner_table + (2 + tap) * inner_target + inner)[None, :]
            x = (pixel_origin + tl.minimum(inner_first + tap, pixels - 1))[None, :]
            at = y * line_step + x * pixel_step
            if KIND == 0:
                r = _fetch(first, at)
                g = _fetch(second, at)
                b = _fetch(third, at)
            else:
                luma = _fetch(first, at)
                if KIND == 1:
                    at = y * chroma_line_step + x * chroma_pixel_step
                    cb = _fetch(second, at)
                    cr = _fetch(third, at)
                else:
                    # Triangle filter: 3/4 of the nearest sample, 1/4 of the one on the other side, edges repeated.
                    near = x >> pixels_halved
                    beside = tl.minimum(
                        tl.maximum(near + (2 * (x & 1) - 1) * pixels_smooth, 0), chroma_pixels - 1
                    )
                    mine = y >> lines_halved
                    other = tl.minimum(
                        tl.maximum(mine + (2 * (y & 1) - 1) * lines_smooth, 0), chroma_lines - 1
                    )
                    near *= chroma_pixel_step
                    beside *= chroma_pixel_step
                    mine *= chroma_line_step
                    other *= chroma_line_step
                    rounding = bias + bias_pixel * (x & 1) + bias_line * (y & 1)
                    cb = _chroma(
                        second, mine + near, mine + beside, other + near, other + beside, near_x, pixels_smooth,
                        near_y, lines_smooth, rounding, shift,
                    )  # fmt: skip
                    cr = _chroma(
                        third, mine + near, mine + beside, other + near, other + beside, near_x, pixels_smooth,
                        near_y, lines_smooth, rounding, shift,
                    )  # fmt: skip
                r, g, b = _convert(luma, cb, cr)
            red_line += weight * r
            green_line += weight * g
            blue_line += weight * b
        tap_of = line[None, :] - outer_first[:, None]
        belongs = (tap_of >= 0) & (tap_of < outer_count[:, None])
        weights = tl.load(outer_table + (2 + tap_of) * outer_target + outer[:, None], mask=belongs, other=0)
        weights = weights[:, :, None]
        red += tl.sum(weights * _clip(red_line >> FRACTION)[None, :, :], axis=1)
        green += tl.sum(weights * _clip(green_line >> FRACTION)[None, :, :], axis=1)
        blue += tl.sum(weights * _clip(blue_line >> FRACTION)[None, :, :], axis=1)
    return _clip(red >> FRACTION), _clip(green >> FRACTION), _clip(blue >> FRACTION)


@triton.jit
def _resample(  # type: ignore[no-untyped-def]
    arena, table, samples, out, SIZE, COLUMNS: tl.constexpr,
    AXIS: tl.constexpr, FRACTION: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(SIZE, INNER)
    tile = tl.program_id(0)
    sample = tl.program_id(1)
    row = samples + sample * COLUMNS
    outer_at = (tile // across) * OUTER + tl.arange(0, OUTER)
    inner_at = (tile % across) * INNER + tl.arange(0, INNER)
    inside = (outer_at < SIZE)[:, None] & (inner_at < SIZE)[None, :]
    of_pixels, of_lines = row + 5, row + 5 + AXIS
    inner = tl.minimum(inner_at, SIZE - 1)
    inner = tl.where(tl.load(of_pixels + 12) != 0, SIZE - 1 - inner, inner) + tl.load(of_pixels + 11).to(
        tl.int32
    )
    outer = tl.minimum(outer_at, SIZE - 1)
    outer = tl.where(tl.load(of_lines + 12) != 0, SIZE - 1 - outer, outer) + tl.load(of_lines + 11).to(
        tl.int32
    )
    kind = tl.load(row + 3)
    if kind == 0:
        red, green, blue = _tile(arena, table, row, inner, outer, AXIS, FRACTION, OUTER, INNER, LINES, KIND=0)
    elif kind == 1:
        red, green, blue = _tile(arena, table, row, inner, outer, AXIS, FRACTION, OUTER, INNER, LINES, KIND=1)
    else:
        red, green, blue = _tile(arena, table, row, inner, outer, AXIS, FRACTION, OUTER, INNER, LINES, KIND=2)
    inner_step, outer_step = tl.load(of_pixels + 13).to(tl.int32), tl.load(of_lines + 13).to(tl.int32)
    at = (inner_at * inner_step)[None, :] + (outer_at * outer_step)[:, None]
    base = out + sample.to(tl.int64) * SIZE * SIZE * 3
    tl.store(base + at, red.to(tl.uint8), mask=inside)
    tl.store(base + at + 1, green.to(tl.uint8), mask=inside)
    tl.store(base + at + 2, blue.to(tl.uint8), mask=inside)
