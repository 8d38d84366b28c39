"""Pooling to a grid by kernels that repeat is torch's adaptive pooling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drumline.models.base import _means, pool_to


def feature_map(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_a_map_of_7x7_is_its_own_pool() -> None:
    x = feature_map(7, 7)
    assert pool_to(x, (7, 7)) is x


@pytest.mark.parametrize("shape", [(14, 14), (7, 28), (2, 2), (1, 1), (10, 10), (9, 16)])
def test_pooling_is_torchs_adaptive_pooling_bit_by_bit(shape: tuple[int, int]) -> None:
    x = feature_map(*shape)
    assert torch.equal(pool_to(x, (7, 7)), F.adaptive_avg_pool2d(x, 7))


def test_a_map_of_21x21_differs_by_rounding_only() -> None:
    x = feature_map(21, 21)
    torch.testing.assert_close(pool_to(x, (7, 7)), F.adaptive_avg_pool2d(x, 7), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("length", range(1, 22))
def test_means_by_slices_are_the_adaptive_means(length: int) -> None:
    x = feature_map(length, 23 - length)
    torch.testing.assert_close(
        _means(_means(x, 2, 7), 3, 7), F.adaptive_avg_pool2d(x, 7), atol=1e-6, rtol=1e-5
    )
