"""Keyed pixel augmentation: flips, rotation, RandAugment, jitter, erasing, decided per sample, applied per batch.

Promises: what happens to a sample is a function of (seed, epoch, sample id) alone, never of its batch, rank or
worker; `plan` is pure and its result is plain arrays; `apply` gives the same bits on every device, those of
Pillow's operations in torchvision's order (vertical flip, rotation, RandAugment, jitter, erasing), without a host
sync. Decisions use only arithmetic that is exact by IEEE rules, so machines cannot disagree; the matrices of
rotations also use the C library's sine and cosine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.data.feed.draws import Purpose, exp_small, uniform
from drumline.data.feed.sampler import Ids, Request
from drumline.data.image import pixels

MAGNITUDES = 31
ERASE_AREA, ERASE_ASPECT, ERASE_TRIES = (0.02, 0.33), (0.3, 3.3), 10
PARAMETERS = 7
"""int32 numbers of an operation; a float32 is stored by its bits."""

HOST_PIECE, DEVICE_PIECE = 1 << 19, 1 << 25
"""Bytes of images per operation. On the host, intermediate results then stay in the cache, which is two to four times
as fast as a whole batch; on a GPU they stay below 1 GB (some 24 times the images)."""


class Op(IntEnum):
    """A pixel operation of a plan."""

    NOTHING = 0
    AFFINE = 1
    BRIGHTNESS = 2
    SATURATION = 3
    CONTRAST = 4
    SHARPNESS = 5
    POSTERIZE = 6
    SOLARIZE = 7
    AUTOCONTRAST = 8
    EQUALIZE = 9
    HUE = 10
    ERASE = 11
    FLIP = 12


@dataclass(frozen=True)
class Augmentation:
    """The random pixel operations of training."""

    vflip: float = 0.0
    """Probability of a vertical flip."""
    rotation: float = 0.0
    """Maximum rotation in either direction, in degrees."""
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Strengths of brightness, contrast, saturation and hue as in torchvision's ColorJitter; 0 leaves one out."""
    randaugment: tuple[int, int] = (0, 0)
    """Operations per sample, and their magnitude from 0 to 30."""
    erasing: float = 0.0
    """Probability that a box is erased."""
    fill: tuple[int, ...] = (0,)
    """The colour of an erased box, one number or one per channel."""

    def __post_init__(self) -> None:
        assert 0 <= self.vflip <= 1, self.vflip
        assert 0 <= self.rotation <= 180, self.rotation
        assert min(self.jitter) >= 0, self.jitter
        assert self.jitter[3] <= 0.5, self.jitter
        assert self.randaugment[0] >= 0, self.randaugment
        assert 0 <= self.randaugment[1] < MAGNITUDES, self.randaugment
        assert 0 <= self.erasing <= 1, self.erasing
        assert len(self.fill) in (1, 3), self.fill

    @property
    def active(self) -> bool:
        return any((*self.jitter, self.vflip, self.rotation)) or self.randaugment[0] > 0 or self.erasing > 0


class OpRange(NamedTuple):
    """Neighbouring samples of a layer that go through one operation."""

    op: Op
    first: int
    last: int


@dataclass(frozen=True)
class AugmentPlan:
    """Layers to be applied one after the other. A layer first brings samples of the same operation together; a
    last row of the table brings them back into the batch's order."""

    table: NDArray[np.int32]
    """(layers + 1, n, 1 + PARAMETERS): the slot each sample is taken from, and its parameters."""
    runs: tuple[tuple[OpRange, ...], ...]
    """The operations of each layer."""


class _Layer(NamedTuple):
    """One operation for each sample."""

    ops: NDArray[np.int64]
    parameters: NDArray[np.int32]


def mean_colour(mean: tuple[float, ...]) -> tuple[int, ...]:
    """The fill of erased boxes: the set's mean, given with 255 as 1, as a uint8 colour."""
    return tuple(round(value * 255) for value in mean)


