"""What all models share: deterministic adaptive pooling, repeated blocks, copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.core.errors import UserError
from drumline.models.base import _means, copy_model, pool_to, repeated_blocks


def feature_map(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_pooling_a_7x7_map_to_7x7_returns_it() -> None:
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


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.downsample = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))


class Stage(nn.Module):
    def __init__(self, depth: int, shrinks: bool) -> None:
        super().__init__()
        self.downsample = (
            nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 2, 2)) if shrinks else nn.Identity()
        )
        self.blocks = nn.Sequential(*(Block(4) for _ in range(depth)))


def block_names(model: nn.Module) -> list[str]:
    found = {id(block) for block in repeated_blocks(model)}
    return [name for name, module in model.named_modules() if id(module) in found]


def test_members_of_a_container_are_blocks_and_their_parts_are_not() -> None:
    model = nn.Module()
    model.layer1, model.layer2 = (
        nn.Sequential(Block(4), Block(4)),
        nn.Sequential(Block(4), Block(4), Block(4)),
    )
    assert block_names(model) == [f"layer1.{n}" for n in range(2)] + [f"layer2.{n}" for n in range(3)]


def test_a_stage_is_replaced_by_its_blocks() -> None:
    model = nn.Module()
    model.stages = nn.Sequential(Stage(2, False), Stage(3, True))
    assert block_names(model) == [f"stages.0.blocks.{n}" for n in range(2)] + [
        f"stages.1.blocks.{n}" for n in range(3)
    ]


def test_nested_containers_give_the_innermost_blocks_and_single_members_stay() -> None:
    model = nn.Module()
    head = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model.features = nn.Sequential(head, nn.Sequential(Block(4)), nn.Sequential(Block(4), Block(4)))
    assert block_names(model) == ["features.0", "features.1", "features.2.0", "features.2.1"]


def test_layers_in_a_sequence_are_blocks_of_their_own() -> None:
    model = nn.Module()
    model.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
    assert block_names(model) == ["features.0", "features.2"]


def test_a_model_that_holds_a_computed_tensor_is_rejected_by_name() -> None:
    old = nn.Sequential(nn.Linear(4, 4), nn.utils.weight_norm(nn.Linear(4, 2)))
    with pytest.raises(UserError, match=r"'1\.weight' is a tensor computed from") as rejected:
        copy_model(old)
    assert "weight_norm or spectral_norm from torch.nn.utils.parametrizations" in str(rejected.value)


def test_a_parametrized_model_is_copied() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    made = copy_model(model)
    x = torch.randn(3, 4)
    assert torch.equal(made(x), model(x))
    assert made[0].parametrizations.weight.original0 is not model[0].parametrizations.weight.original0
