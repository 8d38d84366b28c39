"""The projector's loss over the whole batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, Needs, NetworkInfo
from drumline.distillation.methods.srd import Srd, srd

STUDENT = NetworkInfo("small", {"pooled": (5,)}, 10)
TEACHER = NetworkInfo("large", {"pooled": (7,)}, 10)


def rows(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(helped: dict[str, Tensor], logits: Tensor, teacher_logits: Tensor) -> LossInputs:
    count = len(logits)
    return LossInputs(logits, teacher_logits, {}, {}, helped, torch.zeros(count).long(), torch.arange(count))


def entropy_gap(student: list[float], teacher: list[float], temperature: float) -> float:
    """KL of two softmaxes, by their probabilities."""
    p = [math.exp(x / temperature) for x in teacher]
    q = [math.exp(x / temperature) for x in student]
    p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("shape", [(4, 6), (1, 1), (7, 3)])
@pytest.mark.parametrize("exponent", [4.0, 1.0, 2.5])
def test_the_distance_is_one_logarithm_of_one_sum(shape: tuple[int, int], exponent: float) -> None:
    student, teacher = rows(shape, 1), rows(shape, 2)
    total = 0.0
    for s, t in zip(student.flatten().tolist(), teacher.flatten().tolist(), strict=True):
        total += abs(s - t) ** exponent
    assert srd(student, teacher, exponent).item() == pytest.approx(math.log(total), rel=1e-12)


def test_gradients_are_those_of_small_differences() -> None:
    teacher = rows((5, 6), 6)
    assert torch.autograd.gradcheck(lambda x: srd(x, teacher, 4.0), rows((5, 6), 5).requires_grad_())


@pytest.mark.parametrize("gap", [0.0, 1e-30, 1e-12, 1e-6])
def test_equal_tensors_have_finite_losses_and_gradients(gap: float) -> None:
    teacher = torch.zeros(4, 3)
    student = (teacher + gap).requires_grad_()
    found = srd(student, teacher, 4.0)
    found.backward()
    assert found.isfinite()
    assert student.grad is not None
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_whole_is_twice_the_distance_plus_the_divergence(temperature: float) -> None:
    student, teacher = rows((4, 7), 1), rows((4, 7), 2)
    mine, theirs = rows((4, 10), 3), rows((4, 10), 4)
    each = [entropy_gap(s, t, temperature) for s, t in zip(mine.tolist(), theirs.tolist(), strict=True)]
    expected = 2 * math.log(((student - teacher) ** 4).sum().item()) + temperature**2 * sum(each) / 4
    found = Srd(T=temperature).loss(seen({"student": student, "teacher": teacher}, mine, theirs))
    assert found.shape == ()
    assert found.item() == pytest.approx(expected, rel=1e-12)
    assert Srd.scope == "global_batch"


def test_both_sides_are_normalised_without_weights_and_the_projector_learns() -> None:
    method = Srd()
    assert method.needs(STUDENT, TEACHER) == Needs(("pooled",), ("pooled",))
    helper = method.helper(STUDENT, TEACHER)
    assert [name for name, _ in helper.named_parameters()] == ["project.weight"]
    student = rows((6, 5), 1).float().requires_grad_()
    helped = helper({"pooled": student}, {"pooled": 3 + 9 * rows((6, 7), 2).float()})
    for side in helped.values():
        assert side.shape == (6, 7)
        torch.testing.assert_close(side.mean(0), torch.zeros(7), atol=1e-5, rtol=0)
        torch.testing.assert_close(side.var(0, unbiased=False), torch.ones(7), atol=5e-3, rtol=0)
    logits = rows((6, 10), 3).float().requires_grad_()
    method.loss(seen(helped, logits, rows((6, 10), 4).float())).backward()
    for tensor in (student, logits, *helper.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().sum() > 0


def test_wrong_options_and_networks_without_a_pooled_vector_are_refused() -> None:
    with pytest.raises(UserError, match="exponent = 0"):
        Srd(exponent=0)
    with pytest.raises(UserError, match="T = -1"):
        Srd(T=-1)
    with pytest.raises(UserError, match="`pooled`, which maps only does not have"):
        Srd().needs(STUDENT, NetworkInfo("maps only", {"stage1": (3, 2, 2)}, 10))
