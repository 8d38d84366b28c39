"""Cut models compute the bits of whole ones, and what cannot be cut is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drumline.core.errors import UserError
from drumline.core.precision import BF16, FP32, autocast
from drumline.models import create_model
from drumline.models.tapped import Tapped, with_taps
from drumline.parallel.pipeline.cut import Traced, trace
from drumline.parallel.pipeline.split import even_cuts, trainable_units
from drumline.parallel.pipeline.stage import StageModule, boundaries
from drumline.training.state import recompute_blocks


def images(size: int = 32, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [output[0], *output[1].values()]


def loss(output: Any) -> Tensor:
    return torch.stack([tensor.float().square().sum() * 0.1 for tensor in tensors(output)]).sum()


def chain(stages: list[StageModule], x: Tensor, backward: bool) -> Any:
    """Stage after stage, each with an autograd graph of its own, as between processes."""
    inputs: tuple[Tensor, ...] = (x,)
    entered: list[list[Tensor]] = []
    left: list[Any] = []
    gradients: dict[Tensor, Tensor] = {}
    for stage in stages:
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        for leaf in leaves:
            if leaf.requires_grad:
                # As it comes: `.grad` would take over the strides of the leaf, and sums their order from those.
                leaf.register_hook(partial(gradients.__setitem__, leaf))
        # A copy, which the stage may write into.
        inputs = stage(*(leaf.clone() for leaf in leaves))
        entered.append(leaves)
        left.append(inputs)
    if backward:
        loss(left[-1]).backward()
        for outputs, leaves in zip(reversed(left[:-1]), reversed(entered[1:]), strict=True):
            pairs = [
                (output, gradients[leaf])
                for output, leaf in zip(outputs, leaves, strict=True)
                if leaf in gradients
            ]
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
    return left[-1]


def assert_same_bits(
    model: nn.Module,
    names: list[str],
    traced: Traced,
    x: Tensor,
    kwargs: Mapping[str, Any] | None = None,
    training: bool = True,
) -> None:
    whole, cut = deepcopy(model).train(training), deepcopy(model).train(training)
    stages = [segment.bind(cut) for segment in traced.split(names)]
    torch.manual_seed(2)
    expected = whole(x, **(kwargs or {}))
    if training:
        loss(expected).backward()
    torch.manual_seed(2)
    found = chain(stages, x, backward=training)
    assert type(found) is type(expected)
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(ours, theirs)
    for (name, ours), theirs in zip(cut.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad), name
    for (name, ours), theirs in zip(cut.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert list(cut.state_dict()) == list(model.state_dict())


def assert_cut_anywhere(model: nn.Module, x: Tensor, kwargs: Mapping[str, Any] | None = None) -> Traced:
    """With a stage at every legal point: every crossing is then handed on."""
    traced = trace(model, kwargs, sample=x)
    names = [point.name for point in traced.points[1:]]
    for training in (True, False):
        assert_same_bits(model, names, traced, x, kwargs, training)
    return traced


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down2 = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(11, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norm(self.down1(x)), inplace=True)
        second = self.down2(first)
        third = self.middle(second) + second
        return self.last(torch.cat([self.up(third), first, x], 1))


class Transformer(nn.Module):
    """A vision transformer's ways: a class token, positions, shapes taken apart, a fused projection unpacked."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.qkv = nn.Linear(8, 24)
            self.proj = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            parts = self.qkv(self.norm(x)).reshape(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
            q, k, v = parts
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
            return x + F.dropout(self.proj(mixed), 0.2, self.training)

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 8, stride=8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.register_buffer("positions", torch.randn(1, 17, 8))
        self.body = nn.Sequential(*(self.Block() for _ in range(3)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.body(x)[:, 0])


class Branching(nn.Module):
    """A block that fx cannot follow, between two that it can."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.norm(x) if x.shape[0] > 1 else x

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.odd = self.Odd()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.odd(self.first(x)).mean((2, 3)))


def ours(name: str) -> Any:
    """A model of ours; vgg11 with a small classifier, whose 120 million weights would only take time."""
    torch.manual_seed(0)
    if name != "vgg11":
        return create_model(name, classes=5)
    with torch.device("meta"):
        model: Any = create_model(name, classes=5)
        model.classifier[0], model.classifier[3] = nn.Linear(512 * 49, 8), nn.Linear(8, 8)
        model.classifier[6] = nn.Linear(8, 5)
    for parameter in model.to_empty(device="cpu").parameters():
        nn.init.normal_(parameter, 0, 0.05)
    return model


OURS = {
    "cifar/resnet8": 32,
    "resnet18": 32,
    "cifar/vgg8": 16,
    "vgg11": 32,
    "cifar/mobilenet_v2_half": 16,
    "cifar/shufflenet_v1": 16,
    "cifar/shufflenet_v2": 16,
    "cifar/wrn_16_1": 16,
}


@pytest.mark.parametrize("taps", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_our_models_cut_at_every_point_compute_the_same_bits(name: str, taps: bool) -> None:
    traced = assert_cut_anywhere(ours(name), images(OURS[name]), {"taps": True} if taps else {})
    assert not traced.illegal
    assert len(traced.points) > 6


def test_each_cut_alone_computes_the_same_bits() -> None:
    model, x = ours("cifar/resnet8"), images(16)
    traced = trace(model, {"taps": True}, sample=x)
    for point in traced.points[1:]:
        for alias in point.aliases:
            assert_same_bits(model, [alias], traced, x, {"taps": True})


@pytest.mark.parametrize("make", [UNet, Transformer, Branching])
def test_skips_tokens_and_untraceable_blocks_compute_the_same_bits(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert_cut_anywhere(make(), images(32))


def test_a_skip_is_handed_on_by_every_stage_between() -> None:
    traced = trace(UNet(), sample=images())
    crossing = {point.name: point.crossing for point in traced.points}
    assert crossing["middle"] == ("x", "relu", "down2")
    assert crossing["up"] == ("x", "relu", "add")
    assert crossing["last"] == ("cat",)


def test_code_that_takes_shapes_apart_is_followed() -> None:
    traced = trace(Transformer(), sample=images())
    inside = [alias for point in traced.points for alias in point.aliases if alias.startswith("body.1.")]
    assert inside == ["body.1.proj"]
    assert "int and not a tensor" in traced.illegal["body.1.qkv"]


def test_a_block_that_depends_on_the_batch_size_is_kept_whole() -> None:
    traced = trace(Branching(), sample=images())
    assert [point.name for point in traced.points] == ["first", "odd", "head"]
    stage = traced.split(["odd", "head"])[1]
    assert stage.modules == ("odd",)
    assert stage.parameters == ("odd.conv.weight", "odd.conv.bias", "odd.norm.weight", "odd.norm.bias")
    assert_same_bits(Branching(), ["odd"], traced, images(batch=1))


def test_stages_take_any_batch_size() -> None:
    model = Transformer().eval()
    traced = trace(model, sample=images(batch=7))
    stages = [segment.bind(model) for segment in traced.split(even_cuts(traced, 4))]
    for batch in (1, 5):
        x = images(batch=batch)
        assert torch.equal(chain(stages, x, backward=False), model(x))


def test_tracing_leaves_no_mark() -> None:
    model = Transformer()
    model.add_module("noise", nn.Sequential(nn.BatchNorm2d(3), nn.Dropout()))
    model.get_submodule("noise.0").eval()
    called: list[str] = []
    model.head.register_forward_hook(lambda *_: called.append("head"))
    modes = [part.training for part in model.modules()]
    before = deepcopy(model.state_dict())
    draws, python_draws = torch.get_rng_state(), random.getstate()
    attributes = {name: set(vars(part)) for name, part in model.named_modules()}
    traced = trace(model, sample=images())
    stages = [segment.bind(model) for segment in traced.split(even_cuts(traced, 3))]
    boundaries(stages, images())
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(torch.get_rng_state(), draws)
    assert random.getstate() == python_draws
    assert {name: set(vars(part)) for name, part in model.named_modules()} == attributes
    assert not called
    chain(stages, images(), backward=False)
    assert called == ["head"]


def test_a_norm_kept_in_evaluation_stays_there() -> None:
    model, x = ours("cifar/resnet8"), images(16)
    model.layer1[0].bn1.eval()
    traced = trace(model, sample=x)
    stages = [segment.bind(model) for segment in traced.split(["layer1", "layer2"])]
    chain(stages, x, backward=False)
    assert model.layer1[0].bn1.num_batches_tracked == 0
    assert model.layer1[0].bn2.num_batches_tracked == 1


def test_stages_follow_the_model_they_are_bound_to() -> None:
    """Its mode, tensors that replace its own, and the moving average, which is a copy."""
    model, x = Transformer().train(), images()
    traced = trace(model, sample=x)
    segments = traced.split(["body.1"])
    average = deepcopy(model)
    with torch.no_grad():
        average.cls_token.add_(1)
    copies = [segment.bind(average) for segment in segments]
    stages = [segment.bind(model) for segment in segments]
    model.eval(), average.eval()
    assert torch.equal(chain(copies, x, backward=False), average(x))
    model.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
    assert torch.equal(chain(stages, x, backward=False), model(x))
    assert not list(stages[0].parameters())


def test_parameters_belong_to_the_stage_that_uses_them() -> None:
    model = Transformer()
    first, second = trace(model, sample=images()).split(["body.1"])
    assert {"cls_token", "patch.weight", "body.0.proj.bias"} <= set(first.parameters)
    assert first.buffers == ("positions",)
    assert not second.buffers
    assert sorted((*first.parameters, *second.parameters)) == sorted(n for n, _ in model.named_parameters())


def test_recomputing_blocks_are_kept_whole_and_recompute() -> None:
    model, x = ours("cifar/resnet8"), images(16)
    recompute_blocks(model)
    traced = trace(model, sample=x)
    names = [point.name for point in traced.points]
    assert names == ["conv1", "bn1", "layer1", "layer2", "layer3", "fc"]
    stages = [segment.bind(model) for segment in traced.split(names[1:])]
    calls: list[int] = []
    # conv1 of the block is inside what is computed again in backward.
    model.layer2[0].conv1.register_forward_hook(lambda *_: calls.append(1))
    specs = boundaries(stages, x)
    assert not calls
    assert all(spec.requires_grad for entering in specs[1:] for spec in entering)
    chain(stages, x, backward=True)
    assert len(calls) == 2
    assert model.layer2[0].bn1.num_batches_tracked == 1


class Scaled(torch.autograd.Function):
    """A backward that is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class OwnBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.conv, x, use_reentrant=False)


def test_a_backward_of_its_own_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), OwnBackward(), Checkpointed(), nn.Conv2d(3, 3, 1))
    traced = assert_cut_anywhere(model, images(8))
    assert [point.name for point in traced.points] == ["0", "1", "2", "3"]
    assert traced.split(["2"])[0].modules == ("0", "1")


