"""mlkd and ctkd are the losses of their authors' code, written here once more, in float64 and by their gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, NetworkInfo, Taps
from drumline.distillation.methods.logits import kd
from drumline.distillation.methods.temperatures import Ctkd, Mlkd

SHAPES = [(2, 3), (5, 3), (6, 10), (9, 4)]


def logits(rows: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    student = 3 * torch.randn(rows, classes, generator=draw, dtype=torch.float64)
    teacher = 4 * torch.randn(rows, classes, generator=draw, dtype=torch.float64)
    return student.requires_grad_(), teacher


def seen(student: Tensor, teacher: Tensor, outputs: Taps | None = None, epoch: int = 0) -> LossInputs:
    labels, samples = torch.zeros(len(student), dtype=torch.int64), torch.arange(len(student))
    inputs = LossInputs(student, teacher, {}, {}, outputs or {}, labels, samples)
    return replace(inputs, epoch=torch.tensor(float(epoch), dtype=torch.float64))


# mlkd: the code of Jin et al., with a weak and a strong view.


def divergence(student: Tensor, teacher: Tensor, T: float) -> Tensor:
    powers_s, powers_t = (student / T).exp(), (teacher / T).exp()
    p_s, p_t = powers_s / powers_s.sum(1, keepdim=True), powers_t / powers_t.sum(1, keepdim=True)
    return (p_t * (p_t.log() - p_s.log())).sum() / len(student) * T * T


def between_samples(student: Tensor, teacher: Tensor, T: float) -> Tensor:
    p_s, p_t = (student / T).softmax(1), (teacher / T).softmax(1)
    pairs = [(i, j) for i in range(len(student)) for j in range(len(student))]
    gaps = [(p_t[i] * p_t[j]).sum() - (p_s[i] * p_s[j]).sum() for i, j in pairs]
    return torch.stack(gaps).pow(2).sum() / len(student)


def between_classes(student: Tensor, teacher: Tensor, T: float) -> Tensor:
    p_s, p_t = (student / T).softmax(1), (teacher / T).softmax(1)
    classes = range(student.shape[1])
    gaps = [(p_t[:, i] * p_t[:, j]).sum() - (p_s[:, i] * p_s[:, j]).sum() for i in classes for j in classes]
    return torch.stack(gaps).pow(2).sum() / student.shape[1]


def authors(weak: Tensor, strong: Tensor, taught_weak: Tensor, taught_strong: Tensor, T: float) -> Tensor:
    """All terms besides the cross-entropies, in the order of the authors' code, which uses the weak view for the last
    two temperatures of its strong part."""
    sure = taught_weak.softmax(1).numpy()
    confidence, per_class = sure.max(1), sure.sum(0)
    samples = torch.tensor(confidence <= np.percentile(confidence, 50))
    classes = torch.tensor(per_class <= np.percentile(per_class, 50))
    loss = torch.zeros((), dtype=torch.float64)
    for each in (T, 3.0, 5.0, 2.0, 6.0):
        loss = loss + (divergence(weak, taught_weak, each) * samples).mean()
    for each in (T, 3.0, 5.0):
        loss = loss + divergence(strong, taught_strong, each)
    for each in (2.0, 6.0):
        loss = loss + divergence(weak, taught_weak, each)
    for each in (T, 3.0, 5.0, 2.0, 6.0):
        loss = loss + (between_classes(weak, taught_weak, each) * classes).mean()
        loss = loss + (between_samples(weak, taught_weak, each) * samples).mean()
    return loss


@pytest.mark.parametrize("T", [4.0, 1.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_mlkd_is_the_authors_loss_with_one_view_as_both(shape: tuple[int, int], T: float) -> None:
    student, teacher = logits(*shape)
    found = Mlkd(T=T).loss(seen(student, teacher))
    (slope,) = torch.autograd.grad(found, student)
    expected = authors(student, student, teacher, teacher, T)
    (expected_slope,) = torch.autograd.grad(expected, student)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-10, atol=1e-12)


def test_the_masks_of_mlkd_count_ties_as_the_authors_do() -> None:
    """Equal rows have equal confidence: all are at most the median, so a mask is a whole instead of a half."""
    student, _ = logits(4, 3)
    teacher = torch.tensor([[2.0, 1.0, 0.0]] * 4, dtype=torch.float64)
    expected = authors(student, student, teacher, teacher, 4.0)
    assert Mlkd().loss(seen(student, teacher)).item() == pytest.approx(expected.item(), rel=1e-12)


def test_mlkd_of_equal_logits_is_zero_and_stays_finite_however_sure_a_network_is() -> None:
    _, teacher = logits(6, 5)
    assert Mlkd().loss(seen(teacher, teacher)).abs().item() < 1e-12
    sure = (1e4 * teacher.float()).requires_grad_()
    loss = Mlkd().loss(seen(sure, -1e4 * teacher.float()))
    (slope,) = torch.autograd.grad(loss, sure)
    assert loss.isfinite()
    assert slope.isfinite().all()


# ctkd: the code of Li et al., with the global temperature.


def temperature(p: Tensor | float) -> float:
    return 1 + 20 / (1 + math.exp(-float(p)))


@pytest.mark.parametrize(
    ("epoch", "strength"),
    [(0, (1 - math.cos(math.pi / 10)) / 2), (4, 0.5), (9, 1.0), (10, 1.0), (239, 1.0)],
)
def test_ctkd_is_kd_at_its_temperature_and_reverses_the_gradient_of_it(epoch: int, strength: float) -> None:
    method = Ctkd()
    student, teacher = logits(6, 10)
    helper = method.helper(info(10), info(10)).double()
    (p,) = helper.parameters()
    with torch.no_grad():
        p.fill_(0.3)
    losses = method.loss(seen(student, teacher, helper({}, {}), epoch))
    slope, found = torch.autograd.grad(losses.sum(), [student, p])

    def by_hand(p: float) -> Tensor:
        T = temperature(p)
        log_s, p_t = (student / T).log_softmax(1), (teacher / T).softmax(1)
        return (p_t * (p_t.log() - log_s)).sum() * T * T

    expected = by_hand(0.3)
    assert losses.shape == (6,)
    assert losses.sum().item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(slope, torch.autograd.grad(expected, student)[0], rtol=1e-10, atol=1e-12)
    rise = (by_hand(0.3 + 1e-5) - by_hand(0.3 - 1e-5)).item() / 2e-5
    assert abs(rise) > 1
    assert found.item() == pytest.approx(-strength * rise, rel=1e-6)


def test_ctkd_starts_at_the_temperature_of_its_authors_and_can_be_bounded() -> None:
    (output,) = Ctkd().helper(info(3), info(3))({}, {}).values()
    assert output.tolist() == pytest.approx([1 + 20 * 0.7310585786300049])
    (output,) = Ctkd(t_start=2.0, t_end=0.0).helper(info(3), info(3))({}, {}).values()
    assert output.tolist() == [2.0]


def test_a_descent_on_the_loss_of_ctkd_raises_the_loss_by_the_temperature() -> None:
    student, teacher = logits(6, 10)
    method, outputs = Ctkd(loops=1.0), {}
    helper = method.helper(info(10), info(10)).double()
    (p,) = helper.parameters()
    losses = []
    for _ in range(30):
        outputs = helper({}, {})
        loss = method.loss(seen(student.detach(), teacher, outputs)).mean()
        losses.append(loss.item())
        (slope,) = torch.autograd.grad(loss, p)
        with torch.no_grad():
            p -= 0.01 * slope
    assert losses[-1] > losses[0]
    assert losses == sorted(losses)


def info(classes: int) -> NetworkInfo:
    return NetworkInfo("net", {}, classes)


def test_both_reject_other_classes_and_wrong_numbers() -> None:
    for method in (Mlkd(), Ctkd()):
        with pytest.raises(UserError, match="compares logits"):
            method.needs(info(3), info(4))
    for wrong in ({"t_start": 0.0}, {"t_end": -1.0}, {"loops": 0.0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            Ctkd(**wrong)
    with pytest.raises(UserError, match="T = 0"):
        Mlkd(T=0.0)


def test_the_temperature_of_ctkd_reaches_kd_as_a_number_would() -> None:
    student, teacher = logits(4, 5)
    outputs = {"T": torch.tensor([3.0], dtype=torch.float64)}
    assert torch.equal(Ctkd().loss(seen(student, teacher, outputs)), kd(student, teacher, 3.0))
