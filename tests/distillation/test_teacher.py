"""Teachers stay as they were loaded, return ordinary tensors, and are averaged by their rule."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.config.recipe import Distill
from drumline.core.errors import UserError
from drumline.core.precision import BF16, FP32, Precision
from drumline.distillation.cache.teacher import identify_teacher, weights_sha256
from drumline.distillation.teacher import EnsembleRule, LoadedTeacher, Teacher, ensemble
from drumline.models import create_model
from drumline.models.tapped import Tapped
from drumline.parallel.world import single_process
from tests.distillation.nets import wakened

CPU = torch.device("cpu")
CLASSES = 10


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def network(seed: int = 0, name: str = "resnet8") -> nn.Module:
    torch.manual_seed(seed)
    return wakened(create_model(name, classes=CLASSES), seed + 3)


def teacher(**options: object) -> Teacher:
    return Teacher([network()], CPU, **options)  # type: ignore[arg-type]


# What `check` rejects.


def in_training(module: nn.Module) -> None:
    module.get_submodule("layer2.0.bn1").train()


def taking_gradients(module: nn.Module) -> None:
    module.get_parameter("layer1.0.conv1.weight").requires_grad_()


def holding_a_gradient(module: nn.Module) -> None:
    weight = module.get_parameter("layer1.0.conv1.weight")
    weight.grad = torch.zeros_like(weight)


def on_another_device(module: nn.Module) -> None:
    module.get_submodule("fc").to("meta")


def with_another_statistic(module: nn.Module) -> None:
    mean = module.get_buffer("bn1.running_mean")
    mean[5] = torch.nextafter(mean[5], torch.tensor(9.0))


def with_another_weight(module: nn.Module) -> None:
    with torch.no_grad():
        weight = module.get_parameter("fc.weight")
        weight[1, 2] = torch.nextafter(weight[1, 2], torch.tensor(9.0))


def with_weights_swapped(module: nn.Module) -> None:
    with torch.no_grad():
        bias = module.get_parameter("fc.bias")
        bias.copy_(bias.flip(0))


WRONG: dict[Callable[[nn.Module], None], tuple[str, str]] = {
    in_training: ("layer2.0.bn1 is in training mode", "eval()"),
    taking_gradients: ("layer1.0.conv1.weight requires gradients", "requires_grad_(False)"),
    holding_a_gradient: ("layer1.0.conv1.weight requires gradients", "requires_grad_(False)"),
    on_another_device: ("fc.weight is on meta, but its process computes on cpu", "device of its process"),
    with_another_statistic: ("weights or statistics have changed", "find the code"),
    with_another_weight: ("weights or statistics have changed", "find the code"),
    with_weights_swapped: ("weights or statistics have changed", "find the code"),
}


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("place", [0, 1])
def test_a_teacher_that_has_changed_since_loading_is_rejected(
    spoil: Callable[[nn.Module], None], place: int
) -> None:
    found = Teacher([network(0), network(1)], CPU, shares=(1.0, 1.0))
    found.check()
    spoil(found.modules[place])
    with pytest.raises(UserError) as caught:
        found.check()
    what, fix = WRONG[spoil]
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_teacher_is_frozen_whatever_its_state_before() -> None:
    module = network().train()
    found = Teacher([module], CPU)
    assert not any(part.training for part in module.modules())
    assert not any(parameter.requires_grad for parameter in module.parameters())
    found.check()


@pytest.mark.parametrize("precision", [FP32, BF16])
def test_calls_do_not_change_the_teacher(precision: Precision) -> None:
    found = teacher(precision=precision, taps=[("stage1", "pooled")])
    before = {name: tensor.clone() for name, tensor in found.modules[0].state_dict().items()}
    output = found(images())
    assert torch.equal(found(images()).logits, output.logits)
    found.check()
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.modules[0].state_dict().items())


# Its outputs.


def test_a_single_teacher_returns_the_outputs_of_its_network() -> None:
    module = network()
    expected, expected_taps = module(images(), taps=True)
    output = Teacher([module], CPU, taps=[("stage2.pre", "pooled")])(images())
    assert torch.equal(output.logits, expected)
    assert list(output.taps) == ["stage2.pre", "pooled"]
    assert all(torch.equal(tap, expected_taps[name]) for name, tap in output.taps.items())
    assert Teacher([module], CPU)(images()).taps == {}


@pytest.mark.parametrize("count", [1, 2])
def test_teacher_outputs_can_be_saved_for_the_students_backward(count: int) -> None:
    taps = [("stage1",)] * count
    modules = [network(seed) for seed in range(count)]
    output = Teacher(modules, CPU, taps=taps, shares=(1.0,) * count)(images())
    for tensor in (output.logits, *output.taps.values()):
        assert not tensor.is_inference()
        assert not tensor.requires_grad
        student = torch.randn(tensor.shape, requires_grad=True)
        (student * tensor).sum().backward()
        torch.testing.assert_close(student.grad, tensor)
        tensor.mul_(2)


class Keeping(nn.Module):
    """A network that hands out memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("map", torch.ones(2, 4))

    def forward(self, x: Tensor, taps: bool = False) -> object:
        return (self.map, {"pooled": self.map}) if taps else self.map


