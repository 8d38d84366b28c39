"""VGG: pooling to 7x7 by kernels that repeat, and small images refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drumline.errors import UserError
from drumline.models.registry import create_model
from drumline.models.vgg import _means, pool_to_grid
from tests.models.quick import on_meta


def feature_map(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_a_map_of_7x7_is_its_own_pool() -> None:
    x = feature_map(7, 7)
    assert pool_to_grid(x) is x


@pytest.mark.parametrize("shape", [(14, 14), (7, 28), (2, 2), (1, 1), (10, 10), (9, 16)])
def test_pooling_is_torchs_adaptive_pooling_bit_by_bit(shape: tuple[int, int]) -> None:
    x = feature_map(*shape)
    assert torch.equal(pool_to_grid(x), F.adaptive_avg_pool2d(x, 7))


def test_a_map_of_21x21_differs_by_rounding_only() -> None:
    x = feature_map(21, 21)
    torch.testing.assert_close(pool_to_grid(x), F.adaptive_avg_pool2d(x, 7), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("length", range(1, 22))
def test_means_by_slices_are_the_adaptive_means(length: int) -> None:
    x = feature_map(length, 23 - length)
    torch.testing.assert_close(_means(_means(x, 2), 3), F.adaptive_avg_pool2d(x, 7), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "side"), [("vgg11", 32), ("vgg16_bn", 32), ("cifar/vgg8", 8)])
def test_images_too_small_to_pool_are_refused(name: str, side: int) -> None:
    model = on_meta(name)
    assert model(torch.empty(2, 3, side, side, device="meta")).shape == (2, 10)
    with pytest.raises(UserError, match=f"images of 40x{side - 1} are too small") as caught:
        model(torch.empty(2, 3, side - 1, 40, device="meta"))
    assert f"at least {side}" in caught.value.fix


@pytest.mark.parametrize(("side", "last"), [(32, 4), (63, 7), (64, 4)])
def test_the_last_max_pool_of_a_small_vgg_is_for_images_of_64_and_more(side: int, last: int) -> None:
    _, taps = on_meta("cifar/vgg13")(torch.empty(2, 3, side, side, device="meta"), taps=True)
    assert taps["stage4"].shape[-1] == last


def test_linear_layers_start_small() -> None:
    torch.manual_seed(0)
    head = create_model("cifar/vgg8", 100).get_submodule("classifier")
    assert head.get_parameter("weight").std().item() == pytest.approx(0.01, rel=0.02)
    assert (head.get_parameter("bias") == 0).all()
