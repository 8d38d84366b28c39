"""The sampler: which sample comes when, on which process. Pure functions of numbers.

Promises: the order of an epoch is a permutation that depends on (seed, epoch) alone. The slices of the processes are
disjoint, cover the global batch, and differ by at most one unit in length. Evaluation gives whole batches to the
processes, so on any world size every sample is counted once, and in the same batch.
The last incomplete training batch is dropped. Its samples are the last of that epoch's order, so the next epoch drops
different ones. With class-balanced sampling (`balance.py`), an epoch has as many batches, and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from drumline.data.feed.balance import ClassShares
from drumline.data.feed.draws import KEY_BITS, Purpose, bits

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """One batch to make: sample ids and epoch. Every worker makes the same batch of it."""

    epoch: int
    samples: Ids
    repeats: Ids | None = None
    """How often the epoch has drawn each sample before; None: never."""

    @property
    def keys(self) -> Ids:
        """The keys of random numbers: the sample ids; each repeated draw of a sample has its own key."""
        return self.samples if self.repeats is None else self.samples | self.repeats << KEY_BITS


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, samples: int) -> Ids:
    """A permutation of range(samples): sample ids sorted by a 64-bit number keyed to each."""
    drawn = bits(seed, epoch, np.arange(samples), Purpose.ORDER)
    keys = drawn[:, 0] << np.uint64(32) | drawn[:, 1]
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def steps_per_epoch(samples: int, batch: int) -> int:
    """Whole batches in an epoch."""
    return samples // batch


def bounds(total: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """Cuts `total` into `parts` runs whose lengths are multiples of `unit` and differ by at most one unit. The last
    run takes a remainder smaller than a unit. Returns parts + 1 positions."""
    whole = total // unit
    return (*(whole * part // parts * unit for part in range(parts)), total)


def rank_slice(batch: int, rank: int, world: int, unit: int = 1) -> slice:
    """A rank's slice of every global batch: the same in each step, so shapes are fixed."""
    cuts = bounds(batch, world, unit)
    return slice(cuts[rank], cuts[rank + 1])


def training_requests(
    *,
    seed: int,
    samples: int,
    batch: int,
    first_step: int,
    last_step: int,
    local: slice,
    shares: ClassShares | None = None,
) -> Iterator[Request]:
    """The requests of one rank from optimizer step `first_step` up to `last_step`, over epochs. `shares` are those of
    an epoch of whole batches."""
    per_epoch = steps_per_epoch(samples, batch)
    assert per_epoch > 0, (samples, batch)
    for step in range(first_step, last_step):
        epoch, position = divmod(step, per_epoch)
        yield batch_part(seed, epoch, samples, slice(position * batch, (position + 1) * batch), local, shares)


def batch_part(
    seed: int, epoch: int, samples: int, batch: slice, local: slice, shares: ClassShares | None = None
) -> Request:
    """A rank's slice of a batch, given by its positions in the epoch."""
    if shares is None:
        return Request(epoch, epoch_order(seed, epoch, samples)[batch][local])
    ids, repeats = shares.order(epoch)
    return Request(epoch, ids[batch][local], repeats[batch][local])


def evaluation_starts(*, samples: int, batch: int, rank: int, world: int) -> range:
    """The first sample of each of a rank's evaluation batches."""
    return range(rank * batch, samples, world * batch)


def evaluation_requests(*, samples: int, batch: int, rank: int, world: int) -> Iterator[Request]:
    """Batch k, in the order of the dataset, goes whole to rank k mod world, so batches do not depend on the world."""
    for first in evaluation_starts(samples=samples, batch=batch, rank=rank, world=world):
        yield Request(0, np.arange(first, min(first + batch, samples), dtype=np.int64))


def evaluation_bounds(samples: int, batch: int, world: int, start: int = 0) -> tuple[int, ...]:
    """Where the evaluation batches from `start` on begin and end. A remainder with less than one sample per process
    joins the batch before it, so that every process has a slice of every batch."""
    firsts = list(range(start, samples, batch))
    if len(firsts) > 1 and samples - firsts[-1] < world:
        firsts.pop()
    return (*firsts, samples)
