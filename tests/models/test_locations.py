"""Taps of transformers: patch tokens as maps, the class token as a vector."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.models.locations import Location, View, view_of
from drumline.models.tapped import Tapped, parse_taps, with_taps

WIDTH = 16


class Transformer(nn.Module):
    """Like timm's and torchvision's: special tokens, then 4 x 4 patches, row by row."""

    def __init__(self, special: int = 1, depth: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 8, 8)
        self.tokens = nn.Parameter(torch.randn(1, special, WIDTH))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def embed(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        return torch.cat([self.tokens.expand(len(x), -1, -1), patches], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x)))[:, 0])


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def made(special: int = 1) -> Transformer:
    torch.manual_seed(0)
    return Transformer(special).eval()


@pytest.mark.parametrize("special", [0, 1, 2, 4])
def test_a_named_block_is_a_stage_of_patches(special: int) -> None:
    model = made(special)
    tapped = with_taps(model, "blocks.0,blocks.2", images())
    assert isinstance(tapped, Tapped)
    assert tapped.locations == {"stage1": "blocks.0", "stage2": "blocks.2", "pooled": "head:input"}
    logits, taps = tapped(images(), taps=True)
    assert torch.equal(logits, model(images()))
    tokens = model.blocks[0](model.embed(images()))
    assert taps["stage1"].shape == (2, WIDTH, 4, 4)
    for row in range(4):
        for column in range(4):
            patch = tokens[:, special + 4 * row + column]
            torch.testing.assert_close(taps["stage1"][:, :, row, column], patch)


def test_the_class_token_is_a_vector_for_pooled_and_a_map_of_one_place_for_a_stage() -> None:
    model = made(2)
    tapped = with_taps(model, "stage1=blocks.1:cls,pooled=blocks.2", images())
    taps = tapped(images(), taps=True)[1]
    tokens = model.blocks[:2](model.embed(images()))
    torch.testing.assert_close(taps["stage1"], tokens[:, 0, :, None, None])
    torch.testing.assert_close(taps["pooled"], model.blocks[2](tokens)[:, 0])


def test_gradients_flow_through_the_taps_of_tokens() -> None:
    model = made()
    taps = with_taps(model, "blocks.0", images())(images(), taps=True)[1]
    taps["stage1"].square().sum().backward()
    assert model.tokens.grad is not None
    assert model.patch_embed.weight.grad is not None
    assert model.blocks[1].linear1.weight.grad is None


def test_a_model_with_taps_of_tokens_compiles() -> None:
    tapped = with_taps(made(), "blocks.0,stage2=blocks.1:cls", images())
    found = torch.compile(tapped, backend="aot_eager", fullgraph=True)(images(), taps=True)[1]
    for name, tap in tapped(images(), taps=True)[1].items():
        torch.testing.assert_close(found[name], tap)


def test_maps_with_channels_last_are_turned() -> None:
    tensor = torch.randn(2, 4, 4, 24)
    view = view_of("stage1", Location.parse("features.1"), tensor, (32, 32))
    assert view == View("channels last")
    assert torch.equal(view(tensor), tensor.permute(0, 3, 1, 2))
    assert view_of("stage1", Location.parse("layer1"), torch.randn(2, 24, 4, 4), (32, 32)) == View()


@pytest.mark.parametrize(
    ("text", "special", "message"),
    [
        ("pooled=blocks.2", 0, r"no class token among its 16 tokens\n  fix: name a module whose output"),
        ("stage1=blocks.0", 7, r"its 23 tokens do not form a square .*\n  fix: write stage1=blocks.0:cls"),
        ("stage1=patch_embed:cls", 1, "patch_embed has no tokens: its tensor has shape 2 x 16 x 4 x 4"),
    ],
)
def test_tokens_that_do_not_fit_are_rejected(text: str, special: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_taps(made(special), text, images())


def test_modules_without_a_tap_are_stages_in_their_order() -> None:
    expected = {"stage1": "blocks.1", "stage2": "blocks.2:input:patches", "pooled": "norm:cls"}
    assert parse_taps("blocks.1, blocks.2:input:patches pooled=norm:cls", made()) == expected
