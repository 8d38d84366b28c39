"""Planted mistakes in four families are named in a sentence, and equal networks are recognised under other names."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from drumline.comparison import measure as measuring
from drumline.comparison.describe import Verdict, judge, verdict_lines
from drumline.comparison.measure import Measured, Side, measure
from drumline.comparison.table import table_lines, totals_lines
from drumline.models import create_model
from tests.comparison.networks import Build, Mobile, Plain, Residual, TheirVision, Vision


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    monkeypatch.setattr(measuring, "LAYER_ROUNDS", 1)


def compared(a: Build, b: Build, size: int = 32, trained: bool = False) -> tuple[Measured, Verdict]:
    torch.manual_seed(0)
    sides = Side("A", a(), trained), Side("B", b(), trained)
    measured = measure(*sides, torch.randn(2, 3, size, size))
    return measured, judge(measured)


def special(number: int, **how: Any) -> dict[str, Any]:
    return {"special": {number: how}}


PLANTED: list[tuple[Build, dict[str, Any], str, str]] = [
    (Residual, {"pool": False}, "max-pool", "B has no max-pool 3×3, stride 2 after entry.2"),
    (Residual, {"stem_stride": 1}, "stride", "convolution stride is 2 in A and 1 in B (entry.0)"),
    (Residual, {"early_stride": True}, "stride",
     "stride 2 is in a different layer: in units.2.work.0 (3×3) in A, in units.2.squeeze.0 (1×1) in B"),
    (Residual, special(1, no_inner_act=True), "relu", "B has no ReLU after units.1.work.1"),
    (Residual, {"no_inner_act": True}, "relu", "B has no ReLU in 6 places: after units.0.work.1, units.1.work.1"),
    (Residual, {"bias": True}, "bias",
     "convolution has a bias in B and none in A, although the BatchNorm after it cancels it (all 22"),
    (Residual, {"eps": 1e-3}, "eps", "BatchNorm eps is 1e-05 in A and 0.001 in B (all 22 of them)"),
    (Residual, {"momentum": 0.01}, "momentum", "BatchNorm momentum is 0.1 in A and 0.01 in B (all 22 of them)"),
    (Residual, {"act": nn.GELU}, "replaced", "B has GELU where A has ReLU (all 19 of them)"),
    (Residual, {"drop": 0.1}, "dropout", "B has an extra dropout 0.1 in 6 places: after units.0.expand.1"),
    (Residual, {"width": 16}, "width", "B is 2× as wide in 22 layers: 8 → 16 in entry.0"),
    (Residual, {"depths": (2, 3, 2)}, "block", "B also has the block units.4 (10 layers, 4,544 parameters)"),
    (Residual, special(3, no_skip=True), "residual", "B has no residual connection in units.3"),
    (Residual, special(2, no_skip=True), "residual",
     "B has no residual connection (with its convolution 1×1, 32→64, stride 2 and BatchNorm) in units.2"),
    (Residual, special(3, skip_of_itself=True), "wiring",
     "the addition in units.3 has different inputs: units.2.act and units.3.expand.1 in A, units.3.expand.1 in B"),
    (Residual, special(3, late_skip=True), "moved", "ReLU is after the addition in units.3 in A, but after "),
    (Residual, special(3, scale=0.5), "multiplication", "B has an extra multiplication by 0.5 after units.3."),
    (Residual, special(3, detach=True), "detach", "detach after units.2.act, so no gradient flows through it"),
    (Residual, special(3, dilation=2), "padding", "dilation is 1 in A and 2 in B (units.3.work.0)"),
    (Residual, special(3, groups=2), "groups", "convolution groups is 1 in A and 2 in B (units.3.work.0)"),
    (Residual, {"head": "max"}, "replaced", "B has global max-pool where A has global average pool"),
    (Residual, {"num_classes": 7}, "head", "the classifier has 7 outputs in B and 10 in A (answer)"),
    (Residual, {"stem": 3}, "kernel", "convolution kernel is 7×7 in A and 3×3 in B, padding is 3 in A and 1 in B"),
    (Plain, {"norm": False}, "norm", "B has no BatchNorm in 3 places: after features.0"),
    (Plain, {"drop": 0.1}, "rate", "dropout rate is 0.5 in A and 0.1 in B (top.2)"),
    (Plain, {"acts": (True, False, True)}, "relu", "B has no ReLU after features.5"),
    (Plain, {"widths": (8, 12, 16)}, "width", "B is 0.75× as wide in 1 layer: 16 → 12 in features.4"),
    (Plain, {"average": True}, "replaced", "B has average pool where A has max-pool (all 3 of them)"),
    (Plain, {"extra": True}, "convolution", "B has an extra convolution 3×3, 16→16 and ReLU after features.6"),
    (Plain, {"shared": True}, "sharing", "top.0 and top.3 have separate weights in A, and share them in B"),
    (Plain, {"padding_mode": "reflect"}, "padding", "B has an extra padding (reflect) in 3 places"),
    (Mobile, {"depthwise": False}, "groups", "convolution groups is one for each channel in A and 1 in B"),
    (Mobile, {"linear": False}, "relu6", "B has an extra ReLU6 in 5 places: after rows.0.down_norm"),
    (Mobile, {"stem_stride": 1}, "stride", "convolution stride is 2 in A and 1 in B (stem)"),
    (Vision, {"heads": 2}, "heads", "attention heads is 4 in A and 2 in B (all 3 of them)"),
    (Vision, {"pool": "mean"}, "mean", "B has an extra mean after norm"),
    (Vision, {"position": False}, "addition", "B has no addition of the parameter position after the concatenation"),
    (Vision, {"eps": 1e-5}, "eps", "LayerNorm eps is 1e-06 in A and 1e-05 in B (all 7 of them)"),
    (Vision, {"gelu": "tanh"}, "approximate", "GELU approximate is none in A and tanh in B"),
    (Vision, special(1, no_mlp_skip=True), "residual", "B has no residual connection in body.1"),
    (Vision, {"drop_path": 0.1}, "stochastic-depth", "B has an extra stochastic depth 0.1 in 6 places"),
    (Vision, {"depth": 4}, "block", "B also has the block body.3 (10 layers, 3,280 parameters)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "mistake", "code", "sentence"), PLANTED, ids=[f"{f.__name__}-{m}" for f, m, *_ in PLANTED]
)
def test_a_planted_mistake_is_named_in_the_first_sentence(
    family: Build, mistake: dict[str, Any], code: str, sentence: str
) -> None:
    _, verdict = compared(family, partial(family, **mistake))
    assert not verdict.equal
    assert verdict.findings[0].code == code
    assert sentence in verdict.sentence


def test_a_mistake_is_named_the_other_way_round_too() -> None:
    _, verdict = compared(partial(Residual, pool=False), Residual)
    assert verdict.sentence.startswith("B has an extra max-pool 3×3, stride 2")


def test_a_norm_that_gave_way_to_a_bias_is_one_finding() -> None:
    _, verdict = compared(partial(Plain, bias=False), partial(Plain, norm=False))
    assert [each.code for each in verdict.findings] == ["norm"]
    assert "its convolution has a bias instead" in verdict.sentence


def test_several_mistakes_are_all_named() -> None:
    _, verdict = compared(Residual, partial(Residual, pool=False, eps=1e-3, **special(3, no_skip=True)))
    assert {each.code for each in verdict.findings} == {"max-pool", "residual", "eps"}


EQUAL: list[tuple[Build, Build, str]] = [
    (partial(create_model, "resnet50", classes=10),
     partial(Residual, depths=(3, 4, 6, 3), width=64), "23,528,522 parameters in the same order"),
    (Plain, partial(Plain, in_place=True), "names are the same"),
    (Vision, TheirVision, "names differ"),
    (Vision, partial(Vision, by_hand=True), "13,418 parameters"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "sentence"), EQUAL, ids=["resnet50", "in-place", "attention", "by-hand"])
def test_equal_networks_are_recognised_whatever_their_names(a: Build, b: Build, sentence: str) -> None:
    measured, verdict = compared(a, b)
    assert verdict.equal, verdict.sentence
    assert verdict.sentence.startswith("the same network: ")
    assert sentence in verdict.sentence
    assert measured.values.output < 1e-9
    assert measured.totals[0].parameters == measured.totals[1].parameters


def test_what_has_no_effect_on_the_values_is_a_note() -> None:
    _, verdict = compared(Vision, partial(Vision, by_hand=True))
    assert any("without effect on the values: B has matrix product" in note for note in verdict.notes)
    _, verdict = compared(Plain, partial(Plain, in_place=True))
    assert "in place in B only: 3 layers (ReLU)" in verdict.notes


def test_the_missing_max_pool_of_resnet50_and_its_costs() -> None:
    ours = partial(create_model, "resnet50", classes=10)
    measured, verdict = compared(ours, partial(Residual, depths=(3, 4, 6, 3), width=64, pool=False))
    assert verdict.sentence.startswith(
        "B has no max-pool 3×3, stride 2 after the stem: activations of stages 1–4 are 4× larger, FLOPs 3."
    )
    one, other = measured.totals
    assert one.parameters == other.parameters
    assert 3 < other.kept_bytes / one.kept_bytes < 4.1
    assert "no difference in the shapes of all parameters, kernels, strides and padding" in verdict.notes[-1]


class Shuffled(nn.Module):
    """Equal layers, but the channels change places between them."""

    def __init__(self, shuffle: bool = False, classes: int = 10) -> None:
        super().__init__()
        self.shuffle = shuffle
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.out = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        if self.shuffle:
            x = x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)
        return self.out(self.two(x).relu().mean((2, 3)))


def test_equal_layers_with_other_values_name_the_first_layer_that_differs() -> None:
    measured, verdict = compared(Shuffled, partial(Shuffled, True))
    assert verdict.sentence.startswith(
        "the layers are the same, but with equal weights the values first differ at the convolution in two"
    )
    assert table_lines(measured, verdict.findings, 80)


def test_trained_weights_are_compared_and_not_overwritten() -> None:
    _, verdict = compared(Plain, Plain, trained=True)
    assert not verdict.equal
    assert [each.code for each in verdict.findings] == ["weights"]
    first = Plain()
    _, verdict = compared(lambda: first, lambda: first, trained=True)
    assert verdict.equal


def test_weights_that_one_side_has_learnt_are_not_called_initial() -> None:
    torch.manual_seed(0)
    learnt = Plain()
    with torch.no_grad():
        for each in learnt.parameters():
            each.mul_(3).add_(1)
    images = torch.randn(2, 3, 32, 32)
    both = [
        judge(measure(Side("A", learnt, trained), Side("B", Plain()), images)) for trained in (False, True)
    ]
    assert [any("initial weights" in note for note in each.notes) for each in both] == [True, False]


def switched_off(**how: Any) -> nn.Module:
    """A network whose residual branches begin at zero."""
    model = Residual(**how)
    for unit in model.units:
        nn.init.zeros_(unit.expand[1].weight)  # type: ignore[index, union-attr, arg-type]
    return model


def test_a_branch_that_starts_at_zero_does_not_hide_a_mistake() -> None:
    _, verdict = compared(switched_off, partial(switched_off, **special(1, no_inner_act=True)))
    assert verdict.sentence.startswith("B has no ReLU after units.1.work.1")


class Pointwise(Plain):
    """Its last layer is a 1 x 1 convolution instead of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.top[-1] = nn.Conv2d(256, 10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.top[:-1](self.features(x).flatten(1))
        return self.top[-1](hidden[:, :, None, None]).flatten(1)  # type: ignore[no-any-return]


def test_a_pointwise_convolution_may_stand_for_a_linear_layer() -> None:
    _, verdict = compared(Plain, Pointwise)
    assert verdict.equal, verdict.sentence
    assert any("convolution 1×1, 256→10 where A has linear, 256→10" in note for note in verdict.notes)


class Frozen(Plain):
    """One layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.top[0].requires_grad_(False)


class Doubled(Plain):
    """Does something else in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.training else 2)