def test_a_caller_may_name_modules_to_keep_whole() -> None:
    traced = trace(create_model("cifar/resnet8", classes=5), sample=images(16), leaves=["layer2"])
    assert not [point for point in traced.points if any(n.startswith("layer2.") for n in point.aliases)]


def test_taps_on_a_foreign_model_are_handed_to_the_last_stage() -> None:
    torch.manual_seed(0)
    x = images(32)
    inner = nn.Sequential(
        UNet(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 8), nn.ReLU(True), nn.Linear(8, 3)
    )
    model = Tapped(inner, {"stage1": "0.middle", "stage2.pre": "3", "pooled": "5:input"}, x)
    assert model.copied == ("stage2.pre",)
    traced = trace(model, {"taps": True}, sample=x)
    names = [point.name for point in traced.points[1:]]
    assert {"0.middle", "3"} <= set(names)
    stages = [segment.bind(model) for segment in traced.split(names)]
    model.eval()
    expected, wanted = model(x, taps=True)
    logits, taps = chain(stages, x, backward=False)
    assert torch.equal(logits, expected)
    assert list(taps) == list(wanted) == ["stage1", "stage2.pre", "pooled"]
    assert all(torch.equal(taps[tap], wanted[tap]) for tap in taps)


def test_units_lie_between_blocks() -> None:
    traced = trace(create_model("resnet18", classes=5), sample=images())
    names = [point.name for point in traced.units]
    assert names == ["conv1", *(f"layer{n}{i}" for n in (1, 2, 3, 4) for i in ("", ".1")), "fc"]
    assert even_cuts(traced, 2) == ("layer3",)
    assert even_cuts(traced, 1) == ()
    assert len(even_cuts(traced, 10)) == 9
    with pytest.raises(UserError, match=r"parallel.stages = 11: ResNet can be cut into at most 10 stages"):
        even_cuts(traced, 11)


