"""Taps of torchvision's and timm's models on the GPU: where they are, and that they change nothing."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.models.registry import create_model
from drumline.models.tapped import Tapped, norm_before, with_taps

# cuBLAS reads this when its first handle is made; without it deterministic algorithms reject matrix products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"

# Name, stem and stages, the stages that have a `.pre`.
PLACES: list[tuple[str, list[str], str]] = [
    ("torchvision/resnet18", ["relu", "layer1", "layer2", "layer3", "layer4"], "1234"),
    ("torchvision/resnet50", ["relu", "layer1", "layer2", "layer3", "layer4"], "1234"),
    (
        "torchvision/mobilenet_v2",
        ["features.1", "features.3", "features.6", "features.13", "features.18"],
        "4",
    ),
    (
        "torchvision/mobilenet_v3_small",
        ["features.0", "features.1", "features.3", "features.8", "features.12"],
        "4",
    ),
    (
        "torchvision/efficientnet_b0",
        ["features.1", "features.2", "features.3", "features.5", "features.8"],
        "4",
    ),
    ("torchvision/convnext_tiny", ["features.1", "features.3", "features.5", "features.7"], ""),
    (
        "torchvision/regnet_y_400mf",
        ["stem", *(f"trunk_output.block{number}" for number in (1, 2, 3, 4))],
        "1234",
    ),
    (
        "torchvision/densenet121",
        ["features.relu0", *(f"features.denseblock{number}" for number in (1, 2, 3)), "features.norm5"],
        "",
    ),
    (
        "torchvision/vgg11_bn",
        ["features.2", "features.6", "features.13", "features.20", "features.27"],
        "1234",
    ),
    ("torchvision/shufflenet_v2_x1_0", ["conv1", "stage2", "stage3", "conv5"], "14"),
    ("torchvision/vit_b_16", [], ""),
    ("torchvision/swin_t", [], ""),
    ("timm/resnet18", ["act1", "layer1", "layer2", "layer3", "layer4"], "1234"),
    ("timm/efficientnet_b0", ["blocks.0", "blocks.1", "blocks.2", "blocks.4", "blocks.6"], ""),
    ("timm/convnext_atto", ["stages.0", "stages.1", "stages.2", "stages.3"], ""),
    ("timm/regnety_002", ["stem", "s1", "s2", "s3", "s4"], "1234"),
    ("timm/vgg11", ["features.1", "features.4", "features.9", "features.14", "features.19"], "1234"),
    ("timm/vit_tiny_patch16_224", [], ""),
    ("timm/swin_tiny_patch4_window7_224", [], ""),
]
EXACT = [name for name, _, _ in PLACES if "swin" not in name and "vit" not in name]


def made(name: str) -> nn.Module:
    pytest.importorskip(name.partition("/")[0], reason=f"needs {name.partition('/')[0]}")
    torch.manual_seed(0)
    return create_model(name, 16).to(DEVICE)


def images() -> Tensor:
    return torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize(("name", "ends", "pre"), PLACES, ids=[name for name, _, _ in PLACES])
def test_taps_have_the_expected_locations_and_the_head_gives_the_logits(
    name: str, ends: list[str], pre: str
) -> None:
    model = with_taps(made(name), "", images()).eval()
    assert isinstance(model, Tapped)
    found = [place for tap, place in model.locations.items() if tap != "pooled" and not tap.endswith(".pre")]
    assert found == ends
    assert ("stem" in model.locations) == (len(ends) == 5)
    assert [tap for tap in model.locations if tap.endswith(".pre")] == [
        f"stage{number}.pre" for number in pre
    ]
    with torch.inference_mode():
        logits, taps = model(images(), taps=True)
        head = model.model.get_submodule(model.locations["pooled"].removesuffix(":input"))
        torch.testing.assert_close(head(taps["pooled"]), logits)
    sides = [
        tensor.shape[-1] for tap, tensor in taps.items() if tensor.dim() == 4 and not tap.endswith(".pre")
    ]
    assert len(sides) == len(ends)
    assert sides == sorted(set(sides), reverse=True)
    for number in pre:
        norm = norm_before(model, f"stage{number}.pre")
        if "vgg11" not in name or name.endswith("_bn"):
            assert isinstance(norm, nn.BatchNorm2d)
            assert norm.num_features == taps[f"stage{number}.pre"].shape[1]


def trained_once(model: nn.Module, taps: bool) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    model.train()
    torch.manual_seed(2)
    logits = model(images(), taps=True)[0] if taps else model(images())
    F.cross_entropy(logits, torch.arange(4, device=DEVICE)).backward()
    inner = model.model if isinstance(model, Tapped) else model
    assert isinstance(inner, nn.Module)
    state = {f"buffer {key}": buffer for key, buffer in inner.named_buffers()}
    for key, parameter in inner.named_parameters():
        if parameter.grad is not None:
            state[f"gradient {key}"] = parameter.grad
    return logits.detach(), state, torch.rand(1, device=DEVICE)


@pytest.mark.parametrize("name", EXACT)
def test_taps_change_neither_logits_nor_gradients_nor_statistics_nor_draws(name: str) -> None:
    bare = made(name)
    expected = trained_once(copy.deepcopy(bare), False)
    if not all(torch.equal(a, b) for a, b in zip(*twice(bare, expected), strict=True)):
        pytest.skip("this model does not repeat its own bits here")
    actual = trained_once(with_taps(bare, "", images()), True)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[2], expected[2])
    assert list(actual[1]) == list(expected[1])
    for key, tensor in expected[1].items():
        assert torch.equal(actual[1][key], tensor), key


def twice(
    bare: nn.Module, once: tuple[Tensor, dict[str, Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    again = trained_once(copy.deepcopy(bare), False)
    return [once[0], *once[1].values()], [again[0], *again[1].values()]


@pytest.mark.parametrize("name", [name for name, ends, _ in PLACES if ends])
def test_taps_are_what_a_forward_without_in_place_operations_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_taps(made(name), "", images()).eval()
    with torch.no_grad():
        logits, taps = model(images(), taps=True)
        relu = F.relu
        monkeypatch.setattr(F, "relu", lambda x, inplace=False: relu(x))
        monkeypatch.setattr(Tensor, "__iadd__", Tensor.__add__)
        for module in model.modules():
            if getattr(module, "inplace", False):
                monkeypatch.setattr(module, "inplace", False)
        expected, untouched = model(images(), taps=True)
    torch.testing.assert_close(logits, expected)
    assert list(taps) == list(untouched)
    for tap, tensor in untouched.items():
        torch.testing.assert_close(taps[tap], tensor, msg=lambda text, tap=tap: f"{tap}: {text}")


def test_a_compiled_tapped_model_gives_the_same_taps() -> None:
    torch.compiler.reset()
    model = with_taps(made("torchvision/resnet18"), "", images()).eval()
    with torch.no_grad():
        expected, seen = model(images(), taps=True)
        logits, taps = torch.compile(model, fullgraph=True)(images(), taps=True)
    for one, other in ((logits, expected), *((taps[tap], seen[tap]) for tap in seen)):
        # Other kernels, some of them with TF32: far from what a tap overwritten by its ReLU would differ by.
        torch.testing.assert_close(one, other, rtol=0, atol=5e-3 * float(other.abs().max()))


TOKENS = [
    ("timm/vit_tiny_patch16_224", "blocks.3", "blocks.11:cls", 1, 14),
    ("timm/deit_tiny_distilled_patch16_224", "blocks.3", "blocks.11:cls", 2, 14),
    ("timm/vit_tiny_r_s16_p8_224", "blocks.3", "blocks.11:cls", 1, 7),
    ("torchvision/vit_b_16", "encoder.layers.encoder_layer_3", "encoder.layers.encoder_layer_11:cls", 1, 14),
]


@pytest.mark.parametrize(
    ("name", "block", "cls", "special", "side"), TOKENS, ids=[each[0] for each in TOKENS]
)
def test_blocks_of_transformers_are_maps_of_patches(
    name: str, block: str, cls: str, special: int, side: int
) -> None:
    model = made(name).eval()
    images = torch.randn(2, 3, 224, 224, device=DEVICE)
    seen: dict[str, Tensor] = {}
    for part in (block, cls.removesuffix(":cls")):
        model.get_submodule(part).register_forward_hook(lambda m, i, out, part=part: seen.update({part: out}))
    with torch.no_grad():
        logits, taps = with_taps(model, f"{block},pooled={cls}", images)(images, taps=True)
        assert torch.equal(logits, model(images))
    patches = seen[block][:, special:]
    assert taps["stage1"].shape == (2, patches.shape[2], side, side)
    assert torch.equal(taps["stage1"].flatten(2), patches.transpose(1, 2))
    assert torch.equal(taps["pooled"], seen[cls.removesuffix(":cls")][:, 0])


@pytest.mark.parametrize("name", ["torchvision/swin_t", "timm/swin_tiny_patch4_window7_224"])
def test_blocks_of_swin_are_maps_with_channels_first(name: str) -> None:
    model = made(name).eval()
    images = torch.randn(2, 3, 224, 224, device=DEVICE)
    block = "features.3" if name.startswith("torchvision") else "layers.1"
    taps = with_taps(model, block, images)(images, taps=True)[1]
    assert taps["stage1"].shape == (2, 192, 28, 28)


def test_timms_deit_returns_both_heads_in_training() -> None:
    name = "timm/deit_tiny_distilled_patch16_224"
    tapped = with_taps(made(name), "pooled=norm:cls", images := torch.randn(2, 3, 224, 224, device=DEVICE))
    assert isinstance(tapped, Tapped)
    assert tapped.has_second_head
    tapped.use_second_head()
    model, tokens = tapped.model, tapped.model.forward_features(images)
    logits, taps = tapped.train()(images, taps=True)
    assert torch.equal(logits, model.head(tokens[:, 0]))
    assert torch.equal(taps["distilled"], model.head_dist(tokens[:, 1]))
    mean = (logits + taps["distilled"]) / 2
    torch.testing.assert_close(tapped.eval()(images), mean)
