"""Short numbers that change with anything that changes."""

from __future__ import annotations

import hashlib
import itertools
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.state.fingerprint import (
    CHUNK,
    Rows,
    fingerprint,
    fingerprints_of,
    first_difference,
    position_weights,
    state_sha256,
)

FLOATS, INTEGERS = -7589238811779899318, -3079938811114321419

WIDTHS = {
    torch.float32: np.uint32,
    torch.float64: np.uint64,
    torch.bfloat16: np.uint16,
    torch.float16: np.uint16,
    torch.int64: np.uint64,
    torch.uint8: np.uint8,
}


def values(words: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of these bits."""
    kept = np.array([word & int(np.iinfo(WIDTHS[dtype]).max) for word in words], WIDTHS[dtype])
    return torch.from_numpy(kept.view(np.uint8).copy()).view(dtype)


def number(tensor: torch.Tensor) -> int:
    return int(fingerprint(tensor))


several = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40)
types = st.sampled_from(list(WIDTHS))


@settings(max_examples=200)
@given(words=several, dtype=types, where=st.integers(0, 10**6))
def test_any_flipped_bit_changes_it(words: list[int], dtype: torch.dtype, where: int) -> None:
    tensor = values(words, dtype)
    bits = tensor.view(torch.uint8).clone()
    bits[where % len(bits)] ^= 1 << (where % 8)
    assert number(bits.view(dtype)) != number(tensor)


@settings(max_examples=200)
@given(words=several, dtype=types, i=st.integers(0, 39), j=st.integers(0, 39))
def test_any_swap_of_two_different_values_changes_it(
    words: list[int], dtype: torch.dtype, i: int, j: int
) -> None:
    tensor = values(words, dtype)
    i, j = i % len(tensor), j % len(tensor)
    swapped = tensor.clone()
    swapped[[i, j]] = tensor[[j, i]]
    # By bits: two NaNs of the same bits are the same value here.
    same = torch.equal(swapped.view(torch.uint8), tensor.view(torch.uint8))
    assert (number(swapped) == number(tensor)) == same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_swap_of_a_value_and_its_negative_changes_it(dtype: torch.dtype) -> None:
    """They differ in one bit, the highest."""
    for length in (2, 3, 10, 1000):
        tensor = torch.full((length,), 1.5, dtype=dtype)
        tensor[-1] = -1.5
        other = tensor.clone()
        other[0], other[-1] = -1.5, 1.5
        assert number(other) != number(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_sign_of_any_value_and_of_all_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(-8, 8).to(dtype)
    seen = {number(tensor), number(-tensor)}
    for i in range(16):
        other = tensor.clone()
        other[i] = -other[i]
        seen.add(number(other))
    assert len(seen) == 18


def test_one_ulp_is_a_difference() -> None:
    tensor = torch.rand(1000)
    other = tensor.clone()
    other[500] = torch.nextafter(other[500], torch.tensor(2.0))
    assert number(other) != number(tensor)


def test_trailing_zeros_count() -> None:
    assert len({number(torch.zeros(length)) for length in range(20)}) == 20


def test_it_does_not_depend_on_the_memory_layout() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    assert number(tensor.to(memory_format=torch.channels_last)) == number(tensor)
    assert number(tensor.transpose(0, 1)) == number(tensor.transpose(0, 1).contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_strided_expanded_and_empty_tensors_are_their_contiguous_copies(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 8).to(dtype)
    for view in (tensor[:, ::2], tensor[1:3].T, tensor[:1].expand(5, 8), tensor[:0], tensor[0, 0]):
        assert number(view) == number(view.contiguous())


def test_long_tensors_are_weighed_in_chunks_without_a_seam() -> None:
    """Also a CPU's shortcut for contiguous ones gives what the plain way gives."""
    tensor = torch.arange(2 * CHUNK + 3, dtype=torch.int32)
    seen = {number(tensor)}
    for i, j in ((0, CHUNK), (CHUNK - 1, CHUNK), (CHUNK + 5, 2 * CHUNK + 2)):
        other = tensor.clone()
        other[i], other[j] = tensor[j], tensor[i]
        seen.add(number(other))
    assert len(seen) == 4
    square = torch.randn(700, 700)
    assert number(square.T) == number(square.T.contiguous())


def test_words_weights_and_their_sum_are_as_documented() -> None:
    """By hand, in plain integers."""
    tensor = torch.randn(5)
    weights = [int(weight) for weight in position_weights(5)]
    words = tensor.view(torch.int32).tolist()
    total = sum((word + 1) * weight for word, weight in zip(words, weights, strict=True)) % 2**64
    assert number(tensor) % 2**64 == total


def test_weights_are_odd_and_their_low_33_bits_differ() -> None:
    weights = position_weights(2**20)
    assert (weights & 1).all()
    assert len(np.unique(weights & (2**33 - 1))) == 2**20


def test_weights_hide_no_simple_pattern() -> None:
    """Changes of +1, -2, +1 in a row cancel out where weights grow evenly."""
    weights = position_weights(10_000)
    assert (weights[2:] - 2 * weights[1:-1] + weights[:-2] != 0).all()


def test_the_fingerprint_never_changes_between_versions() -> None:
    """It is written into run folders and compared between releases."""
    assert number(torch.arange(10, dtype=torch.float32)) == FLOATS
    assert number(torch.arange(10)) == INTEGERS


@pytest.mark.parametrize("tensor", [torch.tensor([True, False]), torch.tensor([1 + 2j, 3 - 1j])])
def test_truth_and_complex_values_have_one_too(tensor: torch.Tensor) -> None:
    assert number(tensor) != number(tensor.flip(0))


def test_every_place_has_a_weight_of_its_own() -> None:
    """A single one moved through zeros gives as many numbers as there are places."""
    tensor, seen = torch.zeros(2000, dtype=torch.uint8), set()
    for place in range(2000):
        tensor[place] = 1
        seen.add(number(tensor))
        tensor[place] = 0
    assert len(seen) == 2000


def test_fingerprints_of_several_tensors_are_in_their_order() -> None:
    a, b = torch.rand(3), torch.rand(4)
    assert fingerprints_of([a, b]).tolist() == [number(a), number(b)]


def test_the_majority_shows_which_rank_is_wrong_and_in_which_tensor() -> None:
    agreed = torch.tensor([[5, 6, 7]] * 4)
    assert first_difference(["a", "b", "c"], agreed) is None
    odd = agreed.clone()
    odd[2, 1], odd[0, 2] = 9, 9
    assert first_difference(["c", "b", "a"], odd) == ("b", [2])
    assert first_difference([], torch.empty(3, 0, dtype=torch.int64)) is None


@pytest.mark.parametrize("column", [[1, 2], [2, 1], [1, 1, 2, 2], [1, 2, 3]])
def test_without_a_majority_all_ranks_are_named(column: list[int]) -> None:
    ranks = torch.tensor(column)[:, None]
    assert first_difference(["a"], ranks) == ("a", list(range(len(column))))


BASE = {"model": {"w": torch.tensor([[1.0, 2.0]])}, "optimizer": {"m/w": torch.tensor([0.5])}}


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"v": torch.tensor([[1.0, 2.0]])}, "optimizer": BASE["optimizer"]},
        {"model": {"w": torch.tensor([[1.0], [2.0]])}, "optimizer": BASE["optimizer"]},
        {"model": {"w": torch.tensor([[1.0, 2.0]]).view(torch.int32)}, "optimizer": BASE["optimizer"]},
        {"model": {"w": torch.tensor([[1.0, -2.0]])}, "optimizer": BASE["optimizer"]},
        {"model": BASE["model"], "optimizer": {"m/w": torch.tensor([0.25])}},
        {"model": BASE["model"], "optimizer": {}},
        {"model": {**BASE["model"], "m/w": torch.tensor([0.5])}, "optimizer": {}},
        {"model": {**BASE["model"], "x": torch.empty(0)}, "optimizer": BASE["optimizer"]},
    ],
    ids=["name", "shape", "type", "sign", "optimizer", "missing", "group", "empty"],
)
def test_the_hash_of_a_state_covers_names_types_shapes_and_values(
    other: dict[str, dict[str, torch.Tensor]],
) -> None:
    assert state_sha256(other) != state_sha256(BASE)


