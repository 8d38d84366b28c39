"""Short numbers that change with anything that changes."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.state.fingerprint import fingerprint, fingerprints, first_difference, state_sha256

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


@settings(max_examples=200, deadline=None)
@given(words=several, dtype=types, where=st.integers(0, 10**6))
def test_any_flipped_bit_changes_it(words: list[int], dtype: torch.dtype, where: int) -> None:
    tensor = values(words, dtype)
    bits = tensor.view(torch.uint8).clone()
    bits[where % len(bits)] ^= 1 << (where % 8)
    assert number(bits.view(dtype)) != number(tensor)


@settings(max_examples=200, deadline=None)
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


def test_every_place_has_a_weight_of_its_own() -> None:
    """A single one moved through zeros gives as many numbers as there are places."""
    tensor, seen = torch.zeros(2000, dtype=torch.uint8), set()
    for place in range(2000):
        tensor[place] = 1
        seen.add(number(tensor))
        tensor[place] = 0
    assert len(seen) == 2000


def test_a_set_of_tensors_is_in_the_order_of_names() -> None:
    a, b = torch.rand(3), torch.rand(4)
    assert fingerprints({"b": b, "a": a}).tolist() == [number(a), number(b)]


def test_the_majority_tells_which_rank_is_wrong_and_on_which_tensor() -> None:
    agreed = torch.tensor([[5, 6, 7]] * 4)
    assert first_difference(["a", "b", "c"], agreed) is None
    odd = agreed.clone()
    odd[2, 1], odd[0, 2] = 9, 9
    assert first_difference(["c", "b", "a"], odd) == ("b", [2])


@pytest.mark.parametrize("column", [[1, 2], [2, 1], [1, 1, 2, 2], [1, 2, 3]])
def test_without_a_majority_nobody_is_accused_alone(column: list[int]) -> None:
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
