"""Counts the passes over a DistributedSampler, to see that `set_epoch` is called.

Promises: the order of samples is untouched; a look at one batch, and an extra pass to measure training accuracy, are
not taken for a forgotten call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from drumline.guard.finding import Finding

_PASSES = 2


class Passes:
    """Stands between a loader's batch sampler and its DistributedSampler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.passes = 0
        self.trained: dict[int, int] = {}
        """The sampler's epoch in each pass that was trained on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self._sampler)

    def look(self, step: int) -> Finding | None:
        """At each step: two passes trained on, and the epoch never changed."""
        self.trained[self.passes] = int(self._sampler.epoch)
        if len(self.trained) < _PASSES or len(set(self.trained.values())) > 1:
            return None
        return Finding(
            "set-epoch",
            "every epoch sees its samples in the same order: the sampler's epoch was "
            f"{self._sampler.epoch} in all of {len(self.trained)} passes",
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
