"""Random numbers as a pure function of (seed, epoch, sample id, purpose).

Promises: the same call gives the same numbers on every machine, in every process, in any order and for any slice of
the samples; two purposes never use the same numbers. There is no state, so there is nothing to save, to seed in a
worker or to lose on resume. The generator is Philox-4x32-10 (Salmon et al., 2011), vectorised over samples: the key
is the seed, the counter is (epoch, purpose and block, sample id).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

UINT32 = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


KEY_BITS = 32
"""A sample id has fewer bits. If an epoch draws a sample several times, the number of earlier draws is stored in the
bits above, so each draw has its own random numbers, and the first draw has those of a plain epoch."""


class Purpose(IntEnum):
    """What a draw is for. Numbers are part of the promise: add new ones, never renumber."""

    ORDER = 0
    CROP = 1
    FLIP = 2
    SHIFT = 3
    MIX_CHOICE = 4
    MIX_FRACTION = 5
    MIX_BOX = 6
    MODEL = 9
    ERASE = 10
    JITTER = 11
    RANDAUGMENT = 12
    SUBSTITUTE = 13
    BANK = 14
    BALANCE = 15
    VERTICAL_FLIP = 16
    ROTATION = 17
    OWN_TRANSFORM = 18


def bits(
    seed: int, epoch: int, samples: NDArray[np.integer], purpose: int, block: int = 0
) -> NDArray[np.uint64]:
    """Four 32-bit numbers per sample, shape (len(samples), 4), held in uint64."""
    assert 0 <= seed < 2**64, seed
    assert 0 <= epoch < 2**32, epoch
    assert 0 <= purpose < 2**16, purpose
    assert 0 <= block < 2**16, block
    ids: NDArray[np.uint64] = np.asarray(samples).astype(np.uint64)
    counter: list[NDArray[np.uint64]] = [
        np.full(ids.shape, epoch, np.uint64),
        np.full(ids.shape, purpose << 16 | block, np.uint64),
        ids & UINT32,
        ids >> _SHIFT,
    ]
    return _philox(counter, (np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)))


def uniform(
    seed: int, epoch: int, samples: NDArray[np.integer], purpose: int, count: int, block: int = 0
) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) per sample, shape (len(samples), count), 32 bits of resolution each."""
    blocks = [bits(seed, epoch, samples, purpose, block + i) for i in range((count + 3) // 4)]
    return np.concatenate(blocks, axis=1)[:, :count].astype(np.float64) * 2.0**-32


def symmetric_beta(
    seed: int, epoch: int, samples: NDArray[np.integer], purpose: int, alpha: float
) -> NDArray[np.float64]:
    """One number per sample from Beta(alpha, alpha), by rejection: each sample redraws from its own next block
    until it accepts, so a sample's number depends on no other sample. Up to 1 by Jöhnk's method; above, a uniform
    number is accepted in proportion to the density."""
    samples = np.asarray(samples)
    drawn = np.empty(len(samples))
    open_ = np.arange(len(samples))
    block = 0
    while len(open_):
        draws = uniform(seed, epoch, samples[open_], purpose, 4, block)
        for first in (0, 2):
            x, y = draws[:, first], draws[:, first + 1]
            if alpha <= 1:
                x, y = x ** (1 / alpha), y ** (1 / alpha)
                accepted = (x + y <= 1) & (x + y > 0)
                drawn[open_[accepted]] = x[accepted] / (x[accepted] + y[accepted])
            else:
                accepted = y < (4 * x * (1 - x)) ** (alpha - 1)
                drawn[open_[accepted]] = x[accepted]
            open_, draws = open_[~accepted], draws[~accepted]
        block += 1
    return drawn


def exp_small(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The exponential function for |x| <= 2, by its series: additions, multiplications and divisions round in the
    same way on every machine, which NumPy's own exp does not promise."""
    total = np.ones_like(x)
    for term in range(24, 0, -1):
        total = 1.0 + x / term * total
    return total


def _philox(counter: list[NDArray[np.uint64]], key: tuple[np.uint64, np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds over columns of 32-bit words kept in uint64, so that products need no wider type."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & UINT32,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & UINT32,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & UINT32, (k1 + _KEY_STEPS[1]) & UINT32
    return np.stack([c0, c1, c2, c3], axis=-1)
