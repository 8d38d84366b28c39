"""Maps compared place by place give what the formulas give, for any two networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, Method, NetworkInfo, at_common_size, paired_stages
from drumline.distillation.methods.maps import (
    Attention,
    Hint,
    ReviewKd,
    Vid,
    attention,
    hierarchical,
    hint,
    vid,
)

THREE = NetworkInfo(
    "three",
    {"stem": (6, 32, 32), "stage1": (6, 32, 32), "stage2": (7, 16, 16), "stage3": (9, 8, 8), "pooled": (9,)},
    10,
)
FOUR = NetworkInfo(
    "four",
    {
        "stem": (4, 32, 32),
        "stage1": (4, 32, 32),
        "stage2": (5, 16, 16),
        "stage3": (8, 8, 8),
        "stage4": (10, 4, 4),
        "pooled": (10,),
    },
    10,
)
SHAPES = [((3, 4, 6, 6), (3, 5, 6, 6)), ((2, 4, 8, 8), (2, 3, 4, 4)), ((2, 4, 3, 5), (2, 3, 6, 5))]


def seen(
    method: Method, student: NetworkInfo, teacher: NetworkInfo, count: int = 3
) -> tuple[LossInputs, nn.Module | None]:
    """A batch of random features as the two networks would give them, and the helper that looked at it."""
    needs = method.needs(student, teacher)
    taps = {name: torch.randn(count, *student.shapes[name]).requires_grad_() for name in needs.student}
    teacher_taps = {name: torch.randn(count, *teacher.shapes[name]) for name in needs.teacher}
    helper = method.helper(student, teacher)
    helped = helper(taps, teacher_taps) if helper is not None else {}
    logits = torch.randn(count, 10)
    ids = torch.arange(count)
    return LossInputs(logits, logits, taps, teacher_taps, helped, ids, ids), helper


def works(method: Method, student: NetworkInfo, teacher: NetworkInfo) -> LossInputs:
    """Declaration, helper and loss together: finite, one per sample, with a gradient for all that is trained."""
    batch, helper = seen(method, student, teacher)
    losses = method.loss(batch)
    assert losses.shape == (3,)
    losses.mean().backward()
    trained = [*batch.taps.values(), *(helper.parameters() if helper is not None else ())]
    for tensor in trained:
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().max() > 0
    return batch


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def pooled(x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Means over equal windows, by loops."""
    down, across = x.shape[2] // grid[0], x.shape[3] // grid[1]
    out = np.zeros((*x.shape[:2], *grid))
    for i in range(grid[0]):
        for j in range(grid[1]):
            out[:, :, i, j] = x[:, :, i * down : (i + 1) * down, j * across : (j + 1) * across].mean((2, 3))
    return out


def meet(one: Tensor, other: Tensor) -> tuple[np.ndarray, np.ndarray]:
    a, b = one.numpy(), other.numpy()
    grid = (min(a.shape[2], b.shape[2]), min(a.shape[3], b.shape[3]))
    return pooled(a, grid), pooled(b, grid)


def close(found: Tensor, expected: object) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64))


def test_stages_are_paired_from_the_last_one_backwards() -> None:
    assert paired_stages(THREE.shapes, FOUR.shapes) == [
        ("stage1", "stage2"),
        ("stage2", "stage3"),
        ("stage3", "stage4"),
    ]
    assert paired_stages(FOUR.shapes, THREE.shapes)[0] == ("stage2", "stage1")
    assert paired_stages(["stage2.pre", "stage10", "stage9", "pooled"], ["stage1", "stage2"]) == [
        ("stage9", "stage1"),
        ("stage10", "stage2"),
    ]


def test_maps_are_compared_at_the_smaller_height_and_the_smaller_width() -> None:
    one, other = at_common_size(torch.randn(1, 2, 8, 3), torch.randn(1, 5, 4, 6))
    assert one.shape == (1, 2, 4, 3)
    assert other.shape == (1, 5, 4, 3)