@pytest.mark.parametrize("taps", [(), ("pooled",)])
def test_features_are_copies(taps: tuple[str, ...]) -> None:
    found = Teacher([Keeping()], CPU, taps=[taps])
    output = found(torch.empty(0))
    for tensor in (output.logits, *output.taps.values()):
        tensor.fill_(7)
    found.check()
    assert torch.equal(found(torch.empty(0)).logits, torch.ones(2, 4))


@pytest.mark.parametrize("name", ["resnet8", "wrn_16_1", "vgg8"])
def test_a_16_bit_teacher_has_the_bits_of_autocast(name: str) -> None:
    module = network(name=name)
    whole = copy.deepcopy(module)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected, expected_taps = whole(images(), taps=True)
    output = Teacher([module], CPU, taps=[("stage1", "pooled")], precision=BF16)(images())
    assert output.logits.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(output.logits, expected)
    assert all(torch.equal(tap, expected_taps[key]) for key, tap in output.taps.items())
    assert not torch.equal(output.logits.float(), whole(images()))
    kinds = {type(part): part.weight.dtype for part in module.modules() if hasattr(part, "weight")}
    assert kinds[nn.BatchNorm2d] == torch.float32
    assert kinds[nn.Conv2d] == kinds[nn.Linear] == torch.bfloat16


# Ensembles.


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows - rows.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


@pytest.mark.parametrize("T", [1.0, 2.0, 4.0, 10.0])
@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0, 0.5), (0.2, 0.3, 0.1, 0.4)])
def test_averaged_probabilities_at_T_are_the_mean_of_softened_probabilities(
    shares: tuple[float, ...], T: float
) -> None:
    drawn = np.random.default_rng(4)
    logits = [drawn.normal(0, 5, (6, 7)).astype(np.float32) for _ in shares]
    made = ensemble([torch.from_numpy(z) for z in logits], shares, "probabilities", T)
    assert made.dtype == torch.float32
    parts = [w / sum(shares) * softmax(z.astype(np.float64) / T) for w, z in zip(shares, logits, strict=True)]
    found = softmax(made.numpy().astype(np.float64) / T)
    np.testing.assert_allclose(found, sum(parts), rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0, 0.5)])
