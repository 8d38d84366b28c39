"""Which parts of a model count as its repeated blocks."""

from __future__ import annotations

from torch import nn

from drumline.models.blocks import repeated_blocks


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


def names(model: nn.Module) -> list[str]:
    found = {id(block) for block in repeated_blocks(model)}
    return [name for name, module in model.named_modules() if id(module) in found]


def test_members_of_rows_are_blocks_and_what_they_are_made_of_is_not() -> None:
    model = nn.Module()
    model.layer1, model.layer2 = (
        nn.Sequential(Block(4), Block(4)),
        nn.Sequential(Block(4), Block(4), Block(4)),
    )
    assert names(model) == [f"layer1.{n}" for n in range(2)] + [f"layer2.{n}" for n in range(3)]


def test_stages_of_blocks_give_their_blocks() -> None:
    model = nn.Module()
    model.stages = nn.Sequential(Stage(2, False), Stage(3, True))
    assert names(model) == [f"stages.0.blocks.{n}" for n in range(2)] + [
        f"stages.1.blocks.{n}" for n in range(3)
    ]


def test_rows_of_rows_give_the_innermost_blocks_and_single_ones_stay() -> None:
    model = nn.Module()
    head = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model.features = nn.Sequential(head, nn.Sequential(Block(4)), nn.Sequential(Block(4), Block(4)))
    assert names(model) == ["features.0", "features.1", "features.2.0", "features.2.1"]


def test_layers_in_a_row_are_blocks_of_their_own() -> None:
    model = nn.Module()
    model.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
    assert names(model) == ["features.0", "features.2"]
