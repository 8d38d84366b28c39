"""Order and shares: disjoint, exhaustive, the same whatever the world."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.data.feed.sampler import (
    bounds,
    epoch_order,
    evaluation_requests,
    rank_slice,
    steps_per_epoch,
    training_requests,
)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 1000), samples=st.integers(1, 2000))
def test_an_epochs_order_is_a_permutation(seed: int, epoch: int, samples: int) -> None:
    assert np.array_equal(np.sort(epoch_order(seed, epoch, samples)), np.arange(samples))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert epoch_order(7, 3, 10).tolist() == GOLDEN_ORDER


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_first_position_is_uniform_over_epochs() -> None:
    firsts = np.bincount([epoch_order(0, epoch, 10)[0] for epoch in range(3000)], minlength=10)
    assert firsts.min() > 230
    assert firsts.max() < 370


@given(total=st.integers(1, 500), parts=st.integers(1, 40), unit=st.integers(1, 2))
def test_bounds_cover_everything_in_nearly_equal_parts(total: int, parts: int, unit: int) -> None:
    cuts = bounds(total, parts, unit)
    assert len(cuts) == parts + 1
    assert cuts[0] == 0
    assert cuts[-1] == total
    assert list(cuts) == sorted(cuts)
    lengths = np.diff(cuts)
    assert lengths.max() - lengths.min() <= 2 * unit - 1
    assert all(cut % unit == 0 for cut in cuts[:-1])


@given(batch=st.integers(1, 300), world=st.integers(1, 16))
def test_slices_of_a_divisible_batch_are_equal_and_disjoint(batch: int, world: int) -> None:
    batch *= world
    slots = np.arange(batch)
    parts = [slots[rank_slice(batch, rank, world)] for rank in range(world)]
    assert {len(part) for part in parts} == {batch // world}
    assert np.array_equal(np.concatenate(parts), slots)


@settings(max_examples=40)
@given(
    samples=st.integers(10, 200),
    batch=st.integers(4, 40),
    world=st.integers(1, 4),
    epochs=st.integers(1, 3),
)
def test_the_ranks_of_any_world_size_make_up_the_global_batches(
    samples: int, batch: int, world: int, epochs: int
) -> None:
    batch = min(batch, samples)
    total = steps_per_epoch(samples, batch) * epochs

    def rank_requests(rank: int, world: int) -> list[np.ndarray]:
        part = rank_slice(batch, rank, world)
        return [
            request.samples
            for request in training_requests(
                seed=1, samples=samples, batch=batch, first_step=0, last_step=total, local=part
            )
        ]

    alone = rank_requests(0, 1)
    together = zip(*(rank_requests(rank, world) for rank in range(world)), strict=True)
    for one, many in zip(alone, together, strict=True):
        assert np.array_equal(one, np.concatenate(many))
    per_epoch = steps_per_epoch(samples, batch)
    for epoch in range(epochs):
        seen = np.concatenate(alone[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert len(set(seen.tolist())) == len(seen) == per_epoch * batch


def test_the_incomplete_last_batch_is_dropped_and_other_samples_are_left_out_next_epoch() -> None:
    requests = list(
        training_requests(seed=0, samples=103, batch=10, first_step=0, last_step=20, local=slice(0, 10))
    )
    left_out = [
        set(range(103)) - set(np.concatenate([r.samples for r in requests if r.epoch == epoch]).tolist())
        for epoch in (0, 1)
    ]
    assert [len(left) for left in left_out] == [3, 3]
    assert left_out[0] != left_out[1]


@given(first=st.integers(0, 29))
def test_resuming_at_any_step_gives_the_remaining_requests(first: int) -> None:
    def requests(first_step: int) -> list[tuple[int, list[int]]]:
        made = training_requests(
            seed=5, samples=47, batch=5, first_step=first_step, last_step=30, local=slice(1, 4)
        )
        return [(request.epoch, request.samples.tolist()) for request in made]

    assert requests(first) == requests(0)[first:]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("samples", [1, 7, 359, 1000])
def test_evaluation_has_every_sample_once_in_the_same_batches_for_any_world_size(
    samples: int, world: int
) -> None:
    dealt = [
        tuple(request.samples.tolist())
        for rank in range(world)
        for request in evaluation_requests(samples=samples, batch=16, rank=rank, world=world)
    ]
    alone = [
        tuple(r.samples.tolist()) for r in evaluation_requests(samples=samples, batch=16, rank=0, world=1)
    ]
    assert sorted(dealt) == sorted(alone)
    assert sorted(i for batch in dealt for i in batch) == list(range(samples))


GOLDEN_ORDER = [9, 4, 1, 2, 0, 3, 6, 5, 7, 8]
