"""The taps contract, for every built-in network."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.models.base import Taps, VisionModel
from tests.models.quick import NAMES, on_meta, quick_model

SIDE = 32
LINEAR_STAGES = ("mobilenet_v2", "cifar/mobilenet_v2_half")


def images() -> Tensor:
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def trained_once(model: VisionModel, taps: bool) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    """Logits, gradients and buffers after one forward and backward in training mode."""
    model.train().requires_grad_()
    torch.manual_seed(2)
    logits = model(images(), taps=True)[0] if taps else model(images())
    logits.square().sum().backward()
    return logits.detach(), [p.grad for p in model.parameters()], list(model.buffers())


@pytest.mark.parametrize("name", NAMES)
def test_taps_change_neither_logits_nor_gradients_nor_running_statistics(name: str) -> None:
    plain, tapped = (trained_once(quick_model(name), taps) for taps in (False, True))
    assert torch.equal(plain[0], tapped[0])
    assert plain[1][0] is not None
    assert plain[1][0].count_nonzero() > 0
    for without, with_taps in zip(plain[1], tapped[1], strict=True):
        assert without is not None
        assert with_taps is not None
        assert torch.equal(without, with_taps)
    for without, with_taps in zip(plain[2], tapped[2], strict=True):
        assert torch.equal(without, with_taps)
    counters = [buffer for buffer in tapped[2] if buffer.dtype == torch.int64]
    assert all(counter == 1 for counter in counters)


@dataclass(frozen=True)
class Tapped:
    """A model in evaluation mode, and what it gave once."""

    name: str
    model: VisionModel
    logits: Tensor
    taps: Taps


@pytest.fixture(scope="module", params=NAMES)
def tapped(request: pytest.FixtureRequest) -> Tapped:
    model = quick_model(request.param).eval()
    with torch.no_grad():
        return Tapped(request.param, model, *model(images(), taps=True))


@pytest.fixture(scope="module", params=NAMES)
def shapes(request: pytest.FixtureRequest) -> tuple[str, VisionModel]:
    return request.param, on_meta(request.param).eval()


def test_taps_are_what_tap_info_says(tapped: Tapped) -> None:
    model, taps = tapped.model, tapped.taps
    assert list(taps) == list(model.tap_info)
    stages = range(1, (len(taps) - 2) // 2 + 1)
    order = [key for number in stages for key in (f"stage{number}.pre", f"stage{number}")]
    assert list(taps) == ["stem", *order, "pooled"]
    for key, info in model.tap_info.items():
        # The stand-in classifier of the ImageNet VGGs is narrower than the real one.
        if not (key == "pooled" and model.head_name == "classifier.6"):
            assert taps[key].shape[:2] == (2, info.channels), key
        assert taps[key].dim() == (2 if key == "pooled" else 4)
        if info.norm:
            norm = model.get_submodule(info.norm)
            assert isinstance(norm, nn.BatchNorm2d)
            assert norm.num_features == info.channels
    assert torch.equal(model.head(taps["pooled"]), tapped.logits)


def test_a_stage_is_its_pre_activation_activated(tapped: Tapped) -> None:
    for key, before in tapped.taps.items():
        if not key.endswith(".pre"):
            continue
        after = tapped.taps[key.removesuffix(".pre")]
        if tapped.name in LINEAR_STAGES:
            assert after is before
        elif "wrn" in tapped.name:
            assert torch.equal(tapped.model.get_submodule(tapped.model.tap_info[key].norm)(after), before)
        else:
            assert torch.equal(after, F.relu(before))
        # An in-place activation would have left no negative value.
        assert before.min() < 0, key


def test_no_tapped_tensor_is_written_to_afterwards(tapped: Tapped, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same taps come from a run in which nothing is done in place."""
    relu = F.relu
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: relu(x))
    monkeypatch.setattr(Tensor, "__iadd__", Tensor.__add__)
    for module in tapped.model.modules():
        if isinstance(module, nn.ReLU | nn.ReLU6):
            monkeypatch.setattr(module, "inplace", False)
    with torch.no_grad():
        _, untouched = tapped.model(images(), taps=True)
    for key, tap in tapped.taps.items():
        assert torch.equal(tap, untouched[key]), key


def test_each_block_is_called_once_and_in_order(shapes: tuple[str, VisionModel]) -> None:
    _, model = shapes
    called: list[nn.Module] = []
    handles = [
        block.register_forward_hook(lambda block, *_: called.append(block)) for block in model.blocks()
    ]
    model(torch.empty(2, 3, SIDE, SIDE, device="meta"))
    for handle in handles:
        handle.remove()
    assert called == model.blocks() == [model.get_submodule(name) for name in model.block_names]
    assert bool(called) != (model.head_name == "classifier.6")


def test_images_of_other_sizes_and_shapes_are_accepted(shapes: tuple[str, VisionModel]) -> None:
    name, model = shapes
    small = [(8, 8), (28, 28)] if name.startswith("cifar/") else []
    for height, width in [*small, (64, 96), (224, 224)]:
        assert model(torch.empty(3, 3, height, width, device="meta")).shape == (3, 10)
    assert model.head.out_features == 10


@pytest.mark.parametrize("name", ["cifar/resnet8", "cifar/wrn_16_1", "cifar/shufflenet_v2", "vgg11_bn"])
def test_a_model_with_taps_compiles_to_one_graph(name: str) -> None:
    torch.compiler.reset()
    model = quick_model(name).eval()
    with torch.no_grad():
        logits, taps = torch.compile(model, backend="eager", fullgraph=True)(images(), taps=True)
        expected, expected_taps = model(images(), taps=True)
    assert torch.equal(logits, expected)
    assert all(torch.equal(taps[key], tap) for key, tap in expected_taps.items())


def test_features_are_not_kept_on_the_model() -> None:
    model = quick_model("cifar/resnet8").eval()
    model(images(), taps=True)
    held = [
        key for module in model.modules() for key, value in vars(module).items() if isinstance(value, Tensor)
    ]
    assert held == []


def test_a_wide_resnets_stage_is_a_sum_and_its_pre_activation_the_next_norms_output() -> None:
    model = quick_model("cifar/wrn_16_2").train()
    outputs: dict[str, Tensor] = {}
    for number in (1, 2, 3):
        norm = model.get_submodule(model.tap_info[f"stage{number}"].norm)
        for name, module in (
            (f"stage{number}", getattr(model, f"block{number}")),
            (f"stage{number}.pre", norm),
        ):
            module.register_forward_hook(lambda _m, _i, out, name=name: outputs.update({name: first(out)}))
    _, taps = model(images(), taps=True)
    for name, output in outputs.items():
        assert torch.equal(taps[name], output), name
    assert len(outputs) == 6


def first(out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return (out if isinstance(out, Tensor) else out[0]).clone()