def test_wrong_names_are_reported() -> None:
    traced = trace(create_model("cifar/resnet8", classes=5), sample=images(16))
    for names, told in (
        (["layr3"], "did you mean layer3"),
        (["layer3", "layer2"], "layer2 comes before layer3"),
        (["layer2", "layer2.0.conv1"], "two stages would begin at layer2.0.conv1"),
        (["conv1"], "conv1 is where the model"),
    ):
        with pytest.raises(UserError, match=told):
            traced.split(names)


class Sized(nn.Module):
    """Keeps a size, and a tuple, over a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        left, right = self.first(x).chunk(2, 1)
        x = self.second(torch.cat([right, left], 1)).reshape(batch, 4, -1, 1)
        return self.third(x + torch.cat([left, right], 1).flatten(2).unsqueeze(-1))


def test_a_size_that_crosses_forbids_the_cut_and_a_tuple_crosses_by_its_items() -> None:
    traced = assert_cut_anywhere(Sized(), images(8))
    assert [point.name for point in traced.points] == ["first", "third"]
    with pytest.raises(
        UserError, match=r"(?s)no stage of Sized can begin at second: .*int and not a tensor.*at third"
    ):
        traced.split(["second"])

    class Halves(Sized):
        def forward(self, x: Tensor) -> Tensor:
            halves = self.first(x).chunk(2, 1)
            return self.third(self.second(torch.cat([halves[1], halves[0]], 1)) + torch.cat(halves, 1))

    class Picked(Sized):
        def forward(self, x: Tensor) -> Tensor:
            halves = self.first(x).chunk(2, 1)
            return self.third(self.second(x.repeat(1, 2, 1, 1)[:, :4]) + torch.cat([halves[1], halves[0]], 1))

    assert "second" in trace(Halves(), sample=images(8)).illegal
    assert [point.name for point in assert_cut_anywhere(Picked(), images(8)).points] == [
        "first",
        "second",
        "third",
    ]


def test_shared_memory_that_is_written_after_a_cut_forbids_it() -> None:
    class Writes(Sized):
        items = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            view = x.flatten(2)
            y = self.second(x.clone())
            if self.items:
                view[:, :, 1:] = 2.0
            else:
                view += 1
            return self.third(y + x)

    for Writes.items in (False, True):
        traced = assert_cut_anywhere(Writes(), images(8))
        assert [point.name for point in traced.points] == ["first", "third"]
        assert "share memory" in traced.illegal["second"]


def test_one_parameter_in_two_stages_is_rejected() -> None:
    class Twice(Sized):
        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.second(self.first(x))))

    traced = trace(Twice(), sample=images(8))
    with pytest.raises(UserError, match="calls no module"):
        traced.split(["fourth"])
    assert traced.split(["second"])[1].parameters == (
        "second.weight",
        "second.bias",
        "third.weight",
        "third.bias",
    )

    class Around(Sized):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.third(self.second(self.first(x))))

    tied = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    tied[2].weight = tied[0].weight
    counted = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Conv2d(3, 3, 1))
    counted.append(counted[0])
    for model, cut, told in (
        (
            Around(),
            "third",
            "second.weight is used by stage 0 and by stage 1.*each would have its own gradient",
        ),
        (tied, "1", "0.weight is used by stage 0 and by stage 1.*each would have its own gradient"),
        (
            counted,
            "1",
            "0.num_batches_tracked is used by stage 0 and by stage 1.*each would have its own value",
        ),
    ):
        with pytest.raises(UserError, match=told):
            trace(model, sample=images(8)).split([cut])


def test_cuts_chosen_for_the_user_keep_tied_weights_together() -> None:
    tied = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(5)))
    tied[2].weight = tied[1].weight
    assert [unit.name for unit in trace(tied, sample=images(8)).units] == ["0", "1", "3", "4"]


def test_what_is_frozen_goes_with_what_is_trained_after_it() -> None:
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(6)))
    traced = trace(model, sample=images(8))

    def units(*frozen: int) -> list[str]:
        for number, part in enumerate(model):
            part.requires_grad_(number not in frozen)
        return [unit.name for unit in trainable_units(traced, traced.units)]

    assert units() == ["0", "1", "2", "3", "4", "5"]
    assert units(0, 1) == ["0", "3", "4", "5"]
    assert units(2, 3) == ["0", "1", "2", "5"]
    assert units(4, 5) == ["0", "1", "2", "3"]
    assert units(0, 1, 2, 3, 4) == units(1, 2, 3, 4, 5) == units(*range(6)) == ["0"]
    units(0, 1, 5)
    kept = trainable_units(traced, traced.units)
    assert even_cuts(traced, 2, kept) == ("3",)
    with pytest.raises(UserError, match="at most 3 stages with something to train in each"):
        even_cuts(traced, 4, kept)
    with pytest.raises(UserError, match="cannot be cut between blocks"):
        even_cuts(traced, 2, kept[:1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_in_the_models_own_forward_is_not_lost_silently(reentrant: bool) -> None:
    class Recomputes(Sized):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=reentrant))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    with pytest.raises(UserError, match=r"Recomputes cannot be cut.*torch.utils.checkpoint"):
        trace(Recomputes(), sample=images(8))
    traced = trace(nn.Sequential(Block(), nn.Conv2d(3, 3, 1)), sample=images(8))
    assert [point.name for point in traced.points] == ["0", "1"]


def test_a_model_that_cannot_take_the_images_is_rejected() -> None:
    with pytest.raises(UserError, match=r"cannot take images of 3 x \d+ x \d+: its module '0' \(Conv2d\)"):
        trace(nn.Sequential(nn.Conv2d(1, 3, 1), nn.Conv2d(3, 3, 1)), sample=images(8))


def test_a_forward_that_cannot_be_traced_is_rejected_with_its_line() -> None:
    class Asks(Sized):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(x) if x.mean() > 0 else x

    class Draws(Sized):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) * random.random()

    with pytest.raises(UserError, match=r"Asks cannot be cut.*test_cut.py:\d+: return self.second"):
        trace(Asks(), sample=images(8))
    with pytest.raises(UserError, match=r"Draws cannot be cut.*random"):
        trace(Draws(), sample=images(8))


def test_a_module_that_draws_by_python_or_counts_its_calls_is_kept_whole() -> None:
    class Draws(Sized):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x if random.random() < 0.5 else self.second(x)

    class Counts(Sized):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.second(self.first(x)) * (1.0 if self.calls < 100 else 0.5)

    for kind in (Draws, Counts):
        traced = trace(nn.Sequential(nn.Conv2d(3, 3, 1), kind(), nn.Conv2d(4, 3, 1)), sample=images(8))
        assert [point.name for point in traced.points] == ["0", "1", "2"]
    with pytest.raises(UserError, match=r"Counts cannot be cut.*calls, a number that changes"):
        trace(Counts(), sample=images(8))


def test_boundaries_are_those_of_a_real_run() -> None:
    model, x = ours("cifar/resnet8"), images(16, batch=3)
    model.conv1.requires_grad_(False)
    traced = trace(model, {"taps": True}, sample=x)
    stages = [segment.bind(model) for segment in traced.split(["bn1", "layer2", "layer3.0.bn1", "fc"])]
    for precision in (FP32, BF16):
        inputs: Any = (x,)
        for stage, specs in zip(stages, boundaries(stages, x, precision), strict=True):
            found = [(tuple(t.shape), t.dtype, t.requires_grad) for t in inputs]
            assert found == [(spec.shape, spec.dtype, spec.requires_grad) for spec in specs]
            with autocast(x.device, precision):
                inputs = stage(*inputs)
    model.eval()
    assert not any(spec.requires_grad for specs in boundaries(stages, x) for spec in specs)


def test_a_rank_needs_the_weights_of_its_own_stage_only() -> None:
    model, x = ours("cifar/resnet8"), images(16)
    whole = [segment.bind(model) for segment in trace(model, sample=x).split(["layer2"])]
    partly = deepcopy(model)
    partly.layer3.to("meta"), partly.conv1.to("meta")
    traced = trace(partly, sample=x)
    stages = [segment.bind(partly) for segment in traced.split(["layer2"])]
    assert boundaries(stages, x) == boundaries(whole, x)


class Counts(nn.Module):
    """Sets attributes in its forward, which the trace and the look at shapes go through."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.last: Tensor | None = None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.second(self.first(x))
        return self.last


