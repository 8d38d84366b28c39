"""Which sample comes when, on which process: pure functions of numbers.

Promises: an epoch's order is a permutation that depends on (seed, epoch) alone; the shares of the processes
are disjoint, cover the global batch, and differ by at most one unit in length; evaluation deals whole
batches, so every sample is counted once on any world size and in the same batch.
The rule for the last incomplete training batch: it is dropped. The n mod batch samples left out are the last
of that epoch's order, so other ones are left out in the next epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from drumline.data.feed.draws import Purpose, bits

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """One batch to be made: whose samples, of which epoch. Enough for any worker to make the same batch."""

    epoch: int
    samples: Ids


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, samples: int) -> Ids:
    """A permutation of range(samples): sample ids sorted by a 64-bit number keyed to each."""
    words = bits(seed, epoch, np.arange(samples), Purpose.ORDER)
    keys = words[:, 0] << np.uint64(32) | words[:, 1]
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def steps_per_epoch(samples: int, batch: int) -> int:
    """Whole batches in an epoch."""
    return samples // batch


def bounds(total: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """Cut `total` into `parts` runs whose lengths are multiples of `unit` and differ by at most one unit
    (the last run takes a remainder smaller than a unit). Returns parts + 1 positions."""
    whole = total // unit
    return (*(whole * part // parts * unit for part in range(parts)), total)


def rank_slice(batch: int, rank: int, world: int, unit: int = 1) -> slice:
    """The part of every global batch that belongs to a rank; the same for each step, so shapes are fixed."""
    cuts = bounds(batch, world, unit)
    return slice(cuts[rank], cuts[rank + 1])


def training_requests(
    *, seed: int, samples: int, batch: int, first_step: int, last_step: int, local: slice
) -> Iterator[Request]:
    """The requests of one rank from optimizer step `first_step` up to `last_step`, over epochs."""
    per_epoch = steps_per_epoch(samples, batch)
    assert per_epoch > 0, (samples, batch)
    for step in range(first_step, last_step):
        epoch, position = divmod(step, per_epoch)
        order = epoch_order(seed, epoch, samples)
        yield Request(epoch, order[position * batch : (position + 1) * batch][local])


def evaluation_starts(*, samples: int, batch: int, rank: int, world: int) -> range:
    """The first sample of each of a rank's evaluation batches."""
    return range(rank * batch, samples, world * batch)


def evaluation_requests(*, samples: int, batch: int, rank: int, world: int) -> Iterator[Request]:
    """Batch k, in source order, goes whole to rank k mod world. A batch is the same whoever computes it."""
    for first in evaluation_starts(samples=samples, batch=batch, rank=rank, world=world):
        yield Request(0, np.arange(first, min(first + batch, samples), dtype=np.int64))


def evaluation_bounds(samples: int, batch: int, world: int, start: int = 0) -> tuple[int, ...]:
    """Where the evaluation batches from `start` on begin and end. A remainder with less than one sample per process
    joins the batch before it, so that every process has a slice of every batch."""
    firsts = list(range(start, samples, batch))
    if len(firsts) > 1 and samples - firsts[-1] < world:
        firsts.pop()
    return (*firsts, samples)