def test_what_only_gradients_or_only_evaluation_show_is_found() -> None:
    assert [each.code for each in compared(Plain, Frozen)[1].findings] == ["gradients"]
    assert [each.code for each in compared(Plain, Doubled)[1].findings] == ["evaluation"]


class Dictionary(Plain):
    """Returns a dictionary, as many libraries do."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"logits": super().forward(x)}


def test_a_model_may_return_a_dictionary() -> None:
    assert compared(Plain, Dictionary)[1].equal


def test_random_masks_of_different_rates_are_one_finding() -> None:
    rates = {n: {"drop_path": 0.1 * n} for n in (1, 2)}
    _, verdict = compared(Vision, partial(Vision, special=rates))
    assert len(verdict.findings) == 1
    assert (
        "the outputs and gradients are equal, but B has an extra stochastic depth 0.1 to 0.2"
        in verdict.sentence
    )


def test_models_are_left_as_they_were() -> None:
    model = Residual().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(Side("A", model), Side("B", Residual(eps=1e-3)), torch.randn(2, 3, 32, 32))
    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("width", [80, 100, 120])
def test_every_line_fits_the_terminal(width: int) -> None:
    measured, verdict = compared(Residual, partial(Residual, pool=False, eps=1e-3))
    lines = [*verdict_lines(verdict, width), *totals_lines(measured)]
    for every in (False, True):
        lines += table_lines(measured, verdict.findings, width, every)
    assert max(map(len, lines)) <= width
    assert sum("entry.0" in line for line in lines) >= 1


def test_the_table_shows_the_differing_region_and_counts_the_rest() -> None:
    measured, verdict = compared(Residual, partial(Residual, pool=False))
    lines = table_lines(measured, verdict.findings, 100)
    assert sum(line.startswith("- ") for line in lines) == 1
    assert len(lines) < 9
    assert any("layers" in line and "..." in line for line in lines)


def test_timm_has_the_same_resnet50() -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    _, verdict = compared(partial(create_model, "resnet50"), partial(create_model, "timm/resnet50"))
    assert verdict.equal
    assert any("initial weights are drawn differently: layer1.0.bn3.weight" in note for note in verdict.notes)


class Dropping(nn.Module):
    """Dropout in one of several places."""

    def __init__(self, drop: str = "behind", kind: type[nn.Module] = nn.Dropout) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.dropout, self.drop, self.out = kind(0.3), drop, nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = self.dropout(x.relu()) if self.drop == "behind" else x.relu()
        y = self.two(x)
        y = self.dropout(y) if self.drop == "branch" else y
        y = (self.dropout(x) if self.drop == "skip" else x) + y
        y = y.relu()
        if self.drop == "between":  # a second ReLU changes nothing
            y = self.dropout(y).relu()
        y = y.mean((2, 3))
        return self.out(self.dropout(y) if self.drop == "pooled" else y)


PLACES = ("behind", "branch", "skip", "between", "pooled", "none")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("other", PLACES)
def test_networks_that_differ_in_dropout_are_not_equal_although_their_values_are(
    place: str, other: str
) -> None:
    _, verdict = compared(partial(Dropping, place), partial(Dropping, other))
    assert verdict.equal is (place == other), verdict.sentence
    assert place == other or "dropout" in verdict.sentence


def test_dropping_whole_channels_is_not_dropping_values() -> None:
    _, verdict = compared(Dropping, partial(Dropping, kind=nn.Dropout2d))
    assert not verdict.equal
    assert "dropout2d in B" in verdict.sentence


class Single(nn.Module):
    """Computes in fp32 whatever it is given."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.inner = Vision(**how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(x.float())
        return logits


@pytest.mark.parametrize("mistake", [{"eps": 1e-5}, {"gelu": "tanh"}])
def test_a_difference_below_the_tolerance_is_a_difference(mistake: dict[str, Any]) -> None:
    measured, verdict = compared(Single, partial(Single, **mistake))
    assert measured.values.tolerance == measuring.SINGLE_TOLERANCE
    assert not verdict.equal
    assert next(iter(mistake)).replace("gelu", "approximate") in verdict.sentence


def test_values_that_are_not_finite_on_one_side_are_not_equal() -> None:
    one, huge = torch.ones(2), torch.tensor([1.0, float("inf")])
    assert measuring.relative(one, huge) == measuring.relative(huge, one) == float("inf")
    assert measuring.relative(huge, huge) == 0.0
    assert measuring.relative(one, torch.tensor([1.0, float("nan")])) == float("inf")
