"""ofd and abound against loops over single numbers, and from networks of different shapes."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, Needs, NetworkInfo
from drumline.distillation.methods.boundary import Abound, Ofd, abound, by_depth, margins, ofd

SHAPES = [(3, 4, 5, 5), (1, 1, 1, 1), (2, 7, 3, 2)]


def maps(shape: tuple[int, ...], seed: int, spread: float = 2.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def norm(width: int, seed: int) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(width)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.weight.copy_(torch.randn(width, generator=generator))
        made.bias.copy_(torch.randn(width, generator=generator))
    return made


def network_info(name: str, *stages: tuple[int, int, int], norms: bool = True) -> NetworkInfo:
    shapes: dict[str, tuple[int, ...]] = {"stem": stages[0]}
    for number, shape in enumerate(stages, 1):
        shapes[f"stage{number}.pre"] = shapes[f"stage{number}"] = shape
    known = {f"stage{n}.pre": norm(shape[0], n) for n, shape in enumerate(stages, 1)} if norms else {}
    return NetworkInfo(name, {**shapes, "pooled": (stages[-1][0],)}, 10, known)


STUDENT = network_info("small", (3, 8, 8), (4, 8, 8), (5, 3, 3), (6, 2, 2), norms=False)
TEACHER = network_info("large", (4, 8, 8), (8, 4, 4), (9, 3, 3))


def taps(which: NetworkInfo, names: tuple[str, ...], count: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(count, *which.shapes[name], generator=generator) for name in names}


def seen(student: dict[str, Tensor], teacher: dict[str, Tensor], helped: dict[str, Tensor]) -> LossInputs:
    count = len(next(iter(helped.values())))
    logits = torch.zeros(count, 10)
    return LossInputs(
        logits, logits, student, teacher, helped, torch.zeros(count).long(), torch.arange(count)
    )


@pytest.mark.parametrize(
    ("weight", "bias"), [(1.0, 0.0), (-1.0, 0.5), (0.3, -0.7), (2.0, 5.9), (2.0, 6.5), (-0.1, 4.0)]
)
def test_a_margin_is_the_mean_of_the_negative_values(weight: float, bias: float) -> None:
    mean, deviation = bias, abs(weight)
    law = NormalDist(mean, deviation)
    if law.cdf(0) < 0.001:
        expected = -3 * deviation
    else:  # the integral of x p(x) over x < 0, by the midpoint rule
        low, cells = min(mean, 0) - 12 * deviation, 200_000
        width = -low / cells
        points = [low + (i + 0.5) * width for i in range(cells)]
        expected = sum(x * law.pdf(x) for x in points) * width / law.cdf(0)
    found = margins(torch.tensor([weight], dtype=torch.float64), torch.tensor([bias], dtype=torch.float64))
    assert found.item() == pytest.approx(expected, rel=1e-6)
    assert found.item() < 0


def test_a_margin_of_a_constant_channel_is_finite() -> None:
    found = margins(torch.zeros(3), torch.tensor([-2.0, 0.0, 2.0]))
    torch.testing.assert_close(found, torch.tensor([-2.0, 0.0, 0.0]))


@pytest.mark.parametrize("shape", SHAPES)
def test_ofd_equals_a_loop(shape: tuple[int, ...]) -> None:
    student, teacher = maps(shape, 1), maps(shape, 2)
    for found, mine, theirs in zip(ofd(student, teacher), student, teacher, strict=True):
        expected = 0.0
        for s, t in zip(mine.flatten().tolist(), theirs.flatten().tolist(), strict=True):
            if t > 0 or s > t:
                expected += (s - t) * (s - t)
        assert found.item() == pytest.approx(expected, rel=1e-12)


def test_ofd_is_zero_only_where_both_are_off_and_the_student_is_lower() -> None:
    student = torch.tensor([-2.0, -0.5, 0.5, 0.5, -1.0, -1.0]).view(6, 1, 1, 1)
    teacher = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, -1.0]).view(6, 1, 1, 1)
    assert ofd(student, teacher).tolist() == [0.0, 0.25, 2.25, 0.25, 4.0, 0.0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("margin", [1.0, 0.5])
def test_abound_equals_a_loop(shape: tuple[int, ...], margin: float) -> None:
    student, teacher = maps(shape, 3), maps(shape, 4)
    teacher.flatten()[0] = 0.0
    for found, mine, theirs in zip(abound(student, teacher, margin), student, teacher, strict=True):
        expected = 0.0
        for s, t in zip(mine.flatten().tolist(), theirs.flatten().tolist(), strict=True):
            wrong = max(margin - s, 0) if t > 0 else max(margin + s, 0)
            expected += wrong**2
        assert found.item() == pytest.approx(expected, rel=1e-12)


def test_abound_depends_on_the_side_of_the_boundary_and_not_on_the_value() -> None:
    student, teacher = maps((2, 3, 4, 4), 5), maps((2, 3, 4, 4), 6)
    torch.testing.assert_close(
        abound(student, teacher, 1.0), abound(student, 7 * teacher, 1.0), rtol=0, atol=0
    )
    assert not torch.equal(abound(student, teacher, 1.0), abound(student, -teacher, 1.0))
    assert abound(torch.sign(teacher) * 1.5, teacher, 1.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_small_differences(shape: tuple[int, ...]) -> None:
    student, teacher = maps(shape, 7).requires_grad_(), maps(shape, 8)
    assert torch.autograd.gradcheck(lambda x: ofd(x, teacher), student)
    assert torch.autograd.gradcheck(lambda x: abound(x, teacher, 1.0), student)


def test_each_stage_counts_half_as_much_as_the_next() -> None:
    losses = [torch.tensor([8.0, 0.0]), torch.tensor([4.0, 2.0]), torch.tensor([1.0, 1.0])]
    assert by_depth(losses).tolist() == [2.0 + 2.0 + 1.0, 0.0 + 1.0 + 1.0]
    assert by_depth(losses[:1]).tolist() == [8.0, 0.0]


@pytest.mark.parametrize("method", [Ofd(), Abound()])
def test_stages_are_paired_from_the_last_and_every_helper_learns(method: Ofd | Abound) -> None:
    needs = method.needs(STUDENT, TEACHER)
    assert needs == Needs(
        ("stage2.pre", "stage3.pre", "stage4.pre"), ("stage1.pre", "stage2.pre", "stage3.pre")
    )
    helper = method.helper(STUDENT, TEACHER)
    student, teacher = taps(STUDENT, needs.student, 5, 1), taps(TEACHER, needs.teacher, 5, 2)
    for tap in student.values():
        tap.requires_grad_()
    helped = helper(student, teacher)
    # 8x8 with 8x8; 3x3 with 4x4; 2x2 with 3x3: the smaller of both, the teacher's channels
    expected = [(5, 4, 8, 8), (5, 8, 3, 3), (5, 9, 2, 2)]
    assert [tuple(helped[f"student.{i}"].shape) for i in range(3)] == expected
    assert [tuple(helped[f"target.{i}"].shape) for i in range(3)] == expected
    loss = method.loss(seen(student, teacher, helped))
    assert loss.shape == (5,)
    loss.mean().backward()
    trained = [parameter for parameter in helper.parameters() if parameter.requires_grad]
    assert len(trained) == 3 * 3
    for tensor in [*trained, *student.values()]:
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().sum() > 0


def test_a_larger_student_is_pooled() -> None:
    student, teacher = network_info("wide", (3, 6, 6), norms=False), network_info("deep", (4, 2, 2))
    helper = Ofd().helper(student, teacher)
    mine, theirs = taps(student, ("stage1.pre",), 4, 1), taps(teacher, ("stage1.pre",), 4, 2)
    conv, bn = helper.stages[0]
    pooled = mine["stage1.pre"].unfold(2, 3, 3).unfold(3, 3, 3).mean((-1, -2))
    expected = torch.einsum("nchw,oc->nohw", pooled, conv.weight[:, :, 0, 0])
    expected = (expected - expected.mean((0, 2, 3), keepdim=True)) / (
        expected.var((0, 2, 3), unbiased=False, keepdim=True) + bn.eps
    ).sqrt()
    torch.testing.assert_close(helper(mine, theirs)["student.0"], expected, rtol=1e-4, atol=1e-5)


def test_ofd_raises_the_teacher_to_its_margins_and_weighs_stages() -> None:
    method = Ofd()
    needs = method.needs(STUDENT, TEACHER)
    helper = method.helper(STUDENT, TEACHER)
    student, teacher = taps(STUDENT, needs.student, 3, 1), taps(TEACHER, needs.teacher, 3, 2)
    helped = helper(student, teacher)
    first = TEACHER.norms["stage1.pre"]
    for channel in range(4):
        law = NormalDist(first.bias[channel].item(), abs(first.weight[channel].item()))
        low = law.mean - law.stdev**2 * law.pdf(0) / law.cdf(0) if law.cdf(0) >= 0.001 else -3 * law.stdev
        expected = teacher["stage1.pre"][:, channel].clamp_min(low)
        torch.testing.assert_close(helped["target.0"][:, channel], expected)
        assert math.isclose(helper.margins[0][channel].item(), low, rel_tol=1e-5)
    # Buffers are averaged over the processes, which may round; what does not train is left alone.
    margins = {"margins.0", "margins.1", "margins.2"}
    assert {name for name, value in helper.named_parameters() if not value.requires_grad} == margins
    assert margins <= set(helper.state_dict())
    assert not any("margin" in name for name, _ in helper.named_buffers())
    assert not any("margin" in name for name in Abound().helper(STUDENT, TEACHER).state_dict())
    whole = sum(
        ofd(helped[f"student.{i}"], helped[f"target.{i}"]) / weight for i, weight in enumerate((4, 2, 1))
    )
    torch.testing.assert_close(method.loss(seen(student, teacher, helped)), whole)


def test_abound_does_not_change_the_teacher_and_is_an_initial_phase() -> None:
    method = Abound()
    needs = method.needs(STUDENT, TEACHER)
    student, teacher = taps(STUDENT, needs.student, 3, 1), taps(TEACHER, needs.teacher, 3, 2)
    helped = method.helper(STUDENT, TEACHER)(student, teacher)
    torch.testing.assert_close(helped["target.0"], teacher["stage1.pre"], rtol=0, atol=0)
    whole = sum(
        0.003 * abound(helped[f"student.{i}"], helped[f"target.{i}"], 1.0) / weight
        for i, weight in enumerate((4, 2, 1))
    )
    torch.testing.assert_close(method.loss(seen(student, teacher, helped)), whole)
    assert (method.only_initial, method.initial_epochs) == (True, 30)


def test_repdistillers_variant_of_abound_connects_only_maps_of_different_shapes() -> None:
    student, teacher = (
        NetworkInfo(
            "s", {f"stage{n}{end}": shape for n, shape in enumerate(shapes, 1) for end in ("", ".pre")}, 10
        )
        for shapes in (((4, 8, 8), (4, 8, 8), (6, 2, 2)), ((4, 8, 8), (6, 4, 4), (7, 4, 4)))
    )
    method = Abound(variant="repdistiller")
    needs = method.needs(student, teacher)
    helper = method.helper(student, teacher)
    assert isinstance(helper.stages[0], torch.nn.Identity)
    assert [type(stage[0]) for stage in helper.stages[1:]] == [torch.nn.Conv2d, torch.nn.ConvTranspose2d]
    mine, theirs = taps(student, needs.student, 3, 1), taps(teacher, needs.teacher, 3, 2)
    helped = helper(mine, theirs)
    assert helped["student.0"] is mine["stage1.pre"]
    for number, name in enumerate(needs.teacher):
        assert helped[f"target.{number}"] is theirs[name]
        assert helped[f"student.{number}"].shape == theirs[name].shape


def test_equal_and_zero_maps_have_finite_gradients() -> None:
    for value in (torch.zeros(2, 3, 2, 2), maps((2, 3, 2, 2), 9).float()):
        student = value.clone().requires_grad_()
        (ofd(student, value) + abound(student, value, 1.0)).sum().backward()
        assert student.grad is not None
        assert student.grad.isfinite().all()
        assert ofd(student, value).tolist() == [0.0, 0.0]


def test_a_teacher_without_batchnorm_or_taps_is_rejected() -> None:
    with pytest.raises(
        UserError, match=r"BatchNorm directly before each activation.*stage1\.pre of the teacher plain"
    ):
        Ofd().needs(STUDENT, network_info("plain", (4, 8, 8), norms=False))
    without = NetworkInfo("odd", {"stage1": (3, 4, 4), "pooled": (3,)}, 10)
    for method in (Ofd(), Abound()):
        with pytest.raises(UserError, match=r"odd has no stage1\.pre"):
            method.needs(without, TEACHER)
        with pytest.raises(UserError, match="bare has no stages"):
            method.needs(STUDENT, NetworkInfo("bare", {"pooled": (3,)}, 10))
    with pytest.raises(UserError, match="margin = 0"):
        Abound(margin=0)