def plan(augmentation: Augmentation, seed: int, request: Request, size: int) -> AugmentPlan:
    """The plan for a batch of square images of this size."""
    return plans(augmentation, seed, [request], size)[0]


def plans(augmentation: Augmentation, seed: int, requests: list[Request], size: int) -> list[AugmentPlan]:
    """The plans of several requests of one epoch, decided together: many samples cost little more than a few."""
    epoch = requests[0].epoch
    assert all(request.epoch == epoch for request in requests)
    samples = np.concatenate([request.keys for request in requests])
    count, magnitude = augmentation.randaugment
    layers = [vertical_flip(augmentation.vflip, seed, epoch, samples)] if augmentation.vflip else []
    if augmentation.rotation:
        layers.append(random_rotation(augmentation.rotation, seed, epoch, samples, size))
    layers += randaugment(count, magnitude, seed, epoch, samples, size) if count else []
    if any(augmentation.jitter):
        layers += colour_jitter(augmentation.jitter, seed, epoch, samples)
    if augmentation.erasing:
        layers.append(random_erasing(augmentation.erasing, augmentation.fill, seed, epoch, samples, size))
    cuts = np.cumsum([0, *(len(request.samples) for request in requests)])
    return [
        _arranged([_Layer(layer.ops[a:b], layer.parameters[a:b]) for layer in layers], int(b - a))
        for a, b in pairwise(cuts)
    ]