def test_averaged_logits_are_the_weighted_mean(shares: tuple[float, ...]) -> None:
    drawn = np.random.default_rng(5)
    logits = [drawn.normal(0, 5, (6, 7)).astype(np.float32) for _ in shares]
    made = ensemble([torch.from_numpy(z) for z in logits], shares, "logits", 4.0)
    expected = sum(w / sum(shares) * z.astype(np.float64) for w, z in zip(shares, logits, strict=True))
    np.testing.assert_allclose(made.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_averaging_probabilities_differs_from_averaging_logits() -> None:
    logits = [torch.tensor([[8.0, 0.0]]), torch.tensor([[0.0, 2.0]])]
    probabilities, means = (ensemble(logits, (1, 1), rule, 1.0) for rule in ("probabilities", "logits"))
    assert means.tolist() == [[4.0, 1.0]]
    p = (F.softmax(logits[0].double(), 1) + F.softmax(logits[1].double(), 1)) / 2
    torch.testing.assert_close(F.softmax(probabilities.double(), 1), p, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", ["probabilities", "logits"])
def test_an_ensemble_of_equal_teachers_equals_one_of_them(rule: EnsembleRule) -> None:
    logits = 6 * torch.randn(5, 9)
    made = ensemble([logits] * 3, (1.0, 2.0, 5.0), rule, 4.0)
    torch.testing.assert_close(F.softmax(made / 4, 1), F.softmax(logits / 4, 1))


@pytest.mark.parametrize("rule", ["probabilities", "logits"])
def test_confident_teachers_that_disagree_give_finite_outputs(rule: EnsembleRule) -> None:
    logits = [torch.tensor([[1e4, -1e4, 0.0]]), torch.tensor([[-1e4, 1e4, 0.0]])]
    assert ensemble(logits, (1.0, 1.0), rule, 1.0).isfinite().all()
    assert ensemble([each.bfloat16() for each in logits], (1.0, 1.0), rule, 1.0).dtype == torch.float32


@pytest.mark.parametrize("rule", ["probabilities", "logits"])
def test_an_ensemble_calls_its_teachers_and_averages_by_the_rule(rule: EnsembleRule) -> None:
    modules = [network(seed) for seed in range(2)]
    each = [module(images()).detach().double().numpy() for module in modules]
    output = (
        Teacher(modules, CPU, rule=rule, shares=(1.0, 3.0), temperature=2.0)(images()).logits.double().numpy()
    )
    if rule == "logits":
        np.testing.assert_allclose(output, 0.25 * each[0] + 0.75 * each[1], rtol=1e-4, atol=1e-5)
    else:
        expected = 0.25 * softmax(each[0] / 2) + 0.75 * softmax(each[1] / 2)
        np.testing.assert_allclose(softmax(output / 2), expected, rtol=1e-4)


def test_the_key_of_a_cache_does_not_depend_on_the_taps_of_a_teacher() -> None:
    model = network()
    tapped = Tapped(model, {"stem": "conv1"}, images(1))
    one, other = (
        identify_teacher(Distill(), [LoadedTeacher("net", "w", module)], FP32, 1.0)
        for module in (model, tapped)
    )
    assert one.present == other.present == one.former != other.former


def test_the_key_of_a_cache_depends_on_every_byte_of_the_teacher() -> None:
    whole = weights_sha256([network()])
    assert weights_sha256([network()]) == whole
    for spoil in (with_another_statistic, with_another_weight, with_weights_swapped):
        module = network()
        spoil(module)
        assert weights_sha256([module]) != whole
    assert weights_sha256([network(0), network(1)]) != weights_sha256([network(1), network(0)])


class Pair:
    """A world of two in which the other rank holds a different teacher."""

    size = 2

    def all_gather_integers(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, values + (torch.arange(len(values)) == 3)])


def test_ranks_with_different_teachers_are_rejected() -> None:
    teacher = Teacher([wakened(create_model("resnet8", classes=10))], torch.device("cpu"))
    teacher.check_ranks(single_process(torch.device("cpu")))
    with pytest.raises(UserError, match=r"distill.teacher_weights: rank\(s\) \[1\] have a different teacher"):
        teacher.check_ranks(Pair())  # type: ignore[arg-type]


def test_a_layer_that_computes_its_weights_is_left_to_autocast() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._conv_forward(x, self.weight / self.weight.std(), None)

    model = nn.Sequential(Standardised(3, 4, 1, bias=False), nn.Conv2d(4, 5, 1))
    Teacher([model], torch.device("cpu"), precision=BF16)
    assert [part.weight.dtype for part in model] == [torch.float32, torch.bfloat16]


def test_a_changed_buffer_outside_the_state_dict_is_detected() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    model.register_buffer("table", torch.arange(4.0), persistent=False)
    teacher = Teacher([model], torch.device("cpu"))
    teacher.check()
    model.get_buffer("table")[2] += 1
    with pytest.raises(UserError, match="have changed"):
        teacher.check()
