"""Draws depend on (seed, epoch, sample, purpose) alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.data.feed.draws import Purpose, _philox, bits, symmetric_beta, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    words = [np.array([int(word, 16)], np.uint64) for word in counter.split()]
    first, second = (np.uint64(int(word, 16)) for word in key.split())
    assert [int(word) for word in _philox(words, (first, second))[0]] == [
        int(w, 16) for w in expected.split()
    ]


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**32 - 1),
    samples=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20),
)
def test_the_numbers_of_a_sample_do_not_depend_on_its_batch(
    seed: int, epoch: int, samples: list[int]
) -> None:
    together = uniform(seed, epoch, np.array(samples), Purpose.CROP, 7)
    for row, sample in zip(together, samples, strict=True):
        assert np.array_equal(row, uniform(seed, epoch, np.array([sample]), Purpose.CROP, 7)[0])


def test_purpose_epoch_seed_and_block_each_change_the_draw() -> None:
    one = np.array([5])
    draws = {
        tuple(bits(*key)[0].tolist())
        for key in [
            (0, 0, one, 1, 0),
            (1, 0, one, 1, 0),
            (2**32, 0, one, 1, 0),
            (0, 1, one, 1, 0),
            (0, 0, one, 2, 0),
            (0, 0, one, 1, 1),
            (0, 0, one + 2**32, 1, 0),
        ]
    }
    assert len(draws) == 7


def test_uniform_numbers_are_uniform() -> None:
    draws = uniform(3, 1, np.arange(50_000), Purpose.FLIP, 4)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert np.abs(counts / counts.mean() - 1).max() < 0.05
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 0.02


@pytest.mark.parametrize("alpha", [0.2, 1.0, 2.0, 8.0])
def test_symmetric_beta_has_its_mean_and_variance(alpha: float) -> None:
    share = symmetric_beta(0, 0, np.arange(40_000), Purpose.MIX_FRACTION, alpha)
    assert abs(share.mean() - 0.5) < 0.01
    assert share.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)
    assert share.min() >= 0
    assert share.max() <= 1


def test_the_beta_number_of_a_sample_depends_on_no_other_sample() -> None:
    whole = symmetric_beta(0, 2, np.arange(100), Purpose.MIX_FRACTION, 0.3)
    assert np.array_equal(whole[40:50], symmetric_beta(0, 2, np.arange(40, 50), Purpose.MIX_FRACTION, 0.3))
