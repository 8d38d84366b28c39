"""What a model does in a pass that no exported file can repeat is found, with its line; what is fine is not."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from drumline.inference.export.behaviour import watch_forward
from drumline.models import create_model
from tests.inference.export import nets

IMAGES = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("net", "kind", "code"),
    [
        (nets.TrainMode, "batch-statistics", "x = F.relu(self.bn(self.conv(x)))"),
        (nets.Dropout, "torch-random", "return F.dropout(x)"),
        (nets.PythonRandom, "python-random", "return x * random.random()"),
        (nets.RandomArgument, "python-random", "return self.fc(x * random.random())"),
        (nets.NumpyArgument, "python-random", "return self.inner(x * float(np.random.uniform()))"),
        (nets.NumpyRandom, "python-random", "return x * float(np.random.uniform())"),
        (nets.Branch, "data-value", "if x.mean() > 1e6:"),
        (nets.NumpyBranch, "data-value", "if x.detach().numpy().mean() > 1e6:"),
        (nets.BatchMaximum, "data-value", "return x / float(x.max())"),
    ],
)
def test_a_fault_is_found_with_its_line(net: type[nets.Base], kind: str, code: str) -> None:
    model = net(3).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.get_rng_state(), random.getstate()
    found = watch_forward(model, IMAGES)
    assert (kind, code) in {(each.kind, each.code) for each in found}
    assert all(each.where.startswith("nets.py:") for each in found if each.code)
    assert {each.code for each in found if each.kind == "python-random"} <= {code}, "no other line is blamed"
    assert not model.bn.training, "the mode is as before"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]


@pytest.mark.parametrize("net", [nets.Base, nets.FineBranches, nets.BatchBranch, nets.ViT])
def test_branches_on_shapes_and_dropout_in_eval_mode_are_fine(net: type[nn.Module]) -> None:
    assert watch_forward(net(3).eval(), IMAGES) == []


@pytest.mark.parametrize("name", ["resnet8", "mobilenet_v2", "cifar/shufflenet_v1"])
def test_built_in_models_do_nothing_of_the_kind(name: str) -> None:
    assert watch_forward(create_model(name, classes=3).eval(), torch.randn(2, 3, 64, 64)) == []


def test_a_branch_by_torch_cond_is_fine() -> None:
    model = nets.Cond(3).eval()
    with torch.no_grad():
        wanted = model(IMAGES)
    assert watch_forward(model, IMAGES) == []
    with torch.no_grad():
        assert torch.equal(model(IMAGES), wanted), "it can be compiled as before"
        assert model(IMAGES[:1]).shape == (1, 3)


def test_layers_left_in_train_mode_are_named() -> None:
    model = nets.ViT(3).eval()
    model.attention.train()
    found = watch_forward(model, IMAGES)
    assert found[0].kind == "train-mode"
    assert "attention (MultiheadAttention)" in found[0].what


def test_a_finding_inside_library_layers_blames_no_line_outside_the_model() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)).eval()
    assert [(each.kind, each.where) for each in watch_forward(layers, IMAGES)] == [("batch-statistics", "")]


def test_a_value_of_a_buffer_is_not_one_of_the_data() -> None:
    class Threshold(nets.Base):
        def __init__(self) -> None:
            super().__init__(3)
            self.register_buffer("threshold", torch.tensor(1.0))

        def between(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if self.threshold > 1 else x

    assert [each.kind for each in watch_forward(Threshold().eval(), IMAGES)] == ["tensor-value"]


def test_what_is_written_into_a_buffer_depends_on_the_data() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.largest.copy_(x.max())
            return x / self.largest.item()

    assert [each.kind for each in watch_forward(Written().eval(), IMAGES)] == ["data-value"]