def test_the_hash_of_a_state_does_not_depend_on_order_layout_or_the_average() -> None:
    image = torch.randn(2, 3, 4, 5)
    plain = {"model": {"a": image, "b": torch.tensor(3)}, "optimizer": {}}
    turned = {
        "average": {"a": image},
        "model": {"b": torch.tensor(3), "a": image.to(memory_format=torch.channels_last)},
    }
    assert state_sha256(plain) == state_sha256(turned)


def test_the_hash_of_a_state_never_changes_between_versions() -> None:
    """It is printed by `drumline verify` and compared between runs and releases."""
    expected = hashlib.sha256(
        b"model/w torch.float32 (1, 2)\n"
        + struct.pack("<2f", 1.0, 2.0)
        + b"optimizer/m/w torch.float32 (1,)\n"
        + struct.pack("<f", 0.5)
    )
    assert state_sha256(BASE) == expected.hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("length", [7, CHUNK // 2 + 1, CHUNK + 5])
def test_the_fingerprints_of_parts_add_up_to_that_of_the_whole(dtype: torch.dtype, length: int) -> None:
    whole = torch.randn(length, generator=torch.Generator().manual_seed(1)).to(dtype)
    cuts = [0, 3, length // 2, length, length]
    parts = [whole[first:last] for first, last in itertools.pairwise(cuts)]
    numbers = fingerprints_of(parts, [Rows(first, length) for first in cuts[:-1]])
    assert int(numbers.sum()) == int(fingerprint(whole))
