"""ReviewKD's fusion and its pyramid loss are those of the formulas, whatever the two networks' sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drumline.core.errors import UserError
from drumline.distillation.method import NetworkInfo
from drumline.distillation.methods.review import ReviewKd, hierarchical
from tests.distillation.methods.test_maps import FOUR, THREE, close, doubles, pooled, seen, works

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


def test_gradients_are_those_of_finite_differences() -> None:
    teacher = doubles(2, 2, 5, 5)
    fused = doubles(2, 2, 5, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: hierarchical(x, teacher), fused)


@pytest.mark.parametrize(
    ("student", "teacher"),
    [(SMALL, LARGE), (LARGE, SMALL), (THREE, FOUR), (FOUR, THREE), (FOUR, SMALL), (LARGE, LARGE)],
)
def test_the_method_works_between_networks_of_different_shape(
    student: NetworkInfo, teacher: NetworkInfo
) -> None:
    batch = works(ReviewKd(mid=8), student, teacher)
    for name, fused in batch.helper_outputs.items():
        shape = teacher.shapes[name]
        assert fused.shape[1:] == (shape if len(shape) == 3 else (*shape, 1, 1))


def test_maps_before_the_activation_are_taken_where_they_are_known() -> None:
    needs = ReviewKd().needs(SMALL, LARGE)
    assert needs.student == ("stage1", "stage2", "stage3", "pooled")
    assert needs.teacher == ("stage1.pre", "stage2.pre", "stage3.pre", "pooled")
    needs = ReviewKd().needs(FOUR, LARGE)
    assert needs.student == ("stage2", "stage3", "stage4", "pooled")


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


def test_the_shallowest_level_teaches_all_deeper_ones() -> None:
    batch, _ = seen(ReviewKd(mid=8), SMALL, LARGE)
    hierarchical(batch.helper_outputs["stage1.pre"], batch.teacher_taps["stage1.pre"]).mean().backward()
    for tap in batch.taps.values():
        assert tap.grad is not None
        assert tap.grad.abs().max() > 0


def test_the_loss_adds_up_its_levels() -> None:
    batch, _ = seen(ReviewKd(mid=8), SMALL, LARGE)
    expected = (batch.helper_outputs["pooled"].flatten(1) - batch.teacher_taps["pooled"]).square().mean(1)
    for name in ("stage1.pre", "stage2.pre", "stage3.pre"):
        expected = expected + hierarchical(batch.helper_outputs[name], batch.teacher_taps[name])
    torch.testing.assert_close(ReviewKd().loss(batch), expected)


def test_only_batch_norms_tie_samples_together() -> None:
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


def test_a_network_without_pooled_features_is_compared_by_stages() -> None:
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


def test_what_cannot_be_fused_is_refused() -> None:
    with pytest.raises(UserError, match="flat has 0"):
        ReviewKd().needs(NetworkInfo("flat", {"pooled": (4,)}, 10), LARGE)
    with pytest.raises(UserError, match="mid = -1"):
        ReviewKd(mid=-1)


def test_weights_are_the_papers() -> None:
    assert (ReviewKd.weights.r, ReviewKd.weights.a, ReviewKd.weights.b) == (1, 0, 5)
    assert (ReviewKd().warmup, ReviewKd().mid) == (20, 0)


def normed(x: torch.Tensor) -> torch.Tensor:
    """A fresh BatchNorm's output in training."""
    return nn.functional.batch_norm(x, None, None, training=True)
