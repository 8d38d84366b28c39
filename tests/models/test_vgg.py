"""VGG: small images are rejected."""

from __future__ import annotations

import pytest
import torch

from drumline.core.errors import UserError
from drumline.models.registry import create_model
from tests.models.quick import on_meta


@pytest.mark.parametrize(("name", "side"), [("vgg11", 32), ("vgg16_bn", 32), ("cifar/vgg8", 8)])
def test_images_too_small_to_pool_are_rejected(name: str, side: int) -> None:
    model = on_meta(name)
    assert model(torch.empty(2, 3, side, side, device="meta")).shape == (2, 10)
    with pytest.raises(UserError, match=f"images of 40x{side - 1} are too small") as caught:
        model(torch.empty(2, 3, side - 1, 40, device="meta"))
    assert f"at least {side}" in caught.value.fix


@pytest.mark.parametrize(("side", "last"), [(32, 4), (63, 7), (64, 4)])
def test_a_small_vgg_uses_its_last_max_pool_from_64_pixels_on(side: int, last: int) -> None:
    _, taps = on_meta("cifar/vgg13")(torch.empty(2, 3, side, side, device="meta"), taps=True)
    assert taps["stage4"].shape[-1] == last


def test_linear_layers_start_with_small_weights() -> None:
    torch.manual_seed(0)
    head = create_model("cifar/vgg8", 100).get_submodule("classifier")
    assert head.get_parameter("weight").std().item() == pytest.approx(0.01, rel=0.02)
    assert (head.get_parameter("bias") == 0).all()
