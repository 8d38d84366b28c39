"""Residual networks: torchvision's layout and initial weights, and shortcuts where the shape changes."""

from __future__ import annotations

import pytest
import torch

from drumline.models.registry import create_model
from tests.models.quick import on_meta

# First values of the first and the last weight, seed 0 and 10 classes: what torchvision's constructor draws.
TORCHVISION_DRAWS = {
    "resnet18": (("conv1", (0.002197, 0.035336, 0.016136)), ("fc", (-0.020315, 0.018678, 0.037556))),
    "resnet50": (("conv1", (0.005053, 0.074458, -0.008378)), ("fc", (-0.007749, -0.008624, -0.015628))),
    "mobilenet_v2": (
        ("features.0.0", (0.034676, -0.090056, -0.154943)),
        ("classifier.1", (0.005779, -0.002328, -0.016424)),
    ),
}


@pytest.mark.parametrize("name", TORCHVISION_DRAWS)
def test_a_seed_gives_torchvisions_initial_weights(name: str) -> None:
    torch.manual_seed(0)
    model = create_model(name, 10)
    for layer, values in TORCHVISION_DRAWS[name]:
        weight = model.get_submodule(layer).get_parameter("weight")
        torch.testing.assert_close(weight.detach().flatten()[:3], torch.tensor(values), atol=1e-6, rtol=0)


def test_keys_are_in_torchvisions_order() -> None:
    keys = list(on_meta("resnet50").state_dict())
    block = [key.removeprefix("layer1.0.") for key in keys if key.startswith("layer1.0.")]
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    pairs = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("downsample.0", "downsample.1"))
    assert block == [
        f"{n}.{k}" for conv, bn in pairs for n, ks in ((conv, ("weight",)), (bn, norm)) for k in ks
    ]
    assert keys[:6] == ["conv1.weight", *(f"bn1.{key}" for key in norm)]
    assert keys[-2:] == ["fc.weight", "fc.bias"]


def test_convolutions_start_with_hes_scale_and_norms_as_identity() -> None:
    torch.manual_seed(0)
    state = create_model("cifar/resnet20", 10).state_dict()
    weight = state["layer3.2.conv2.weight"]
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert (state["layer3.2.bn2.weight"] == 1).all()
    assert (state["layer3.2.bn2.bias"] == 0).all()


def test_a_shortcut_convolves_only_where_the_shape_changes() -> None:
    thin, wide = (on_meta(name).state_dict() for name in ("cifar/resnet8", "cifar/resnet8x4"))
    assert "layer1.0.downsample.0.weight" not in thin
    assert thin["layer2.0.downsample.0.weight"].shape == (32, 16, 1, 1)
    assert wide["layer1.0.downsample.0.weight"].shape == (64, 32, 1, 1)