def apply(images: torch.Tensor, plan: AugmentPlan) -> torch.Tensor:
    """The batch (n, H, W, C) uint8 after the plan, on its device. Does not change its argument."""
    if not plan.runs:
        return images
    table = torch.from_numpy(plan.table)
    if images.is_cuda:
        table = table.pin_memory().to(images.device, non_blocking=True)
    step = max(1, (DEVICE_PIECE if images.is_cuda else HOST_PIECE) // images[0].numel())
    for rows, runs in zip(table, plan.runs, strict=False):
        images = images[rows[:, 0]]
        for op, first, last in runs:
            for start in range(first, last, step):
                piece = slice(start, min(start + step, last))
                images[piece] = _result(op, images[piece], rows[piece, 1:])
    return images[table[-1, :, 0]]


def vertical_flip(probability: float, seed: int, epoch: int, samples: Ids) -> _Layer:
    """Turns images upside down, by mirroring them, with this probability."""
    chosen = uniform(seed, epoch, samples, Purpose.VERTICAL_FLIP, 1)[:, 0] < probability
    return _Layer(np.where(chosen, Op.FLIP, Op.NOTHING), np.zeros((len(samples), PARAMETERS), np.int32))


def random_rotation(most: float, seed: int, epoch: int, samples: Ids, size: int) -> _Layer:
    """Rotates each sample by an angle from -`most` to `most` degrees, as torchvision's RandomRotation does."""
    angles = (2 * uniform(seed, epoch, samples, Purpose.ROTATION, 1)[:, 0] - 1) * most
    parameters = np.zeros((len(samples), PARAMETERS), np.int32)
    parameters[:, :6] = [pixels.fixed_point(pixels.rotate(angle, size, size)) for angle in angles.tolist()]
    return _Layer(np.full(len(samples), int(Op.AFFINE)), parameters)


def randaugment(count: int, magnitude: int, seed: int, epoch: int, samples: Ids, size: int) -> list[_Layer]:
    """`count` operations for each sample out of torchvision's fourteen, all at one magnitude, with random signs."""
    ops, parameters = _choices(magnitude, size)
    draws = uniform(seed, epoch, samples, Purpose.RANDAUGMENT, 2 * count).reshape(-1, count, 2)
    chosen = (draws[:, :, 0] * (len(ops) // 2)).astype(np.int64) * 2 + (draws[:, :, 1] < 0.5)
    return [_Layer(ops[column], parameters[column]) for column in chosen.T]


def colour_jitter(
    strengths: tuple[float, float, float, float], seed: int, epoch: int, samples: Ids
) -> list[_Layer]:
    """Brightness, contrast and saturation by a factor of 1 - strength to 1 + strength (never below 0), hue by up to
    its strength of a circle either way, in a random order for each sample."""
    draws = uniform(seed, epoch, samples, Purpose.JITTER, 5)
    low = np.array([max(0.0, 1.0 - strength) for strength in strengths[:3]] + [-strengths[3]])
    high = np.array([1.0 + strength for strength in strengths[:3]] + [strengths[3]])
    amounts = low + draws[:, 1:] * (high - low)
    values = amounts.astype(np.float32).view(np.int32)
    values[:, 3] = np.trunc(amounts[:, 3] * 255)
    kinds = np.array(
        [
            kind if strength else Op.NOTHING
            for kind, strength in zip(
                (Op.BRIGHTNESS, Op.CONTRAST, Op.SATURATION, Op.HUE), strengths, strict=True
            )
        ]
    )
    orders = np.array(list(permutations(range(4))))
    layers = []
    for which in orders[(draws[:, 0] * len(orders)).astype(np.int64)].T:
        parameters = np.zeros((len(samples), PARAMETERS), np.int32)
        parameters[:, 0] = values[np.arange(len(samples)), which]
        layers.append(_Layer(kinds[which], parameters))
    return layers


def random_erasing(
    probability: float, fill: tuple[int, ...], seed: int, epoch: int, samples: Ids, size: int
) -> _Layer:
    """A box of 2 to 33 % of the area and aspect 0.3 to 3.3 where it fits, the first of ten tries that does."""
    ops = np.full(len(samples), int(Op.NOTHING))
    parameters = np.zeros((len(samples), PARAMETERS), np.int32)
    parameters[:, 4:] = fill
    open_ = np.flatnonzero(uniform(seed, epoch, samples, Purpose.ERASE, 1)[:, 0] < probability)
    for block in range(1, ERASE_TRIES + 1):
        if not len(open_):
            break
        draws = uniform(seed, epoch, samples[open_], Purpose.ERASE, 4, block)
        sides = _box_sides(draws[:, 0], draws[:, 1], size)
        fits = (sides < size).all(axis=1)
        done, sides = open_[fits], sides[fits]
        corner = np.floor(draws[fits, 2:] * (size - sides + 1))
        ops[done] = Op.ERASE
        parameters[done, :2], parameters[done, 2:4] = corner, corner + sides
        open_ = open_[~fits]
    return _Layer(ops, parameters)


def _box_sides(
    area_draw: NDArray[np.float64], aspect_draw: NDArray[np.float64], size: int
) -> NDArray[np.float64]:
    """Width and height of a box to erase: (n, 2) whole numbers. The aspect is uniform in its logarithm."""
    area = size * size * (ERASE_AREA[0] + area_draw * (ERASE_AREA[1] - ERASE_AREA[0]))
    low, high = math.log(ERASE_ASPECT[0]), math.log(ERASE_ASPECT[1])
    aspect = exp_small(low + aspect_draw * (high - low))
    return np.rint(np.sqrt(np.stack([area / aspect, area * aspect], axis=1)))


@lru_cache
def _choices(magnitude: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """torchvision's fourteen operations at a magnitude, each with sign + and then -: their ops, and parameters."""
    shear, factor = _level(0.3, magnitude), _level(0.9, magnitude)
    move, degrees = int(_level(150.0 / 331.0 * size, magnitude)), _level(30.0, magnitude)
    ops: list[Op] = []
    parameters = np.zeros((28, PARAMETERS), np.int32)

    def add(op: Op, plus: object, minus: object) -> None:
        for values in (plus, minus):
            numbers = np.atleast_1d(np.asarray(values))
            parameters[len(ops), : len(numbers)] = numbers
            ops.append(op)

    def blend(op: Op) -> None:
        add(op, *(np.float32(1.0 + signed).view(np.int32) for signed in (factor, -factor)))

    def warp(plus: pixels.Matrix, minus: pixels.Matrix) -> None:
        add(Op.AFFINE, pixels.fixed_point(plus), pixels.fixed_point(minus))

    add(Op.NOTHING, 0, 0)
    warp(pixels.shear_x(shear), pixels.shear_x(-shear))
    warp(pixels.shear_y(shear), pixels.shear_y(-shear))
    warp(pixels.translate(move, 0), pixels.translate(-move, 0))
    warp(pixels.translate(0, move), pixels.translate(0, -move))
    warp(pixels.rotate(degrees, size, size), pixels.rotate(-degrees, size, size))
    for op in (Op.BRIGHTNESS, Op.SATURATION, Op.CONTRAST, Op.SHARPNESS):
        blend(op)
    bits = 8 - round(magnitude / ((MAGNITUDES - 1) / 4))
    add(Op.POSTERIZE, bits, bits)
    threshold = math.ceil(255.0 - 255.0 / (MAGNITUDES - 1) * magnitude)
    add(Op.SOLARIZE, threshold, threshold)
    add(Op.AUTOCONTRAST, 0, 0)
    add(Op.EQUALIZE, 0, 0)
    return np.array(ops), parameters


def _level(top: float, magnitude: int) -> float:
    """Number `magnitude` of MAGNITUDES even steps from 0 to `top`, in float32 and from the nearer end, as torchvision
    takes them from torch.linspace (whose last bit depends on the width of the machine's vectors; ours does not)."""
    step = np.float32(top) / np.float32(MAGNITUDES - 1)
    if magnitude < MAGNITUDES // 2:
        return float(step * np.float32(magnitude))
    return float(np.float32(top) - step * np.float32(MAGNITUDES - 1 - magnitude))


def _arranged(layers: list[_Layer], count: int) -> AugmentPlan:
    """Sorts each layer by operation and works out which slot every sample comes from."""
    layers = [layer for layer in layers if layer.ops.any()]
    table = np.zeros((len(layers) + 1, count, 1 + PARAMETERS), np.int32)
    slot_of = np.arange(count)
    runs = []
    for rows, layer in zip(table, layers, strict=False):
        order = np.argsort(layer.ops, kind="stable")
        rows[:, 0] = slot_of[order]
        rows[:, 1:] = layer.parameters[order]
        slot_of[order] = np.arange(count)
        ends = np.cumsum(np.bincount(layer.ops, minlength=len(Op))).tolist()
        runs.append(
            tuple(
                OpRange(op, ends[op - 1], ends[op])
                for op in Op
                if op != Op.NOTHING and ends[op - 1] < ends[op]
            )
        )
    table[-1, :, 0] = slot_of
    return AugmentPlan(table, tuple(runs))


def _result(op: Op, images: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    first = parameters[:, 0]
    match op:
        case Op.AFFINE:
            return pixels.affine(images, parameters[:, :6])
        case Op.BRIGHTNESS:
            return pixels.brightness(images, first.view(torch.float32))
        case Op.SATURATION:
            return pixels.saturation(images, first.view(torch.float32))
        case Op.CONTRAST:
            return pixels.contrast(images, first.view(torch.float32))
        case Op.SHARPNESS:
            return pixels.sharpness(images, first.view(torch.float32))
        case Op.POSTERIZE:
            return pixels.posterize(images, first)
        case Op.SOLARIZE:
            return pixels.solarize(images, first)
        case Op.AUTOCONTRAST:
            return pixels.autocontrast(images)
        case Op.EQUALIZE:
            return pixels.equalize(images)
        case Op.HUE:
            return pixels.hue(images, first)
        case Op.FLIP:
            return images.flip(1)
        case Op.ERASE:
            return pixels.erase(images, parameters[:, :4], parameters[:, 4 : 4 + images.shape[3]])
        case _:
            raise AssertionError(op)
