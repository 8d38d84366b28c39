"""Factors, their autoencoder, and how the main phase loads it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, Needs, NetworkInfo
from drumline.distillation.methods.factor import (
    Factor,
    Paraphrase,
    Paraphraser,
    factor,
    factor_energy,
    paraphrase,
)

STUDENT = NetworkInfo("small", {"stage1": (3, 8, 8), "stage2": (5, 4, 4), "pooled": (5,)}, 10)
TEACHER = NetworkInfo(
    "large", {"stage1": (4, 6, 6), "stage2": (6, 4, 4), "stage3": (8, 3, 3), "pooled": (8,)}, 10
)
SHAPES = [(3, 4, 5, 5), (1, 1, 1, 1), (2, 7, 3, 2)]


def maps(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seen(helped: dict[str, Tensor]) -> LossInputs:
    count = len(next(iter(helped.values())))
    logits = torch.zeros(count, 10)
    return LossInputs(logits, logits, {}, {}, helped, torch.zeros(count).long(), torch.arange(count))


def both(count: int = 5) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {"stage2": maps((count, 5, 4, 4), 1, torch.float32)}, {
        "stage3": maps((count, 8, 3, 3), 2, torch.float32)
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_factor_equals_a_loop(shape: tuple[int, ...]) -> None:
    student, teacher = maps(shape, 1), maps(shape, 2)
    for found, mine, theirs in zip(factor(student, teacher), student, teacher, strict=True):
        s, t = mine.flatten().tolist(), theirs.flatten().tolist()
        long_s, long_t = math.sqrt(sum(x * x for x in s)), math.sqrt(sum(x * x for x in t))
        expected = sum(abs(x / long_s - y / long_t) for x, y in zip(s, t, strict=True)) / len(s)
        assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]])
def test_factor_has_the_gradient_of_small_differences(shape: tuple[int, ...]) -> None:
    teacher = maps(shape, 4)
    assert torch.autograd.gradcheck(lambda x: factor(x, teacher), maps(shape, 3).requires_grad_())


def test_only_directions_count() -> None:
    student, teacher = maps((3, 2, 4, 4), 5), maps((3, 2, 4, 4), 6)
    torch.testing.assert_close(factor(3 * student, teacher / 5), factor(student, teacher))
    assert (factor(-student, teacher) != factor(student, teacher)).all()


def test_equal_zero_and_tiny_factors_have_finite_small_gradients() -> None:
    teacher = maps((4, 2, 3, 3), 7, torch.float32)
    student = teacher.clone()
    student[1] = 0.0
    student[2] = 1e-30
    student.requires_grad_()
    found = factor(student, teacher)
    found.sum().backward()
    assert found[0] == 0
    assert found.isfinite().all()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert student.grad[1].abs().max() == 0
    assert factor(teacher, torch.zeros_like(teacher)).isfinite().all()


def test_paraphrase_is_a_mean_square_per_sample() -> None:
    found, target = maps((3, 2, 4, 4), 8), maps((3, 2, 4, 4), 9)
    expected = [nn.functional.mse_loss(a, b).item() for a, b in zip(found, target, strict=True)]
    assert paraphrase(found, target).tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: paraphrase(x, target), found.requires_grad_())


@pytest.mark.parametrize(("k", "width"), [(0.5, 4), (0.75, 6), (2.0, 16), (0.01, 1)])
def test_factors_have_k_channels_for_each_of_the_teachers(k: float, width: int) -> None:
    student, teacher = both()
    helped = Factor(k=k).helper(STUDENT, TEACHER)(student, teacher)
    assert helped["student"].shape == helped["teacher"].shape == (5, width, 3, 3)


def test_the_paraphraser_has_three_layers_each_way() -> None:
    made = Paraphraser(8, 4)
    convolutions = [m for m in made.encode if isinstance(m, nn.Conv2d)]
    transposed = [m for m in made.decode if isinstance(m, nn.ConvTranspose2d)]
    assert [(m.in_channels, m.out_channels) for m in convolutions] == [(8, 8), (8, 4), (4, 4)]
    assert [(m.in_channels, m.out_channels) for m in transposed] == [(4, 4), (4, 8), (8, 8)]
    for half in (made.encode, made.decode):
        assert [type(m) for m in half][1::3] == [nn.BatchNorm2d] * 3
        assert [m.negative_slope for m in half if isinstance(m, nn.LeakyReLU)] == [0.1] * 3


def test_the_initial_phase_learns_to_reconstruct_the_teachers_map() -> None:
    method = Paraphrase()
    assert method.needs(STUDENT, TEACHER) == Needs((), ("stage3",))
    torch.manual_seed(0)
    helper = method.helper(STUDENT, TEACHER)
    _, teacher = both(8)
    teacher = {"stage3": teacher["stage3"].relu()}
    helped = helper({}, teacher)
    torch.testing.assert_close(helped["target"], teacher["stage3"], rtol=0, atol=0)
    loss = method.loss(seen(helped))
    assert loss.shape == (8,)
    loss.mean().backward()
    for parameter in helper.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    optimizer = torch.optim.Adam(helper.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        last = method.loss(seen(helper({}, teacher))).mean()
        last.backward()
        optimizer.step()
    assert last < 0.3 * loss.mean()


def test_both_phases_pool_the_teacher_in_the_same_way() -> None:
    teacher = NetworkInfo("fine", {"stage1": (8, 8, 8)}, 10)
    tapped = {"stage1": maps((2, 8, 8, 8), 1, torch.float32)}
    pooled = tapped["stage1"].unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))
    rebuilt = Paraphrase().helper(STUDENT, teacher)({}, tapped)
    torch.testing.assert_close(rebuilt["target"], pooled)
    assert rebuilt["reconstruction"].shape == (2, 8, 4, 4)
    helper = Factor().helper(STUDENT, teacher)
    helped = helper({"stage2": maps((2, 5, 4, 4), 2, torch.float32)}, tapped)
    torch.testing.assert_close(helped["teacher"], helper.paraphraser.encode(pooled))


def test_repdistillers_variant_has_no_batchnorm_in_the_autoencoder_and_compares_mean_squares() -> None:
    student, teacher = both()
    first = Paraphrase(variant="repdistiller").helper(STUDENT, TEACHER)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in first.modules())
    assert first({}, teacher)["target"] is teacher["stage3"]
    method = Factor(variant="repdistiller")
    second = method.helper(STUDENT, TEACHER)
    second.load_state_dict(first.state_dict(), strict=False)
    helped = second(student, teacher)
    assert helped["student"].shape[2:] == (4, 4)
    assert helped["teacher"].shape[2:] == (3, 3)
    s, t = (nn.functional.adaptive_avg_pool2d(x, 3).square().mean(1).flatten(1) for x in helped.values())
    s, t = s / s.norm(dim=1, keepdim=True), t / t.norm(dim=1, keepdim=True)
    torch.testing.assert_close(method.loss(seen(helped)), (s - t).abs().mean(1))
    torch.testing.assert_close(factor_energy(helped["student"], helped["student"]), torch.zeros(5))


def test_the_main_phase_loads_the_weights_of_the_initial_phase_by_name() -> None:
    first, second = Paraphrase().helper(STUDENT, TEACHER), Factor().helper(STUDENT, TEACHER)
    theirs = {name for name in second.state_dict() if name.startswith("paraphraser.")}
    assert theirs == set(first.state_dict())
    assert Factor.initial_method() is Paraphrase
    assert (Factor.weights.b, Paraphrase.weights.b) == (500, 1)
    assert Factor.initial_epochs == 30
    missing, unexpected = second.load_state_dict(first.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("translator.") for name in missing)


def test_the_paraphraser_is_frozen_and_never_trains_while_the_translator_learns() -> None:
    method = Factor()
    assert method.needs(STUDENT, TEACHER) == Needs(("stage2",), ("stage3",))
    outer = nn.Sequential(method.helper(STUDENT, TEACHER))
    helper = outer[0]
    outer.train()
    assert helper.translator.training
    assert not any(module.training for module in helper.paraphraser.modules())
    before = {name: value.clone() for name, value in helper.paraphraser.state_dict().items()}
    student, teacher = both()
    student["stage2"].requires_grad_()
    loss = method.loss(seen(helper(student, teacher)))
    assert loss.shape == (5,)
    loss.mean().backward()
    assert student["stage2"].grad is not None
    for name, parameter in helper.named_parameters():
        if name.startswith("paraphraser."):
            assert not parameter.requires_grad
        else:
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
            assert parameter.grad.abs().sum() > 0
    after = helper.paraphraser.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_wrong_options_and_networks_without_stages_are_rejected() -> None:
    with pytest.raises(UserError, match="k = 0"):
        Factor(k=0)
    with pytest.raises(UserError, match="k = -1"):
        Paraphrase(k=-1)
    with pytest.raises(UserError, match="`stage1`, which bare does not have"):
        Factor().needs(STUDENT, NetworkInfo("bare", {"pooled": (3,)}, 10))