def test_what_a_forward_sets_on_its_module_is_gone_after_a_trace() -> None:
    model = Counts()
    calls, x = model.calls, images(8)
    segments = trace(model, sample=x).split(["second"])
    boundaries([segment.bind(model) for segment in segments], x)
    assert model.calls is calls
    assert int(calls) == 0
    assert model.last is None


LIBRARIES = [
    *(
        ("torchvision", name)
        for name in (
            "resnet18",
            "vit_b_16",
            "convnext_tiny",
            "efficientnet_b0",
            "mobilenet_v3_small",
            "densenet121",
        )
    ),
    *(
        ("timm", name)
        for name in (
            "resnet18",
            "vit_tiny_patch16_224",
            "convnext_atto",
            "efficientnet_b0",
            "mobilenetv3_small_050",
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name"), LIBRARIES)
def test_models_of_libraries_cut_at_every_unit_compute_the_same_bits(library: str, name: str) -> None:
    torch.manual_seed(0)
    if library == "timm":
        model = pytest.importorskip("timm").create_model(name, num_classes=5, drop_path_rate=0.1)
    else:
        model = pytest.importorskip("torchvision").models.get_model(name, num_classes=5)
    x = images(224)
    traced = trace(model, sample=x)
    assert len(traced.units) >= 8
    for training in (True, False):
        assert_same_bits(model, [point.name for point in traced.units[1:]], traced, x, training=training)
    tapped = with_taps(model, "", x)
    traced = trace(tapped, {"taps": True}, sample=x)
    assert_same_bits(tapped, list(even_cuts(traced, 4)), traced, x, {"taps": True}, training=False)
