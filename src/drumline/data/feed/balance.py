"""Class-balanced sampling: which samples an epoch draws, and how often. Pure functions of numbers.

Promises: the samples of an epoch are a function of (seed, epoch, labels) alone. In every epoch, the number of draws
of a class is its share, rounded up or down, and the classes together fill the epoch exactly. Which classes are
rounded up rotates with the epoch, so no class is always left out. The samples of a class take turns in a fixed random
order: within an epoch, and over all epochs so far, the draws of any two of them differ by at most one.

With n samples in a class, `balanced` gives every class the same share and `sqrt` a share proportional to the square
root of n. Classes without samples have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from drumline.data.feed.draws import KEY_BITS, Purpose, bits

Ids = NDArray[np.int64]
Balance = Literal["none", "balanced", "sqrt"]
_FRACTION_BITS = 32
_GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio: its multiples modulo 2^32 are spread evenly."""
_EPOCHS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class ClassShares:
    """A training set divided by class, and the share of an epoch that each class gets."""

    members: Ids
    """All sample ids, class by class, each class in the order in which its samples take turns."""
    starts: Ids
    """The start of each class in `members`, and the end."""
    whole: Ids
    """Draws up to and including each class in an epoch: the whole part of the cumulative share..."""
    fraction: NDArray[np.uint64]
    """...and its fraction, in units of 2^-32."""
    seed: int

    @staticmethod
    def of(labels: Ids, balance: Balance, draws: int, seed: int) -> ClassShares:
        """The shares of an epoch of `draws` draws."""
        keys = _keys(seed, 0, np.arange(len(labels)), Purpose.BALANCE)
        sizes = np.bincount(labels)
        weights = np.cumsum(class_weights(sizes, balance), dtype=np.int64).tolist()
        # Exact integers: the counts of an epoch must not depend on how a machine rounds.
        cuts = [(weight * draws << _FRACTION_BITS) // weights[-1] for weight in weights]
        return ClassShares(
            members=np.lexsort((keys, labels)).astype(np.int64),
            starts=np.concatenate([[0], np.cumsum(sizes)]),
            whole=np.array([cut >> _FRACTION_BITS for cut in cuts], np.int64),
            fraction=np.array([cut & (1 << _FRACTION_BITS) - 1 for cut in cuts], np.uint64),
            seed=seed,
        )

    def counts(self, epoch: int) -> Ids:
        """How often each class is drawn in an epoch."""
        return self._counts(np.array([epoch], np.uint64))[0]

    def order(self, epoch: int) -> tuple[Ids, Ids]:
        """The sample ids of an epoch in their order, and how often the epoch has drawn each of them before."""
        return _order(self, epoch)

    def _counts(self, epochs: NDArray[np.uint64]) -> Ids:
        """(epochs, classes). Adding the same number below one to all cumulative shares before they are rounded down
        rounds each class up or down, and keeps the sum."""
        mask = np.uint64((1 << _FRACTION_BITS) - 1)
        offsets = (epochs * np.uint64(_GOLDEN)) & mask
        carried = (self.fraction + offsets[:, None]) >> np.uint64(_FRACTION_BITS)
        ends = self.whole + carried.astype(np.int64)
        return np.diff(ends, axis=1, prepend=0)

    def _before(self, epoch: int) -> Ids:
        """How often each class was drawn in the epochs before this one."""
        total = np.zeros(len(self.whole), np.int64)
        for first in range(0, epoch, _EPOCHS_AT_ONCE):
            epochs = np.arange(first, min(first + _EPOCHS_AT_ONCE, epoch), dtype=np.uint64)
            total += self._counts(epochs).sum(axis=0)
        return total


def epoch_shares(labels: Ids, balance: Balance, batch: int, seed: int) -> ClassShares | None:
    """The shares of an epoch of whole batches; None if an epoch has each sample once."""
    if balance == "none":
        return None
    return ClassShares.of(labels, balance, len(labels) // batch * batch, seed)


def class_weights(sizes: Sequence[int] | Ids, balance: Balance) -> Ids:
    """Integers in proportion to the classes' shares of an epoch, by their numbers of samples."""
    sizes = np.asarray(sizes, np.int64)
    if balance == "none":
        return sizes
    if balance == "balanced":
        return (sizes > 0).astype(np.int64)
    # IEEE 754 rounds a square root exactly, so this is the same on every machine.
    return np.rint(np.sqrt(sizes.astype(np.float64)) * 2**20).astype(np.int64)


@lru_cache(maxsize=4)
def _order(shares: ClassShares, epoch: int) -> tuple[Ids, Ids]:
    counts, sizes = shares.counts(epoch), np.diff(shares.starts)
    drawn = np.repeat(np.arange(len(counts)), counts)
    turn = np.arange(len(drawn)) - np.repeat(np.cumsum(counts) - counts, counts)
    place = (shares._before(epoch)[drawn] + turn) % sizes[drawn]
    samples, repeats = shares.members[shares.starts[drawn] + place], turn // sizes[drawn]
    order = np.argsort(_keys(shares.seed, epoch, samples | repeats << KEY_BITS, Purpose.ORDER), kind="stable")
    samples, repeats = samples[order], repeats[order]
    samples.flags.writeable = repeats.flags.writeable = False
    return samples, repeats


def _keys(seed: int, epoch: int, ids: Ids, purpose: Purpose) -> NDArray[np.uint64]:
    drawn = bits(seed, epoch, ids, purpose)
    return drawn[:, 0] << np.uint64(32) | drawn[:, 1]
