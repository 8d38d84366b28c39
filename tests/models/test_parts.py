"""The parts of a model: what a name freezes, and which rate each layer gets."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from drumline.core.errors import UserError
from drumline.models import create_model
from drumline.models.parts import find_frozen, freeze, freeze_layer, head_name, rate_factors
from drumline.parallel.norm import WorldNorm
from tests.training.frozen_ranks import Net


def tops(names: tuple[str, ...]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_a_name_means_a_module_not_the_beginning_of_a_name() -> None:
    frozen = find_frozen(Net(3), ["layer1"])
    assert tops(frozen.parameters) == {"layer1"}
    assert frozen.layers == ("layer1.1",)
    assert find_frozen(Net(3), ["layer1.0"]).parameters == ("layer1.0.weight", "layer1.0.bias")


def test_the_stem_and_the_backbone_of_a_resnet() -> None:
    model = create_model("resnet18", classes=7)
    stem, backbone = find_frozen(model, ["stem"]), find_frozen(model, ["backbone"])
    assert stem.parameters == ("conv1.weight", "bn1.weight", "bn1.bias")
    assert stem.layers == ("bn1",)
    every = [name for name, _ in model.named_parameters()]
    assert [name for name in every if name not in backbone.parameters] == ["fc.weight", "fc.bias"]
    assert len(backbone.layers) == 20
    assert find_frozen(model, ["stem", "layer1", "layer2", "layer3", "layer4"]) == backbone


@pytest.mark.parametrize("name", ["mobilenet_v2", "vgg11_bn", "cifar/wrn_16_1", "cifar/shufflenet_v2"])
def test_the_backbone_is_all_but_the_classifier(name: str) -> None:
    model = create_model(name, classes=7)
    freeze(model, ["backbone"])
    left = [name for name, each in model.named_parameters() if each.requires_grad]
    assert left == [f"{head_name(model)}.weight", f"{head_name(model)}.bias"]
    model.train()
    assert not any(layer.training for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))


class Tokens(nn.Module):
    """Parameters outside any child, and blocks in a list, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)


def test_parameters_outside_any_child_belong_to_stem_and_backbone() -> None:
    assert "token" in find_frozen(Tokens(), ["backbone"]).parameters
    assert find_frozen(Tokens(), ["stem"]).parameters == ("token", "embed.weight", "embed.bias")


def test_an_unknown_module_is_an_error_with_the_nearest_names() -> None:
    model = create_model("resnet18")
    with pytest.raises(UserError, match="ResNet has no module 'layr1'") as caught:
        find_frozen(model, ["layr1"])
    assert "did you mean layer1" in caught.value.fix
    with pytest.raises(UserError, match="no module ''"):
        find_frozen(model, [""])
    with pytest.raises(UserError, match="no module 'blocks'") as caught:
        find_frozen(model, ["blocks"])
    assert "its modules are conv1, bn1, layer1, layer2, layer3, layer4, fc" in caught.value.fix


def test_a_frozen_layer_stays_in_evaluation_mode_in_copies_and_as_a_synchronised_norm() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout())
    freeze_layer(model[0])
    copied = copy.deepcopy(model)
    converted = WorldNorm.of(model[0], torch.Tensor.clone)
    for each in (model, copied, converted):
        each.train()
    assert not model[0].training
    assert model[1].training
    assert not copied[0].training
    assert not converted.training
    freeze_layer(copied[0])
    assert copied[0].train.args[0] is copied[0]  # type: ignore[union-attr]


def test_what_is_inside_a_frozen_layer_still_changes_its_mode() -> None:
    """Dropout inside a layer with statistics of its own: on in training, off in evaluation."""
    layer = nn.Sequential(nn.Dropout())
    layer.register_buffer("mean", torch.zeros(2))
    freeze(model := nn.Sequential(layer, nn.Linear(2, 2)), ["0"])
    model.train()
    assert (layer.training, layer[0].training) == (False, True)
    model.eval()
    assert not layer[0].training


def test_layer_decay_counts_blocks_from_the_classifier() -> None:
    factors = rate_factors(create_model("resnet18"), head=10, decay=0.5)
    assert factors["fc.weight"] == 10
    assert factors["layer4.1.conv1.weight"] == 0.5
    assert factors["layer4.0.downsample.0.weight"] == 0.25
    assert factors["layer1.0.bn1.weight"] == 0.5**8
    assert factors["conv1.weight"] == factors["bn1.bias"] == 0.5**9


def test_layer_decay_of_a_transformer_gives_the_last_norm_the_full_rate() -> None:
    factors = rate_factors(Tokens(), head=1, decay=0.5)
    assert factors["token"] == factors["embed.bias"] == 0.5**4
    assert [factors[f"layers.{block}.0.weight"] for block in range(3)] == [0.125, 0.25, 0.5]
    assert factors["norm.weight"] == factors["head.weight"] == 1


def test_without_factors_all_rates_are_equal() -> None:
    assert set(rate_factors(create_model("resnet8"), 1.0, 1.0).values()) == {1.0}


def test_a_model_without_blocks_or_classifier_is_an_error() -> None:
    flat = nn.Sequential(nn.Conv2d(3, 2, 1))
    with pytest.raises(UserError, match=r"optim.head_lr = 10: Sequential has no linear layer"):
        rate_factors(flat, 10, 1.0)
    with pytest.raises(UserError, match="Sequential has no repeated blocks"):
        rate_factors(flat, 1.0, 0.5)
    with pytest.raises(UserError, match=r"train\.freeze = backbone"):
        find_frozen(flat, ["backbone"])
