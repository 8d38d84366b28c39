"""Statistics of maps give what the formulas give, and their gradients stay finite where the formulas break."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, Method, NetworkInfo
from drumline.distillation.methods import statistics
from drumline.distillation.methods.singular import singular_vectors
from drumline.distillation.methods.statistics import Fsp, Kdsvd, Nst, flow, fsp, kdsvd, nst
from tests.distillation.methods.test_maps import FOUR, THREE, close, doubles, meet, seen, works


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """In a few of a hundred random maps, two singular values are too close for these tolerances."""
    torch.manual_seed(0)


TWIN = NetworkInfo(
    "twin",
    {"stem": (6, 32, 32), "stage1": (6, 32, 32), "stage2": (7, 16, 16), "stage3": (9, 8, 8), "pooled": (9,)},
    10,
)
HALVED = NetworkInfo(
    "halved",
    {
        "stem": (6, 16, 16),
        "stage1": (5, 16, 16),
        "stage2": (6, 16, 16),
        "stage3": (7, 8, 8),
        "stage4": (9, 4, 4),
    },
    10,
)
SPECTRUM = (1.0, 0.45, 0.2, 0.09, 0.04, 0.01)


def separated(count: int, channels: int, height: int, width: int) -> Tensor:
    """Maps whose singular values are set well apart, so that their vectors are well defined."""
    left = torch.linalg.qr(doubles(count, channels, channels))[0]
    right = torch.linalg.qr(doubles(count, height * width, height * width))[0]
    rank = min(channels, height * width, len(SPECTRUM))
    spectrum = torch.tensor(SPECTRUM[:rank], dtype=torch.float64)
    return (left[:, :, :rank] * spectrum @ right[:, :, :rank].mT).reshape(count, channels, height, width)


# nst


def nst_by_loops(student: Tensor, teacher: Tensor) -> list[float]:
    found = []
    for x, y in zip(*meet(student, teacher), strict=True):
        s = [channel / np.linalg.norm(channel) for channel in x.reshape(len(x), -1)]
        t = [channel / np.linalg.norm(channel) for channel in y.reshape(len(y), -1)]
        found.append(
            np.mean([(a @ b) ** 2 for a, b in itertools.product(s, s)])
            + np.mean([(a @ b) ** 2 for a, b in itertools.product(t, t)])
            - 2 * np.mean([(a @ b) ** 2 for a, b in itertools.product(s, t)])
        )
    return found


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ((2, 3, 6, 6), (2, 5, 6, 6)),
        ((2, 30, 2, 2), (2, 20, 2, 2)),
        ((2, 4, 8, 8), (2, 3, 4, 4)),
        ((2, 9, 2, 3), (2, 7, 4, 3)),
    ],
)
def test_nst_is_the_distance_of_kernel_means(mine: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    student, teacher = doubles(*mine), doubles(*theirs)
    close(nst(student, teacher), nst_by_loops(student, teacher))


@pytest.mark.parametrize("channels", [2, 9])
def test_nst_has_the_gradient_of_finite_differences_on_either_side(channels: int) -> None:
    teacher = doubles(1, channels, 2, 3)
    student = doubles(1, channels + 1, 2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: nst(x, teacher), student)


def test_nst_of_equal_channels_in_a_different_order_is_zero() -> None:
    x = doubles(2, 3, 4, 4)
    assert nst(x, x.flip(1)).abs().max() < 1e-14
    assert nst(x, -5 * x).abs().max() < 1e-14


@pytest.mark.parametrize("size", [2, 8])
def test_nst_of_dead_channels_has_a_finite_gradient(size: int) -> None:
    student = torch.randn(2, 6, size, size)
    student[:, ::2] = 0
    student[1] = 0
    student.requires_grad_()
    nst(student, torch.randn(2, 5, size, size)).sum().backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert student.grad[0, 1].abs().max() > 0


def test_nst_builds_no_tensor_larger_than_its_smaller_side() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in (out,) if isinstance(x, Tensor))])
            return out

    for shape in ((2, 16, 32, 32), (2, 256, 2, 2)):
        largest, x = 0, torch.randn(*shape)
        with Watch():
            nst(x, x.flip(1))
        assert largest == x.numel()


# kdsvd


def kdsvd_by_decomposition(student: list[Tensor], teacher: list[Tensor], k: int) -> Tensor:
    """(n,): the authors' loss, with the library's decomposition of positions × channels. Its gradient is exact."""
    points = []
    for mine, theirs in zip(student, teacher, strict=True):
        candidates = torch.linalg.svd(mine.flatten(2).mT, full_matrices=False)[2].mT[:, :, : k + 3]
        _, sigma, vectors = torch.linalg.svd(theirs.flatten(2).mT, full_matrices=False)
        sigma, vectors = sigma[:, :k], vectors.mT[:, :, :k]
        vectors = vectors * vectors.sum(1, keepdim=True).sign()
        cosines = candidates.mT @ vectors
        best = cosines.abs() == cosines.abs().amax(1, keepdim=True)
        share = (sigma / sigma.norm(dim=1, keepdim=True))[:, None]
        points.append((candidates @ (best * cosines.sign()) * share, vectors * share))
    total = torch.zeros(len(student[0]), dtype=torch.float64)
    for (s, t), (next_s, next_t) in itertools.pairwise(points):
        mine_r = (-((s[:, :, None] - next_s[:, None]) ** 2) / 8).exp()
        theirs_r = (-((t[:, :, None] - next_t[:, None]) ** 2) / 8).exp()
        total = total + ((mine_r - theirs_r) ** 2).sum((1, 2, 3))
    return total


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("shape", [(6, 5, 5), (40, 3, 4), (6, 2, 3)])
def test_singular_vectors_equal_the_librarys_up_to_sign(count: int, shape: tuple[int, int, int]) -> None:
    x = separated(3, *shape).flatten(2)
    found = singular_vectors(x, count)
    exact = torch.linalg.svd(x)[2][:, :count].mT
    cosines = (found * exact).sum(1)
    assert cosines.abs().min() > 1 - 1e-4
    torch.testing.assert_close(found[:, :, 0], exact[:, :, 0] * cosines[:, :1].sign(), rtol=1e-6, atol=1e-7)


def test_the_leading_vector_has_the_exact_gradient() -> None:
    x = separated(2, 6, 3, 4).flatten(2)
    weight = doubles(12, 12)
    ours, exact = x.clone().requires_grad_(), x.clone().requires_grad_()
    v = singular_vectors(ours, 4)[:, :, 0]
    w = torch.linalg.svd(exact, full_matrices=False)[2][:, 0]
    # A quadratic form ignores the sign.
    torch.einsum("ni,ij,nj->", v, weight, v).backward()
    torch.einsum("ni,ij,nj->", w, weight, w).backward()
    torch.testing.assert_close(ours.grad, exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("sizes", [((6, 6), (3, 3), (3, 3)), ((6, 4), (4, 2), (3, 1))])
def test_kdsvd_compares_singular_vectors_over_channels(k: int, sizes: tuple[tuple[int, int], ...]) -> None:
    """Each of the k components has a radial function of its own."""
    student = [separated(2, width, *size) for width, size in zip((6, 7, 9), sizes, strict=True)]
    teacher = [separated(2, width, *size) for width, size in zip((6, 7, 9), sizes, strict=True)]
    ours, theirs = ([x.clone().requires_grad_() for x in student] for _ in range(2))
    found, expected = kdsvd(ours, teacher, k), kdsvd_by_decomposition(theirs, teacher, k)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    found.sum().backward()
    expected.sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        assert (x.grad - y.grad).norm() < 1e-3 * y.grad.norm()


@pytest.mark.parametrize("signed", [False, True])
def test_kdsvd_has_the_exact_gradient_for_close_singular_values(signed: bool) -> None:
    """A random map has no singular value far above the others unless all its elements are positive."""
    student, teacher = (
        [x if signed else x.relu() for x in (doubles(2, 8, 5, 5), doubles(2, 9, 4, 4))] for _ in range(2)
    )
    values = torch.linalg.svdvals(student[0].flatten(2))
    assert (values[:, 1] / values[:, 0]).max() > (0.8 if signed else 0.4)
    ours, theirs = ([x.clone().requires_grad_() for x in student] for _ in range(2))
    found, expected = kdsvd(ours, teacher), kdsvd_by_decomposition(theirs, teacher, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    found.sum().backward()
    expected.sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        assert (x.grad - y.grad).norm() < 1e-3 * y.grad.norm()


def test_maps_of_kdsvd_may_differ_in_size() -> None:
    student, teacher = (
        [separated(2, 6, 4, 4), separated(2, 7, 2, 2)],
        [
            separated(2, 6, 8, 8),
            separated(2, 7, 4, 4),
        ],
    )
    expected = kdsvd_by_decomposition(student, teacher, 1)
    torch.testing.assert_close(kdsvd(student, teacher), expected, rtol=1e-4, atol=1e-7)


def test_kdsvd_of_equal_maps_is_zero_and_ignores_sign_and_scale() -> None:
    maps = [separated(2, 6, 4, 4), separated(2, 7, 3, 3)]
    assert kdsvd(maps, maps).abs().max() < 1e-12
    assert kdsvd([-3 * x for x in maps], maps).abs().max() < 1e-12
    assert kdsvd([maps[0], separated(2, 7, 3, 3)], maps).min() > 1e-3


def test_kdsvd_finds_the_teachers_vector_among_the_students_candidates() -> None:
    """The teacher's first vector is the student's third."""
    left, right = torch.linalg.qr(doubles(1, 6, 6))[0], torch.linalg.qr(doubles(1, 16, 16))[0]

    def maps(spectrum: list[float]) -> Tensor:
        values = torch.tensor(spectrum, dtype=torch.float64)
        return (left[:, :, :3] * values @ right[:, :, :3].mT).reshape(1, 6, 4, 4)

    student, teacher, other = maps([1.0, 0.5, 0.2]), maps([0.1, 0.3, 1.0]), separated(1, 5, 2, 2)
    assert kdsvd([student, other], [teacher, other]).item() < 1e-8


def test_kdsvd_blocks_give_the_value_and_gradient_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    maps = [separated(2, 6, 4, 4), separated(2, 7, 3, 3)]
    teacher = [separated(2, 6, 4, 4), separated(2, 7, 3, 3)]
    for block in (1 << 24, 2 * 7 * 3, 1):
        monkeypatch.setattr(statistics, "_BLOCK", block)
        student = [x.clone().requires_grad_() for x in maps]
        losses = kdsvd(student, teacher)
        losses.sum().backward()
        found.append((losses.detach(), *(x.grad for x in student)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("case", ["zero", "one", "equal", "rank one", "constant", "negative"])
def test_kdsvd_has_a_finite_gradient_where_singular_vectors_are_not_defined(case: str) -> None:
    maps = [torch.randn(2, 8, 4, 4), torch.randn(2, 8, 2, 2)]
    if case == "zero":
        maps = [torch.zeros_like(x) for x in maps]
    elif case == "one":
        maps[0][1] = 0
    elif case == "equal":
        maps = [
            torch.eye(8).repeat(1, 2).reshape(1, 8, 4, 4).repeat(2, 1, 1, 1),
            torch.eye(8, 4).reshape(1, 8, 2, 2).repeat(2, 1, 1, 1),
        ]
    elif case == "rank one":
        maps = [x[:, :1].repeat(1, 8, 1, 1) for x in maps]
    elif case == "constant":
        maps = [torch.ones_like(x) for x in maps]
    else:
        maps = [-x.abs() for x in maps]
    student = [x.clone().requires_grad_() for x in maps]
    losses = kdsvd(student, [torch.randn(2, 8, 4, 4).relu(), torch.randn(2, 8, 2, 2).relu()])
    losses.sum().backward()
    assert losses.isfinite().all()
    for x in student:
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert x.grad.abs().max() < 1e3


def test_kdsvd_accepts_maps_smaller_than_the_number_of_its_vectors() -> None:
    student = [torch.randn(2, 3, 2, 2).requires_grad_(), torch.randn(2, 4, 1, 1).requires_grad_()]
    losses = kdsvd(student, [torch.randn(2, 3, 2, 2), torch.randn(2, 4, 1, 1)], k=5)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in student)


# fsp


def strongest(x: np.ndarray, size: int) -> np.ndarray:
    step = x.shape[1] // size
    out = np.zeros((len(x), size, size))
    for i, j in itertools.product(range(size), range(size)):
        out[:, i, j] = x[:, i * step : (i + 1) * step, j * step : (j + 1) * step].max((1, 2))
    return out


def test_repdistillers_variant_of_fsp_averages_the_larger_map() -> None:
    lower, upper = doubles(2, 3, 8, 8), doubles(2, 5, 4, 4)
    expected = torch.einsum("nchw,ndhw->ncd", F.avg_pool2d(lower, 2), upper) / 16
    torch.testing.assert_close(flow(lower, upper, "repdistiller"), expected)
    torch.testing.assert_close(flow(upper, lower, "repdistiller"), expected.mT)
    student = [doubles(2, 3, 8, 8), upper]
    gap = flow(*student, "repdistiller") - expected
    torch.testing.assert_close(fsp(student, [lower, upper], "repdistiller"), gap.square().mean((1, 2)))


def test_fsp_compares_products_of_channels_between_consecutive_maps() -> None:
    def made(sizes: tuple[int, ...]) -> list[Tensor]:
        return [doubles(2, width, size, size) for width, size in zip((3, 3, 5, 4), sizes, strict=True)]

    def flows(maps: list[Tensor], n: int) -> list[np.ndarray]:
        found = []
        for lower, upper in itertools.pairwise([x[n].numpy() for x in maps]):
            size = min(lower.shape[1], upper.shape[1])
            x, y = strongest(lower, size), strongest(upper, size)
            gram = np.zeros((len(x), len(y)))
            for i, j in itertools.product(range(len(x)), range(len(y))):
                gram[i, j] = (x[i] * y[j]).sum() / size**2
            found.append(gram)
        return found

    student, teacher = made((8, 8, 4, 2)), made((4, 8, 4, 4))
    expected = [
        sum(((a - b) ** 2).mean() for a, b in zip(flows(student, n), flows(teacher, n), strict=True))
        for n in range(2)
    ]
    close(fsp(student, teacher), expected)


def test_flow_takes_maxima_where_sizes_divide_and_means_elsewhere() -> None:
    lower, upper = doubles(2, 3, 6, 6), doubles(2, 4, 3, 3)
    close(flow(lower, upper), torch.einsum("ncij,ndij->ncd", F.max_pool2d(lower, 2), upper) / 9)
    lower = doubles(2, 3, 7, 7)
    expected = torch.einsum("ncij,ndij->ncd", F.adaptive_avg_pool2d(lower, 3), upper) / 9
    close(flow(lower, upper), expected)


def test_fsp_has_the_gradient_of_finite_differences() -> None:
    student = [doubles(1, 2, 4, 4).requires_grad_(), doubles(1, 3, 2, 2).requires_grad_()]
    teacher = [doubles(1, 2, 4, 4), doubles(1, 3, 2, 2)]
    assert torch.autograd.gradcheck(lambda *maps: fsp(list(maps), teacher), student)


def test_fsp_of_maps_of_zeros_has_a_finite_gradient() -> None:
    student = [torch.zeros(1, 2, 4, 4).requires_grad_(), torch.zeros(1, 3, 2, 2).requires_grad_()]
    fsp(student, [torch.randn(1, 2, 4, 4), torch.randn(1, 3, 2, 2)]).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in student)


def test_fsp_reads_the_stem_and_is_an_initial_phase() -> None:
    needs = Fsp().needs(THREE, TWIN)
    assert needs.student == needs.teacher == ("stem", "stage1", "stage2", "stage3")
    needs = Fsp().needs(THREE, HALVED)
    assert needs.teacher == ("stem", "stage2", "stage3", "stage4")
    assert (Fsp.only_initial, Fsp.initial_epochs) == (True, 30)
    batch, _ = seen(Fsp(), THREE, TWIN)
    names = ("stem", "stage1", "stage2", "stage3")
    expected = fsp([batch.taps[name] for name in names], [batch.teacher_taps[name] for name in names])
    torch.testing.assert_close(Fsp().loss(batch), expected)


# The declarations


@pytest.mark.parametrize(
    ("method", "student", "teacher"),
    [
        (Nst(), THREE, FOUR),
        (Nst(), FOUR, THREE),
        (Nst(), THREE, HALVED),
        (Kdsvd(), THREE, TWIN),
        (Kdsvd(k=2), THREE, HALVED),
        (Fsp(), THREE, TWIN),
        (Fsp(), THREE, HALVED),
    ],
)
def test_methods_work_between_networks_of_different_shape(
    method: Method, student: NetworkInfo, teacher: NetworkInfo
) -> None:
    works(method, student, teacher)


@pytest.mark.parametrize("method", [Nst(), Kdsvd(), Fsp()])
def test_a_samples_loss_does_not_depend_on_the_others(method: Method) -> None:
    batch, _ = seen(method, THREE, TWIN)
    taps = {name: x[1:2] for name, x in batch.taps.items()}
    theirs = {name: x[1:2] for name, x in batch.teacher_taps.items()}
    one = LossInputs(batch.logits, batch.logits, taps, theirs, {}, batch.labels, batch.samples)
    torch.testing.assert_close(method.loss(one), method.loss(batch)[1:2], rtol=1e-4, atol=1e-5)


def test_nst_and_kdsvd_add_up_their_stages() -> None:
    batch, _ = seen(Nst(), THREE, HALVED)
    pairs = (("stage1", "stage2"), ("stage2", "stage3"), ("stage3", "stage4"))
    mine = [batch.taps[name] for name, _ in pairs]
    theirs = [batch.teacher_taps[name] for _, name in pairs]
    parts = [nst(a, b) for a, b in zip(mine, theirs, strict=True)]
    torch.testing.assert_close(Nst().loss(batch), parts[0] + parts[1] + parts[2])
    expected = kdsvd(mine[:2], theirs[:2]) + kdsvd(mine[1:], theirs[1:])
    torch.testing.assert_close(Kdsvd().loss(batch), expected)


def test_networks_that_cannot_be_compared_are_rejected() -> None:
    with pytest.raises(UserError, match=r"three has 6/6/7/9, four has 4/5/8/10(.|\n)*resnet56"):
        Fsp().needs(THREE, FOUR)
    with pytest.raises(
        UserError, match=r"kdsvd: compares singular vectors over channels(.|\n)*three has 6/7/9"
    ):
        Kdsvd().needs(THREE, FOUR)
    single = NetworkInfo("single", {"stage1": (4, 8, 8)}, 10)
    with pytest.raises(UserError, match="at least 2 named stages"):
        Kdsvd().needs(single, THREE)
    with pytest.raises(UserError, match="two or more taps"):
        Fsp().needs(single, single)
    with pytest.raises(UserError, match="three has 3 and flat has 0"):
        Nst().needs(THREE, NetworkInfo("flat", {"pooled": (4,)}, 10))
    with pytest.raises(UserError, match="k = 0"):
        Kdsvd(k=0)


def test_default_weights_are_those_of_the_papers() -> None:
    assert [(m.weights.r, m.weights.a, m.weights.b) for m in (Nst, Kdsvd, Fsp)] == [
        (1, 0, 50),
        (1, 0, 1),
        (1, 0, 1),
    ]
