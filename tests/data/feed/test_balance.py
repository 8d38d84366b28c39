"""Class-balanced sampling: exact counts in every epoch, samples that take turns, the same on any number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drumline
from drumline.core.errors import UserError
from drumline.data.feed.balance import Balance, ClassShares
from drumline.data.feed.batch import make_batch
from drumline.data.feed.draws import Purpose, uniform
from drumline.data.feed.resident import ResidentSet, resident_feed
from drumline.data.feed.sampler import Request, epoch_order, rank_slice, training_requests
from drumline.data.feed.transform import Transform
from drumline.data.image.augment import Augmentation
from drumline.data.sources import ArrayDataset

SIZES = (40, 9, 3, 0, 1)
BATCH = 12


def labelled(sizes: tuple[int, ...] = SIZES) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Labels in an order that mixes the classes."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return labels[np.random.default_rng(0).permutation(len(labels))]


def dataset(sizes: tuple[int, ...] = SIZES) -> ArrayDataset:
    labels = labelled(sizes)
    images = np.random.default_rng(1).integers(0, 256, (len(labels), 8, 8, 3), np.uint8)
    return ArrayDataset("npz", images, labels, tuple("abcdefgh"[: len(sizes)]))


def shares(sizes: tuple[int, ...], balance: Balance, draws: int) -> list[float]:
    weights = [size**0.5 if balance == "sqrt" else float(size > 0) for size in sizes]
    return [draws * weight / sum(weights) for weight in weights]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [item for each in lists for item in each]


balances = st.sampled_from(["balanced", "sqrt"])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any).map(tuple),
    balance=balances,
    draws=st.integers(1, 150),
    epoch=st.integers(0, 600),
)
def test_each_epoch_draws_every_class_as_often_as_its_share_says_rounded_up_or_down(
    sizes: tuple[int, ...], balance: Balance, draws: int, epoch: int
) -> None:
    labels = labelled(sizes)
    of = ClassShares.of(labels, balance, draws, seed=3)
    samples, repeats = of.order(epoch)
    counts = np.bincount(labels[samples], minlength=labels.max() + 1)
    assert counts.tolist() == of.counts(epoch).tolist()
    assert counts.sum() == draws
    for count, share in zip(counts, shares(sizes, balance, draws), strict=False):
        assert math.floor(share - 1e-4) <= count <= math.ceil(share + 1e-4)
    for label in range(len(counts)):
        members = np.flatnonzero(labels == label)
        drawn = Counter(samples[labels[samples] == label].tolist())
        times = [drawn[member] for member in members.tolist()]
        assert max(times, default=0) - min(times, default=0) <= 1
    for sample in np.unique(samples):
        assert sorted(repeats[samples == sample]) == list(range((samples == sample).sum()))


@settings(max_examples=20, deadline=None)
@given(balance=balances, draws=st.integers(5, 80), epochs=st.integers(1, 40))
def test_over_epochs_samples_of_a_class_take_turns_and_no_class_is_left_out(
    balance: Balance, draws: int, epochs: int
) -> None:
    labels = labelled()
    of = ClassShares.of(labels, balance, draws, seed=1)
    times = np.zeros(len(labels), np.int64)
    for epoch in range(epochs):
        times += np.bincount(of.order(epoch)[0], minlength=len(labels))
    for label in np.unique(labels):
        assert np.ptp(times[labels == label]) <= 1
    drawn = np.bincount(labels, weights=times)
    for count, share in zip(drawn, shares(SIZES, balance, draws), strict=True):
        assert abs(count - epochs * share) < 3


def test_a_class_whose_share_is_less_than_one_draw_comes_in_some_epochs() -> None:
    labels = labelled((1,) * 30)
    of = ClassShares.of(labels, "balanced", draws=12, seed=0)
    drawn = [set(of.order(epoch)[0].tolist()) for epoch in range(6)]
    assert {len(each) for each in drawn} == {12}
    assert set().union(*drawn) == set(range(30))


def test_the_order_is_the_same_on_every_machine_and_differs_by_seed_and_epoch() -> None:
    of = ClassShares.of(labelled((5, 2)), "balanced", 8, seed=7)
    assert [part.tolist() for part in of.order(2)] == GOLDEN
    orders = {
        tuple(ClassShares.of(labelled(), "sqrt", 48, seed).order(epoch)[0])
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def requests(
    balance: Balance, world: int, rank: int, first: int, last: int, seed: int = 5
) -> Iterator[Request]:
    labels = labelled()
    whole = len(labels) // BATCH * BATCH
    return training_requests(
        seed=seed,
        samples=len(labels),
        batch=BATCH,
        first_step=first,
        last_step=last,
        local=rank_slice(BATCH, rank, world),
        shares=ClassShares.of(labels, balance, whole, seed),
    )


@pytest.mark.parametrize("balance", ["balanced", "sqrt"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_divide_the_same_batches_and_a_resumed_run_continues_them(balance: Balance, world: int) -> None:
    whole = [request.keys.tolist() for request in requests(balance, 1, 0, 0, 13)]
    divided = [list(requests(balance, world, rank, 0, 13)) for rank in range(world)]
    joined = [flat(part.keys.tolist() for part in parts) for parts in zip(*divided, strict=True)]
    assert joined == whole
    for first in range(13):
        assert [request.keys.tolist() for request in requests(balance, 1, 0, first, 13)] == whole[first:]
    labels = labelled()
    for epoch in range(3):
        ids = np.array(flat(whole[4 * epoch : 4 * epoch + 4])) & 0xFFFFFFFF
        counts = np.bincount(labels[ids], minlength=5)
        for count, share in zip(counts, shares(SIZES, balance, 48), strict=True):
            assert abs(count - share) < 1


def test_without_balance_requests_and_draws_are_those_of_a_plain_epoch() -> None:
    (request,) = training_requests(
        seed=5, samples=20, batch=8, first_step=3, last_step=4, local=slice(2, 6), shares=None
    )
    assert request.keys is request.samples
    assert request.samples.tolist() == epoch_order(5, 1, 20)[8:16][2:6].tolist()


def repeated(seed: int = 5) -> Request:
    """A request in which samples repeat."""
    request = next(requests("balanced", 1, 0, 0, 1, seed))
    assert len(set(request.samples.tolist())) < len(request.samples)
    return request


@pytest.mark.parametrize("augment", ["shift-flip", "crop-flip"])
def test_repeats_of_a_sample_look_different_and_its_first_draw_as_in_a_plain_epoch(augment: Any) -> None:
    source, request = dataset(), repeated()
    transform = Transform(8, augment, augmentation=Augmentation(jitter=(0.4, 0.4, 0.4, 0.1)))
    made = make_batch(source, transform, 5, request)
    plain = make_batch(source, transform, 5, Request(request.epoch, request.samples))
    assert made.batch.samples.tolist() == request.samples.tolist()
    assert made.batch.labels.tolist() == source.labels[request.samples].tolist()
    assert request.repeats is not None
    same = (made.batch.images == plain.batch.images).flatten(1).all(1).numpy()
    assert same[request.repeats == 0].all()
    assert not same[request.repeats > 0].all()
    pixels = {
        made.batch.images[row].numpy().tobytes() for row in np.flatnonzero(request.samples == most(request))
    }
    assert len(pixels) > 1


def most(request: Request) -> int:
    return Counter(request.samples.tolist()).most_common(1)[0][0]


def test_mixing_draws_differ_for_repeats() -> None:
    source, request = dataset(), repeated()
    mix = make_batch(source, Transform(8, "none", mixup=0.4), 5, request).batch.mix[:, 0]
    rows = np.flatnonzero(request.samples == most(request))
    assert len(set(mix[rows].tolist())) == len(rows)


def test_a_resident_set_makes_the_same_batches() -> None:
    import torch

    source, transform = dataset(), Transform(8, "shift-flip", mixup=0.2)
    asked = list(requests("balanced", 1, 0, 0, 9))
    resident = ResidentSet.upload(source, transform, torch.device("cpu"))
    for request, batch in zip(asked, resident_feed(resident, 5, asked), strict=True):
        expected = make_batch(source, transform, 5, request).batch
        assert all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True))


def test_a_key_of_a_repeat_never_equals_one_of_a_sample() -> None:
    keys = np.array([3, 3 | 1 << 32, 4, 3 | 2 << 32])
    assert len(np.unique(uniform(0, 0, keys, Purpose.CROP, 1))) == 4


def test_a_feed_draws_exact_counts_in_slices_and_continues_at_a_batch(tmp_path: Path) -> None:
    source = dataset((20, 5, 2))
    np.savez(tmp_path / "a.npz", images=source.images, labels=source.labels)

    def drawn(**options: Any) -> list[tuple[list[int], bytes]]:
        with drumline.open_feed(
            tmp_path / "a.npz", batch=6, workers=0, seed=3, balance="balanced", **options
        ) as feed:
            return [(ids.tolist(), images.numpy().tobytes()) for images, _, ids in feed]

    whole = drawn()
    assert np.bincount(source.labels[flat(ids for ids, _ in whole)]).tolist() == [8, 8, 8]
    parts = [drawn(rank=rank, world=2) for rank in range(2)]
    assert [one[0] + other[0] for one, other in zip(*parts, strict=True)] == [ids for ids, _ in whole]
    assert drawn(start=12) == whole[2:]
    with pytest.raises(UserError, match="not a whole number of batches of 6"):
        drawn(start=7)


GOLDEN = [[6, 4, 4, 1, 3, 2, 3, 5], [0, 0, 1, 0, 0, 0, 1, 0]]
