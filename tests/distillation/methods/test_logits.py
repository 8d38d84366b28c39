"""kd, dkd and dist are their formulas, stay finite however sure a network is, and keep what others have dropped."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, Method, Needs, NetworkInfo
from drumline.distillation.methods.logits import Dist, Dkd, Kd, dist, dkd, kd, standardised

SHAPES = [(1, 2), (5, 3), (7, 20)]


def logits(
    rows: int, classes: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    student = 3 * torch.randn(rows, classes, generator=draw, dtype=torch.float64)
    teacher = 4 * torch.randn(rows, classes, generator=draw, dtype=torch.float64)
    return student.to(dtype).requires_grad_(), teacher.to(dtype)


def labels(rows: int, classes: int) -> Tensor:
    return (torch.arange(rows) * 7 + 1) % classes


def probabilities(row: Tensor, temperature: float) -> list[float]:
    powers = [math.exp(float(z) / temperature) for z in row.detach()]
    return [power / sum(powers) for power in powers]


def divergence(t: list[float], s: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(t, s, strict=True))


def seen(student: Tensor, teacher: Tensor) -> LossInputs:
    return LossInputs(student, teacher, {}, {}, {}, labels(*student.shape), torch.arange(len(student)))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_kd_is_the_divergence_of_softened_rows_times_t_squared(
    shape: tuple[int, int], temperature: float
) -> None:
    student, teacher = logits(*shape)
    expected = [
        temperature**2 * divergence(probabilities(t, temperature), probabilities(s, temperature))
        for s, t in zip(student, teacher, strict=True)
    ]
    assert kd(student, teacher, temperature).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("method", ["kd", "dkd"])
def test_the_gradient_keeps_its_size_at_high_temperatures(method: str) -> None:
    """T² at work: without it the second gradient would be a 10 000th of the first."""
    sizes = []
    for temperature in (50.0, 5000.0):
        student, teacher = logits(4, 6)
        if method == "kd":
            loss = kd(student, teacher, temperature)
        else:
            loss = dkd(student, teacher, labels(4, 6), temperature, 1.0, 1.0)
        loss.sum().backward()
        sizes.append(float(student.grad.norm()))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_dkd_compares_the_label_with_the_rest_and_the_rest_among_themselves(
    shape: tuple[int, int], temperature: float
) -> None:
    student, teacher = logits(*shape)
    expected = []
    for s, t, label in zip(student, teacher, labels(*shape).tolist(), strict=True):
        p_s, p_t = probabilities(s, temperature), probabilities(t, temperature)
        y_s, y_t = p_s.pop(label), p_t.pop(label)
        tckd = divergence([y_t, 1 - y_t], [y_s, 1 - y_s])
        nckd = divergence([p / sum(p_t) for p in p_t], [p / sum(p_s) for p in p_s])
        expected.append(temperature**2 * (1.5 * tckd + 8 * nckd))
    actual = dkd(student, teacher, labels(*shape), temperature, 1.5, 8.0)
    assert actual.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_parts_of_dkd_add_up_to_kd(temperature: float) -> None:
    student, teacher = logits(9, 12)
    own = labels(9, 12)
    tckd = dkd(student, teacher, own, temperature, 1.0, 0.0)
    nckd = dkd(student, teacher, own, temperature, 0.0, 1.0)
    rest = 1 - (teacher / temperature).softmax(1)[torch.arange(9), own]
    torch.testing.assert_close(tckd + rest * nckd, kd(student, teacher, temperature))


def test_nckd_of_a_single_other_class_is_zero() -> None:
    student, teacher = logits(4, 2)
    assert dkd(student, teacher, labels(4, 2), 4.0, 0.0, 1.0).abs().max() < 1e-12


def sureness(row: Tensor) -> tuple[float, float, float]:
    """1 − p, log p and log(1 − p) of class 0, each without a difference from one."""
    odds = sum(math.exp(float(z - row[0])) for z in row[1:])
    return odds / (1 + odds), -math.log1p(odds), math.log(odds) - math.log1p(odds)


@pytest.mark.parametrize(("sure", "own_sure"), [(69.0, 60.0), (40.0, 60.0), (20.0, 25.0), (69.0, -40.0)])
def test_dkd_in_fp32_resolves_a_rest_of_1e_minus_30(sure: float, own_sure: float) -> None:
    """The teacher is sure of class 0, and what it thinks of the others lies at e^-20 to e^-69."""
    teacher = torch.tensor([[sure, 0.0, -1.0, -3.0]])
    student = torch.tensor([[own_sure, 0.0, 1.0, -3.0]], requires_grad=True)
    own = torch.zeros(1, dtype=torch.int64)
    rest, log_t, log_rest_t = sureness(teacher[0])
    _, log_s, log_rest_s = sureness(student.detach()[0])
    tckd = dkd(student, teacher, own, 1.0, 1.0, 0.0)
    assert tckd.item() == pytest.approx(
        (1 - rest) * (log_t - log_s) + rest * (log_rest_t - log_rest_s), rel=1e-4, abs=0
    )
    nckd = dkd(student, teacher, own, 1.0, 0.0, 1.0)
    t, s = probabilities(teacher[0, 1:], 1.0), probabilities(student[0, 1:], 1.0)
    assert nckd.item() == pytest.approx(divergence(t, s), rel=1e-5)
    (tckd + nckd).sum().backward()
    assert bool(student.grad.isfinite().all())
    assert student.grad[0, 1:].tolist() == pytest.approx(
        [b - a - student.grad[0, 0].item() * b for a, b in zip(t, s, strict=True)], abs=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("shape", [(4, 2), (5, 3), (7, 20)])
def test_dist_is_one_minus_pearson_of_rows_and_of_columns(shape: tuple[int, int], temperature: float) -> None:
    student, teacher = logits(*shape)
    p_s = np.array([probabilities(row, temperature) for row in student])
    p_t = np.array([probabilities(row, temperature) for row in teacher])
    rows = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(p_s, p_t, strict=True)])
    columns = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(p_s.T, p_t.T, strict=True)])
    expected = temperature**2 * (1.5 * (1 - rows) + 0.5 * (1 - columns))
    assert dist(student, teacher, temperature, 1.5, 0.5).item() == pytest.approx(expected, rel=1e-4)


def test_dist_damps_classes_of_tiny_probability_by_1e_minus_8() -> None:
    student, teacher = logits(6, 3)
    with torch.no_grad():
        student[:, 2] -= 12
        teacher[:, 2] -= 12
    p_s, p_t = student.detach().softmax(1).numpy(), teacher.softmax(1).numpy()
    correlations = []
    for a, b in zip((p_s - p_s.mean(0)).T, (p_t - p_t.mean(0)).T, strict=True):
        correlations.append(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) + 1e-8))
    undamped = np.corrcoef(p_s[:, 2], p_t[:, 2])[0, 1]
    assert abs(correlations[2]) < 0.99 * abs(undamped)
    assert dist(student, teacher, 1.0, 0.0, 1.0).item() == pytest.approx(1 - np.mean(correlations), rel=1e-9)


def test_dist_is_least_for_equal_logits_and_adds_correlation_with_the_right_sign() -> None:
    _, teacher = logits(6, 5)
    assert float(dist(teacher, teacher, 1.0, 1.0, 1.0)) == pytest.approx(0, abs=1e-4)
    assert float(dist(-teacher, teacher, 1.0, 1.0, 1.0)) > 2.2


@pytest.mark.parametrize("down", [1e4, 60.0])
def test_dist_of_a_class_with_constant_probability_has_no_correlation_and_no_gradient(down: float) -> None:
    """At 1e4 below the others its probabilities are zero in fp32; at 60 below, only their squares are."""
    student, teacher = logits(6, 4, dtype=torch.float32)
    with torch.no_grad():
        student[:, 2] -= down
    assert bool((student.softmax(1)[:, 2].square() == 0).all())
    loss = dist(student, teacher, 1.0, 0.0, 1.0)
    loss.backward()
    kept = [0, 1, 3]
    p_s, p_t = student.detach().softmax(1), teacher.softmax(1)
    known = sum(np.corrcoef(p_s[:, c], p_t[:, c])[0, 1] for c in kept)
    assert loss.item() == pytest.approx(1 - known / 4, rel=1e-4)
    assert bool(student.grad.isfinite().all())
    assert float(student.grad[:, 2].abs().max()) < 1e-20


def test_dist_of_a_single_sample_has_only_its_row() -> None:
    student, teacher = logits(1, 5)
    row = dist(student, teacher, 1.0, 1.0, 0.0).item()
    loss = dist(student, teacher, 1.0, 1.0, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(row + 1)
    assert bool(student.grad.isfinite().all())


@pytest.mark.parametrize("shape", [(3, 4), (6, 11)])
def test_standardised_rows_have_mean_zero_and_unbiased_deviation_one(shape: tuple[int, int]) -> None:
    student, _ = logits(*shape)
    z = student.detach().numpy()
    expected = (z - z.mean(1, keepdims=True)) / (z.std(1, ddof=1, keepdims=True) + 1e-7)
    np.testing.assert_allclose(standardised(student).detach().numpy(), expected, rtol=1e-12)
    assert torch.autograd.gradcheck(standardised, student)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e4])
def test_a_row_of_equal_logits_becomes_zeros_without_gradient(value: float) -> None:
    """0.1 is a value whose mean over seven is rounded in fp32."""
    student = torch.full((2, 7), value)
    student[1] = torch.arange(7.0)
    student.requires_grad_()
    out = standardised(student)
    (out * torch.arange(14.0).view(2, 7)).sum().backward()
    assert out[0].tolist() == [0.0] * 7
    assert student.grad[0].tolist() == [0.0] * 7
    assert bool(out.isfinite().all())
    assert bool(student.grad.isfinite().all())


def test_gradients_are_those_of_the_losses() -> None:
    student, teacher = logits(5, 6)
    own = labels(5, 6)
    assert torch.autograd.gradcheck(lambda s: kd(s, teacher, 4.0), student)
    assert torch.autograd.gradcheck(lambda s: dkd(s, teacher, own, 4.0, 1.0, 8.0), student)
    assert torch.autograd.gradcheck(lambda s: dist(s, teacher, 2.0, 1.0, 1.5), student)


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("method", [Kd(), Kd(T=1.0), Dkd(), Dkd(T=1.0), Dist()])
@pytest.mark.parametrize("kind", ["huge", "opposed", "constant", "equal"])
def test_extreme_logits_in_fp32_leave_values_and_gradients_finite(
    kind: str, method: Method, standard: bool
) -> None:
    student, teacher = torch.randn(6, 10), torch.randn(6, 10)
    if kind == "huge":
        student, teacher = 1e4 * student.sign(), 1e4 * teacher.sign()
    elif kind == "opposed":
        student, teacher = torch.zeros(6, 10), torch.zeros(6, 10)
        student[:, 0] = 1e4
        teacher[:, 1], teacher[:, 0] = 1e4, -1e4
    elif kind == "constant":
        student = torch.full((6, 10), 0.1)
    else:
        student = teacher.clone()
    student.requires_grad_()
    views = (standardised(student), standardised(teacher)) if standard else (student, teacher)
    value = method.loss(seen(*views))
    value.sum().backward()
    assert bool(value.isfinite().all())
    assert bool(student.grad.isfinite().all())
    assert float(student.grad.abs().max()) < 1e5
    if kind == "equal":
        torch.testing.assert_close(value, torch.zeros_like(value), atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", [Kd(), Dkd()])
def test_a_samples_loss_does_not_depend_on_the_batch(method: Method) -> None:
    student, teacher = logits(6, 5)
    own = labels(6, 5)
    alone = [
        method.loss(
            LossInputs(student[i : i + 1], teacher[i : i + 1], {}, {}, {}, own[i : i + 1], own[i : i + 1])
        )
        for i in range(6)
    ]
    together = method.loss(LossInputs(student, teacher, {}, {}, {}, own, own))
    assert together.shape == (6,)
    torch.testing.assert_close(torch.cat(alone), together)


def test_dist_does_not_depend_on_the_order_of_the_batch() -> None:
    student, teacher = logits(8, 5)
    order = torch.randperm(8)
    torch.testing.assert_close(
        dist(student[order], teacher[order], 1.0, 1.0, 1.0), dist(student, teacher, 1.0, 1.0, 1.0)
    )


def test_the_classes_pass_their_options_to_the_formulas() -> None:
    student, teacher = logits(4, 5)
    batch = seen(student, teacher)
    torch.testing.assert_close(Kd(T=2.0).loss(batch), kd(student, teacher, 2.0))
    torch.testing.assert_close(
        Dkd(T=2.0, alpha=3.0, beta=5.0).loss(batch), dkd(student, teacher, batch.labels, 2.0, 3.0, 5.0)
    )
    torch.testing.assert_close(
        Dist(T=2.0, beta=3.0, gamma=5.0).loss(batch), dist(student, teacher, 2.0, 3.0, 5.0)
    )
    assert Dist().loss(batch).shape == ()


def test_declared_defaults_are_those_of_the_papers() -> None:
    assert (Kd.weights.r, Kd.weights.a, Kd.weights.b, Kd().T) == (0.1, 0.9, 0.0, Kd.weights.T)
    assert (Dkd.weights.r, Dkd.weights.a, Dkd.weights.b) == (1.0, 0.0, 1.0)
    assert (Dkd().T, Dkd().alpha, Dkd().beta, Dkd().warmup) == (4.0, 1.0, 8.0, 20.0)
    assert (Dist.weights.b, Dist().T, Dist().beta, Dist().gamma) == (2.0, 1.0, 1.0, 1.0)
    assert (Kd.scope, Dkd.scope, Dist.scope) == ("sample", "sample", "global_batch")
    assert all(method.on_logits for method in (Kd, Dkd, Dist))
    assert (Kd().warmup, Dkd.mixes, Kd.mixes) == (0.0, False, True)


@pytest.mark.parametrize("method", [Kd(), Dkd(), Dist()])
def test_methods_on_logits_need_no_taps_and_equal_classes(method: Method) -> None:
    student = NetworkInfo("small", {"stage1": (8, 4, 4), "pooled": (8,)}, 10)
    teacher = NetworkInfo("large", {"stage1": (32, 8, 8), "stage2": (64, 4, 4), "pooled": (64,)}, 10)
    assert method.needs(student, teacher) == Needs()
    assert method.helper(student, teacher) is None
    with pytest.raises(UserError, match="large has 100 classes and the student small has 10"):
        method.needs(student, NetworkInfo("large", teacher.shapes, 100))


@pytest.mark.parametrize("kind", [Kd, Dkd, Dist])
def test_a_temperature_that_is_not_above_zero_is_rejected(kind: type[Kd] | type[Dkd] | type[Dist]) -> None:
    with pytest.raises(UserError, match=r"\.T = 0"):
        kind(T=0.0)


def test_dkd_rejects_a_single_class() -> None:
    one = NetworkInfo("one", {"pooled": (8,)}, 1)
    with pytest.raises(UserError, match="has one class"):
        Dkd().needs(one, one)
