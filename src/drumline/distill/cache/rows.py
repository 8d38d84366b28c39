"""A cache's rows for training: those of each batch's samples, read ahead by a thread.

Promises: rows come in the order of the requests, bit for bit as they were stored, and none before the whole of its
epoch has been verified, its list of checksums included. Refuses an epoch that is not filled, or damaged, when its
first row is needed and not before.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.core.errors import UserError
from drumline.data.feed.loader import Batches
from drumline.data.feed.prefetch import prefetch
from drumline.data.feed.sampler import Ids, Request
from drumline.distill.cache.format import Cache

READY = 2
"""Batches of rows that wait for the step."""


def with_rows(batches: Batches, requests: Iterable[Request], cache: Cache, device: torch.device) -> Batches:
    """The batches, each with its samples' rows on the device as `extra`. `requests` are those that the batches are
    made from, as an iterable of their own. Closing it closes `batches`."""
    source = CachedRows(cache, pin=device.type == "cuda")
    with closing(batches), closing(source.for_requests(requests)) as stored:
        for batch, rows in zip(batches, stored, strict=True):
            assert len(rows) == len(batch.labels), (len(rows), len(batch.labels))
            yield batch._replace(extra=rows.to(device, non_blocking=True))


@dataclass(frozen=True)
class CachedRows:
    """The rows of batches, for training."""

    cache: Cache
    pin: bool = False
    """Into page-locked memory, to be copied to a GPU without waiting."""

    def for_requests(self, requests: Iterable[Request]) -> Generator[Tensor, None, None]:
        """(n, row_bytes) uint8 of each request, in order, made ahead by a thread. An epoch is verified before its
        first row is given out: block by block, one between two requests of the epoch before. Close it to end it."""
        return prefetch(self._rows(requests), READY)

    def _rows(self, requests: Iterable[Request]) -> Generator[Tensor, None, None]:
        opened: dict[int, _Epoch] = {}
        for request in requests:
            now, later = request.epoch, request.epoch + 1
            opened = {epoch: opened.get(epoch) or _Epoch(self.cache, epoch) for epoch in (now, later)}
            yield opened[now].rows(request.samples, self.pin)
            opened[later].verify_early()


class _Epoch:
    """An epoch's blocks, mapped one after the other, each verified before."""

    def __init__(self, cache: Cache, epoch: int) -> None:
        self._cache, self._epoch = cache, epoch
        self._to_come = cache.verified(epoch)
        self._blocks: list[NDArray[np.uint8]] = []
        self._put_off = False

    def verify_early(self) -> None:
        """One block more. What is wrong is told when the epoch is needed; it may not be."""
        if self._put_off or len(self._blocks) == self._cache.blocks:
            return
        try:
            self._blocks.append(next(self._to_come))
        except UserError:
            self._put_off, self._blocks = True, []
            self._to_come = self._cache.verified(self._epoch)

    def rows(self, samples: Ids, pin: bool) -> Tensor:
        """The rows of these samples, in their order."""
        if len(self._blocks) < self._cache.blocks:
            self._blocks.extend(self._to_come)
        rows = torch.empty((len(samples), self._cache.key.rule.row_bytes), dtype=torch.uint8, pin_memory=pin)
        into, of_block = rows.numpy(), self._cache.block_of(samples)
        order = np.argsort(of_block, kind="stable")
        cuts = np.searchsorted(of_block[order], np.arange(len(self._blocks) + 1))
        for block, (first, last) in enumerate(pairwise(cuts.tolist())):
            if first < last:
                where = order[first:last]
                into[where] = self._blocks[block][samples[where] - self._cache.samples(block).start]
        return rows