@pytest.mark.parametrize(("mine", "theirs"), SHAPES)
def test_hint_is_the_mean_squared_difference(mine: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    student, teacher = doubles(*mine[:1], theirs[1], *mine[2:]), doubles(*theirs)
    a, b = meet(student, teacher)
    close(hint(student, teacher), [((x - y) ** 2).sum() / x.size for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize(("mine", "theirs"), SHAPES)
def test_attention_compares_normalised_mean_squares(mine: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    student, teacher = doubles(*mine), doubles(*theirs)
    expected = []
    for x, y in zip(*meet(student, teacher), strict=True):
        maps = []
        for features in (x, y):
            energy = np.zeros(features.shape[1:])
            for channel in features:
                energy += channel * channel / len(features)
            maps.append(energy / math.sqrt((energy * energy).sum()))
        expected.append(((maps[0] - maps[1]) ** 2).mean())
    close(attention(student, teacher), expected)


def test_attention_pools_before_it_squares() -> None:
    student = torch.tensor([[[[1.0, -1.0], [1.0, -1.0]]]], dtype=torch.float64).repeat(1, 1, 1, 2)
    teacher = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    assert attention(student, teacher).item() == pytest.approx(0.5)


@pytest.mark.parametrize(("mine", "theirs"), SHAPES)
def test_vid_is_a_gaussians_negative_log_likelihood(mine: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    mean, teacher = doubles(*mine[:1], theirs[1], *mine[2:]), doubles(*theirs)
    variance = torch.rand(theirs[1], dtype=torch.float64) + 0.2
    expected = []
    for m, t in zip(*meet(mean, teacher), strict=True):
        spread = variance.sqrt()[:, None, None].expand(m.shape)
        normal = torch.distributions.Normal(torch.from_numpy(m), spread)
        expected.append(-normal.log_prob(torch.from_numpy(t)).mean() - 0.5 * math.log(2 * math.pi))
    close(vid(mean, variance, teacher), torch.stack(expected))


def test_gradients_are_those_of_finite_differences() -> None:
    teacher = doubles(2, 3, 2, 2)
    same = doubles(2, 3, 4, 4).requires_grad_()
    other = doubles(2, 5, 4, 4).requires_grad_()
    variance = (torch.rand(3, dtype=torch.float64) + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: hint(x, teacher), same)
    assert torch.autograd.gradcheck(lambda x: attention(x, teacher), other)
    assert torch.autograd.gradcheck(lambda x, v: vid(x, v, teacher), (same, variance))


@pytest.mark.parametrize("empty", ["student", "teacher", "both"])
def test_attention_of_a_map_of_zeros_has_a_finite_gradient(empty: str) -> None:
    student, teacher = torch.randn(2, 3, 4, 4), torch.randn(2, 5, 4, 4)
    if empty != "teacher":
        student = torch.zeros_like(student)
    if empty != "student":
        teacher = torch.zeros_like(teacher)
    student.requires_grad_()
    losses = attention(student, teacher)
    losses.sum().backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert losses.tolist() == pytest.approx([0.0 if empty == "both" else 1 / 16] * 2)


def test_equal_maps_have_a_loss_of_zero_and_attention_ignores_scale() -> None:
    x = doubles(2, 3, 4, 4)
    assert hint(x, x).abs().max() == 0
    assert attention(3 * x, x).abs().max() < 1e-15


@pytest.mark.parametrize("method", [Hint(), Attention(), Vid()])
@pytest.mark.parametrize(("student", "teacher"), [(THREE, FOUR), (FOUR, THREE), (THREE, THREE)])
def test_methods_work_between_networks_of_different_shape(
    method: Method, student: NetworkInfo, teacher: NetworkInfo
) -> None:
    works(method, student, teacher)


@pytest.mark.parametrize("method", [Attention(), Vid()])
def test_a_samples_loss_does_not_depend_on_the_others(method: Method) -> None:
    batch, helper = seen(method, THREE, FOUR)
    taps = {name: x[1:2] for name, x in batch.taps.items()}
    theirs = {name: x[1:2] for name, x in batch.teacher_taps.items()}
    helped = helper(taps, theirs) if helper is not None else {}
    one = LossInputs(batch.logits, batch.logits, taps, theirs, helped, batch.labels, batch.samples)
    torch.testing.assert_close(method.loss(one), method.loss(batch)[1:2])


def test_hint_reads_the_teachers_stage_at_the_same_distance_from_the_end() -> None:
    needs = Hint().needs(THREE, FOUR)
    assert (needs.student, needs.teacher) == (("stage2",), ("stage3",))
    needs = Hint(layer=4).needs(FOUR, THREE)
    assert (needs.student, needs.teacher) == (("stage4",), ("stage3",))


@pytest.mark.parametrize(
    ("mine", "theirs", "kernel", "stride"),
    [((8, 8), (8, 8), 1, 1), ((8, 4), (4, 2), 3, 2), ((4, 2), (8, 4), 4, 2), ((8, 8), (2, 2), 1, 1)],
)
def test_hint_regresses_by_convolution_norm_and_activation(
    mine: tuple[int, int], theirs: tuple[int, int], kernel: int, stride: int
) -> None:
    student = NetworkInfo("student", {"stage1": (4, 4, 4), "stage2": (5, *mine)}, 10)
    teacher = NetworkInfo("teacher", {"stage1": (4, 4, 4), "stage2": (7, *theirs)}, 10)
    batch, helper = seen(Hint(), student, teacher)
    assert helper is not None
    assert (helper.conv.kernel_size, helper.conv.stride) == ((kernel, kernel), (stride, stride))
    entry = F.avg_pool2d(batch.taps["stage2"], 4) if theirs == (2, 2) else batch.taps["stage2"]
    out = normed(helper.conv(entry)).relu()
    assert out.shape[2:] == theirs
    expected = (out - batch.teacher_taps["stage2"]).square().flatten(1).mean(1)
    torch.testing.assert_close(Hint().loss(batch), expected)
    works(Hint(), student, teacher)


def test_attention_sums_its_stages_and_reads_those_that_are_named() -> None:
    needs = Attention(layers="2+3").needs(THREE, FOUR)
    assert (needs.student, needs.teacher) == (("stage2", "stage3"), ("stage3", "stage4"))
    batch, _ = seen(Attention(layers="2+3"), THREE, FOUR)
    parts = [
        attention(batch.taps[mine], batch.teacher_taps[theirs])
        for mine, theirs in (("stage2", "stage3"), ("stage3", "stage4"))
    ]
    torch.testing.assert_close(Attention(layers="2+3").loss(batch), parts[0] + parts[1])


def test_vid_starts_from_a_variance_of_five_and_sums_its_stages() -> None:
    batch, _ = seen(Vid(), THREE, FOUR)
    expected = torch.zeros(3)
    for name, teacher in batch.teacher_taps.items():
        variance = batch.helper_outputs[f"{name}.variance"]
        torch.testing.assert_close(variance, torch.full((teacher.shape[1],), 5.0))
        expected = expected + vid(batch.helper_outputs[name], variance, teacher)
    torch.testing.assert_close(Vid().loss(batch), expected)


@pytest.mark.parametrize(
    ("method", "student", "teacher", "says"),
    [
        (Hint(layer=4), THREE, FOUR, "stage 4 of the student"),
        (Hint(layer=1), FOUR, THREE, "stages 2, 3, 4"),
        (Attention(layers="3+4"), THREE, THREE, "stage 4 of the student"),
        (Attention(layers="last"), THREE, THREE, "'last'"),
        (Attention(), NetworkInfo("flat", {"pooled": (4,)}, 10), THREE, "flat has 0"),
        (Vid(), THREE, NetworkInfo("flat", {"pooled": (4,)}, 10), "method = vid"),
    ],
)
def test_stages_that_cannot_be_paired_are_rejected(
    method: Method, student: NetworkInfo, teacher: NetworkInfo, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        method.needs(student, teacher)


def test_default_weights_are_those_of_the_papers() -> None:
    assert [(m.weights.r, m.weights.a, m.weights.b) for m in (Hint, Attention, Vid)] == [
        (1, 0, 100),
        (1, 0, 1000),
        (1, 0, 1),
    ]


SMALL = NetworkInfo(
    "small", {"stage1": (4, 16, 16), "stage2": (5, 8, 8), "stage3": (6, 4, 4), "pooled": (6,)}, 10
)
LARGE = NetworkInfo(
    "large",
    {
        "stage1.pre": (6, 32, 32),
        "stage1": (6, 32, 32),
        "stage2.pre": (7, 16, 16),
        "stage2": (7, 16, 16),
        "stage3.pre": (9, 8, 8),
        "stage3": (9, 8, 8),
        "pooled": (9,),
    },
    10,
)


@pytest.mark.parametrize(
    ("size", "grids", "weights"),
    [
        (16, (16, 4, 2, 1), (1, 0.5, 0.25, 0.125)),
        (8, (8, 4, 2, 1), (1, 0.5, 0.25, 0.125)),
        (4, (4, 2, 1), (1, 0.5, 0.25)),
        (2, (2, 1), (1, 0.5)),
        (1, (1,), (1,)),
    ],
)
def test_the_loss_is_a_weighted_mean_over_the_pyramid(
    size: int, grids: tuple[int, ...], weights: tuple[float, ...]
) -> None:
    fused, teacher = doubles(3, 2, size, size), doubles(3, 2, size, size)
    expected = np.zeros(3)
    for grid, weight in zip(grids, weights, strict=True):
        gap = pooled(fused.numpy(), (grid, grid)) - pooled(teacher.numpy(), (grid, grid))
        expected += weight * (gap**2).mean((1, 2, 3)) / sum(weights)
    close(hierarchical(fused, teacher), expected)


def test_a_map_of_odd_size_is_pooled_as_torch_pools_it() -> None:
    fused, teacher = doubles(2, 3, 7, 5), doubles(2, 3, 7, 5)
    expected = F.mse_loss(fused[0], teacher[0])
    for weight, grid in ((0.5, 4), (0.25, 2), (0.125, 1)):
        a, b = (F.adaptive_avg_pool2d(x[0], grid) for x in (fused, teacher))
        expected = expected + weight * F.mse_loss(a, b)
    close(hierarchical(fused, teacher)[0], expected / 1.875)


def test_reviewkd_gradients_are_those_of_finite_differences() -> None:
    teacher = doubles(2, 2, 5, 5)
    fused = doubles(2, 2, 5, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: hierarchical(x, teacher), fused)


@pytest.mark.parametrize(
    ("student", "teacher"),
    [(SMALL, LARGE), (LARGE, SMALL), (THREE, FOUR), (FOUR, THREE), (FOUR, SMALL), (LARGE, LARGE)],
)
def test_reviewkd_works_between_networks_of_different_shape(
    student: NetworkInfo, teacher: NetworkInfo
) -> None:
    batch = works(ReviewKd(mid=8), student, teacher)
    for name, fused in batch.helper_outputs.items():
        shape = teacher.shapes[name]
        assert fused.shape[1:] == (shape if len(shape) == 3 else (*shape, 1, 1))


def test_reviewkd_reads_the_teacher_before_the_activation_and_the_student_after_it() -> None:
    before, after = (tuple(f"stage{n}{end}" for n in (1, 2, 3)) for end in (".pre", ""))
    needs = ReviewKd().needs(LARGE, LARGE)
    assert needs.student == (*after, "pooled")
    assert needs.teacher == (*before, "pooled")
    assert ReviewKd(preact=True).needs(LARGE, LARGE).student == (*before, "pooled")
    works(ReviewKd(preact=True, mid=8), LARGE, LARGE)
    assert ReviewKd(preact=True).needs(SMALL, LARGE).student == (*after, "pooled"), "SMALL has no such taps"
    assert ReviewKd().needs(FOUR, LARGE).student == ("stage2", "stage3", "stage4", "pooled")


def test_the_fusion_is_the_papers_from_deep_to_shallow() -> None:
    batch, helper = seen(ReviewKd(mid=8), SMALL, LARGE)
    assert helper is not None
    sizes, deeper, expected = {"pooled": 1, "stage3": 8, "stage2": 16, "stage1": 32}, None, {}
    for fusion, (name, size) in zip(helper.fusions, sizes.items(), strict=True):
        x = batch.taps[name].reshape(3, SMALL.shapes[name][0], *(batch.taps[name].shape[2:] or (1, 1)))
        x = normed(torch.einsum("oc,nchw->nohw", fusion.enter[0].weight[:, :, 0, 0], x))
        if deeper is not None:
            own = x.shape[2]
            index = torch.arange(own) * deeper.shape[2] // own
            deeper = deeper[:, :, index][:, :, :, index]
            both = torch.cat((x, deeper), 1)
            share = torch.einsum("oc,nchw->nohw", fusion.attend.weight[:, :, 0, 0], both)
            share = 1 / (1 + (-share - fusion.attend.bias[:, None, None]).exp())
            x = share[:, 0:1] * x + share[:, 1:2] * deeper
        index = torch.arange(size) * x.shape[2] // size
        deeper = x[:, :, index][:, :, :, index]
        expected[name] = normed(F.conv2d(deeper, fusion.leave[0].weight, padding=1))
    for name, theirs in (("pooled", "pooled"), ("stage3", "stage3.pre"), ("stage2", "stage2.pre")):
        torch.testing.assert_close(batch.helper_outputs[theirs], expected[name], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(batch.helper_outputs["stage1.pre"], expected["stage1"], rtol=1e-3, atol=1e-4)


def test_the_shallowest_level_has_a_gradient_for_all_deeper_ones() -> None:
    batch, _ = seen(ReviewKd(mid=8), SMALL, LARGE)
    hierarchical(batch.helper_outputs["stage1.pre"], batch.teacher_taps["stage1.pre"]).mean().backward()
    for tap in batch.taps.values():
        assert tap.grad is not None
        assert tap.grad.abs().max() > 0


def test_the_loss_sums_its_levels() -> None:
    batch, _ = seen(ReviewKd(mid=8), SMALL, LARGE)
    expected = (batch.helper_outputs["pooled"].flatten(1) - batch.teacher_taps["pooled"]).square().mean(1)
    for name in ("stage1.pre", "stage2.pre", "stage3.pre"):
        expected = expected + hierarchical(batch.helper_outputs[name], batch.teacher_taps[name])
    torch.testing.assert_close(ReviewKd().loss(batch), expected)


def test_only_batchnorms_make_samples_depend_on_each_other() -> None:
    batch, helper = seen(ReviewKd(mid=8), SMALL, LARGE)
    assert helper is not None
    helper.eval()
    whole = helper(batch.taps, batch.teacher_taps)
    one = helper(
        {name: x[1:2] for name, x in batch.taps.items()},
        {name: x[1:2] for name, x in batch.teacher_taps.items()},
    )
    for name, x in whole.items():
        torch.testing.assert_close(one[name], x[1:2])


def test_networks_without_pooled_features_are_compared_by_stages() -> None:
    bare = NetworkInfo("bare", {name: shape for name, shape in SMALL.shapes.items() if name != "pooled"}, 10)
    assert "pooled" not in ReviewKd().needs(bare, LARGE).teacher
    works(ReviewKd(mid=8), bare, LARGE)


@pytest.mark.parametrize(("width", "mid"), [(9, 9), (600, 512)])
def test_levels_are_fused_in_as_many_channels_as_the_students_deepest_has(width: int, mid: int) -> None:
    student = NetworkInfo("student", {**SMALL.shapes, "pooled": (width,)}, 10)
    for method, expected in ((ReviewKd(), mid), (ReviewKd(mid=8), 8)):
        helper = method.helper(student, LARGE)
        assert {fusion.enter[0].out_channels for fusion in helper.fusions} == {expected}
    shapes = {name: shape for name, shape in SMALL.shapes.items() if name != "pooled"}
    last = NetworkInfo("bare", shapes, 10).stages[-1]
    assert (
        ReviewKd().helper(NetworkInfo("bare", shapes, 10), LARGE).fusions[0].enter[0].out_channels
        == shapes[last][0]
    )


def test_networks_that_cannot_be_fused_are_rejected() -> None:
    with pytest.raises(UserError, match="flat has 0"):
        ReviewKd().needs(NetworkInfo("flat", {"pooled": (4,)}, 10), LARGE)
    with pytest.raises(UserError, match="mid = -1"):
        ReviewKd(mid=-1)


def test_default_weights_of_reviewkd_are_those_of_the_paper() -> None:
    assert (ReviewKd.weights.r, ReviewKd.weights.a, ReviewKd.weights.b) == (1, 0, 5)
    assert (ReviewKd().warmup, ReviewKd().mid) == (20, 0)


def normed(x: torch.Tensor) -> torch.Tensor:
    """A fresh BatchNorm's output in training."""
    return nn.functional.batch_norm(x, None, None, training=True)
