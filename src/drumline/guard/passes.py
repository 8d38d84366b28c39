"""Counts the passes over a DistributedSampler, to see that `set_epoch` is called.

Promises: the order of samples is untouched; a look at one batch, and an extra pass to measure training accuracy, are
not taken for a forgotten call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from drumline.guard.finding import Finding

_PASSES = 3


class Passes:
    """Stands between a loader's batch sampler and its DistributedSampler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.epochs: list[int] = []
        self.whole = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self.epochs.append(int(self._sampler.epoch))
        yield from self._sampler
        self.whole += 1

    def look(self, step: int) -> Finding | None:
        """Three passes begun, two of them whole, and the epoch never changed."""
        if len(self.epochs) < _PASSES or self.whole < _PASSES - 1 or len(set(self.epochs)) > 1:
            return None
        return Finding(
            "set-epoch",
            f"every epoch sees its samples in the same order: the sampler's epoch was {self.epochs[0]} in all of "
            f"{len(self.epochs)} passes",
            where="DistributedSampler of the loader",
            since=f"the second pass (noticed at step {step})",
            fix="call loader.sampler.set_epoch(epoch) before each epoch",
        )


def passes_over(loader: Any) -> Passes | None:
    """Begins to count, where the loader shuffles by a DistributedSampler."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if (
        not isinstance(loader, DataLoader)
        or not isinstance(sampler, DistributedSampler)
        or not sampler.shuffle
    ):
        return None
    passes = Passes(sampler)
    assert batches is not None
    batches.sampler = passes
    return passes


def end_passes(loader: Any, passes: Passes) -> None:
    """Puts the sampler back."""
    loader.batch_sampler.sampler = passes._sampler
