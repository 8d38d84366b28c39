"""Relations between samples are their formulas, in any order, with equal rows, and without tensors of B³ numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, Method, Needs, NetworkInfo
from drumline.distillation.methods import relations
from drumline.distillation.methods.relations import (
    Correlation,
    Pkt,
    Rkd,
    Similarity,
    Srd,
    correlation,
    pkt,
    rkd,
    rkd_angle,
    rkd_distance,
    similarity,
    srd,
)

Loss = Callable[[Tensor, Tensor], Tensor]

STUDENT = NetworkInfo(
    "small", {"stem": (4, 8, 8), "stage1": (4, 8, 8), "stage2": (6, 4, 4), "pooled": (6,)}, 10
)
TEACHER = NetworkInfo(
    "large",
    {"stem": (8, 16, 16), "stage1": (8, 16, 16), "stage2": (12, 8, 8), "stage3": (20, 2, 3), "pooled": (20,)},
    10,
)


def rows(count: int, own: int = 6, theirs: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    student = torch.randn(count, own, generator=draw, dtype=torch.float64)
    return student.requires_grad_(), torch.randn(count, theirs, generator=draw, dtype=torch.float64)


def both(student: Tensor, teacher: Tensor) -> Tensor:
    return rkd(student, teacher, 25.0, 50.0)


def smooth(difference: float) -> float:
    size = abs(difference)
    return size**2 / 2 if size < 1 else size - 0.5


@pytest.mark.parametrize(
    "shapes", [((5, 3, 4, 4), (5, 8, 2, 2)), ((1, 2, 1, 1), (1, 3, 2, 5)), ((8, 4, 3, 2), (8, 2, 6, 6))]
)
def test_similarity_is_the_squared_difference_of_row_normalised_grams(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    student, teacher = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    tables = []
    for maps in (student.numpy(), teacher.numpy()):
        table = np.array([[float((a * b).sum()) for b in maps] for a in maps])
        tables.append([row / math.sqrt(sum(row**2)) for row in table])
    count = len(student)
    expected = (
        sum((tables[0][i][j] - tables[1][i][j]) ** 2 for i in range(count) for j in range(count)) / count**2
    )
    assert similarity(student, teacher).item() == pytest.approx(expected)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_correlation_multiplies_the_errors_of_neighbours(count: int) -> None:
    student, teacher = rows(count, 5, 5)
    expected = 0.0
    for i in range(count - 1):
        for d in range(5):
            first = abs(float(student[i, d].detach() - teacher[i, d]))
            expected += first * abs(float(student[i + 1, d].detach() - teacher[i + 1, d]))
    assert correlation(student, teacher).item() == pytest.approx(expected / (count - 1))


def test_correlation_decreases_as_the_embeddings_approach_each_other() -> None:
    student, teacher = rows(6, 5, 5)
    far, near = correlation(student, teacher), correlation(0.5 * student + 0.5 * teacher, teacher)
    assert far > near > 0
    assert near.item() == pytest.approx(far.item() / 4)
    assert correlation(teacher, teacher) == 0


def test_correlation_of_a_batch_of_one_is_zero() -> None:
    student, teacher = rows(1, 5, 5)
    loss = correlation(student, teacher)
    loss.backward()
    assert loss == 0
    assert student.grad.tolist() == [[0.0] * 5]


@pytest.mark.parametrize("count", [2, 5, 9])
def test_rkd_distances_are_over_the_mean_of_the_positive_ones(count: int) -> None:
    student, teacher = rows(count)
    student = 3 * student.detach()
    student[-1] = student[0]  # a distance of zero off the diagonal, which the mean leaves out
    if count == 2:
        student[-1] += 1
    tables = []
    for x in (student.numpy(), teacher.numpy()):
        table = np.array([[math.dist(a, b) for b in x] for a in x])
        tables.append(table / table[table > 0].mean())
    expected = np.mean([smooth(a - b) for a, b in zip(tables[0].flat, tables[1].flat, strict=True)])
    assert rkd_distance(student, teacher).item() == pytest.approx(expected)


def angles(x: np.ndarray) -> list[float]:
    """The cosine at j for every triple, one by one."""
    out = []
    for j in range(len(x)):
        for i in range(len(x)):
            for k in range(len(x)):
                a, b = x[i] - x[j], x[k] - x[j]
                sizes = math.sqrt(a @ a) * math.sqrt(b @ b)
                out.append(a @ b / sizes if sizes else 0.0)
    return out


@pytest.mark.parametrize("block", [1, 2 * 49, 3 * 49, 2**21])
def test_rkd_angles_are_those_of_every_triple_in_blocks_of_any_size(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relations, "BLOCK", block)
    monkeypatch.setattr(relations, "LEAST", 1)
    student, teacher = rows(7)
    student = student.detach()
    student[5] = student[2]
    student.requires_grad_()
    own, theirs = angles(student.detach().numpy()), angles(teacher.numpy())
    expected = np.mean([smooth(a - b) for a, b in zip(own, theirs, strict=True)])
    assert rkd_angle(student, teacher).item() == pytest.approx(expected)


def test_rkd_weighs_distances_and_angles() -> None:
    student, teacher = rows(6)
    parts = 25 * rkd_distance(student, teacher) + 50 * rkd_angle(student, teacher)
    torch.testing.assert_close(both(student, teacher), parts)
    seen = LossInputs(
        student, teacher, {"pooled": student}, {"pooled": teacher}, {}, torch.arange(6), torch.arange(6)
    )
    torch.testing.assert_close(Rkd().loss(seen), parts)
    torch.testing.assert_close(Rkd(distance=2.0, angle=0.0).loss(seen), 2 * rkd_distance(student, teacher))


def test_rkd_blocks_cover_the_batch_once() -> None:
    for count in (1, 2, 63, 256, 1000, 1449, 1500):
        blocks = list(relations._blocks(count))
        assert [i for block in blocks for i in range(count)[block]] == list(range(count))
        first = len(range(count)[blocks[0]])
        assert first * count**2 <= max(relations.BLOCK, 8 * count**2)
        assert first >= min(count, 8)
    assert len(list(relations._blocks(1024))) == 128


@pytest.mark.parametrize("count", [2, 5, 9])
def test_pkt_is_the_mean_divergence_of_normalised_affinities(count: int) -> None:
    student, teacher = rows(count)
    tables = []
    for x in (student.detach().numpy(), teacher.numpy()):
        table = np.array([[(a @ b / math.sqrt((a @ a) * (b @ b)) + 1) / 2 for b in x] for a in x])
        tables.append([row / sum(row) for row in table])
    expected = 0.0
    for i in range(count):
        for j in range(count):
            s, t = tables[0][i][j], tables[1][i][j]
            expected += t * math.log((t + 1e-7) / (s + 1e-7)) / count**2
    assert pkt(student, teacher).item() == pytest.approx(expected)
    assert expected > 0


def test_pkt_of_opposite_rows_in_fp32_is_finite() -> None:
    for seed in range(20):
        half = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed))
        student = torch.cat([half, -half, -3 * half]).requires_grad_()
        loss = pkt(student, torch.randn(3, 5))
        loss.backward()
        assert bool(loss.isfinite())
        assert bool(student.grad.isfinite().all())


@pytest.mark.parametrize("loss", [similarity, both, rkd_distance, rkd_angle, pkt, correlation])
def test_gradients_are_those_of_the_losses(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relations, "BLOCK", 2 * 25)
    monkeypatch.setattr(relations, "LEAST", 1)
    student, teacher = rows(5, 4, 4)
    assert torch.autograd.gradcheck(lambda s: loss(s, teacher), student)


def test_correlation_trains_the_teachers_embedding_too() -> None:
    student, teacher = rows(5, 4, 4)
    assert torch.autograd.gradcheck(correlation, (student, teacher.requires_grad_()))


@pytest.mark.parametrize("loss", [similarity, rkd_distance, rkd_angle, pkt])
def test_the_order_of_the_batch_does_not_matter(loss: Loss) -> None:
    student, teacher = rows(8)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    torch.testing.assert_close(loss(student[order], teacher[order]), loss(student, teacher))
    assert not torch.allclose(loss(student[order], teacher), loss(student, teacher))


def test_only_correlation_depends_on_the_order_of_the_batch() -> None:
    student, teacher = rows(8, 5, 5)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    assert not torch.allclose(correlation(student[order], teacher[order]), correlation(student, teacher))
    torch.testing.assert_close(correlation(student.flip(0), teacher.flip(0)), correlation(student, teacher))


@pytest.mark.parametrize("loss", [similarity, rkd_distance, rkd_angle, pkt])
def test_the_scale_of_either_network_does_not_matter(loss: Loss) -> None:
    student, teacher = rows(7)
    torch.testing.assert_close(loss(100 * student, 0.01 * teacher), loss(student, teacher))
    torch.testing.assert_close(loss(4 * teacher, teacher), torch.zeros((), dtype=torch.float64))


def test_rkd_does_not_depend_on_the_origin() -> None:
    student, teacher = rows(7)
    torch.testing.assert_close(both(student + 5, teacher - 3), both(student, teacher))


@pytest.mark.parametrize(
    "kind", ["two equal", "all equal", "one zero", "all zero", "huge", "tiny", "as the teacher"]
)
@pytest.mark.parametrize("loss", [similarity, rkd_distance, rkd_angle, pkt, correlation])
def test_rows_without_a_direction_leave_gradients_finite_and_small_in_fp32(loss: Loss, kind: str) -> None:
    draw = torch.Generator().manual_seed(1)
    student, teacher = torch.rand(6, 9, generator=draw), torch.rand(6, 9, generator=draw)
    unit = 1.0
    if kind == "two equal":
        student[4] = student[1]
        teacher[2] = teacher[3]
    elif kind == "all equal":
        student[:] = student[0].clone()
    elif kind == "one zero":
        student[2], teacher[4] = 0.0, 0.0
    elif kind == "all zero":
        student[:] = 0.0
    elif kind in ("huge", "tiny"):
        unit = 1e4 if kind == "huge" else 1e-4
        student *= unit
    else:
        student = teacher.clone()
    student.requires_grad_()
    value = loss(student, teacher)
    value.backward()
    assert bool(value.isfinite())
    assert bool(student.grad.isfinite().all())
    if loss is not correlation:
        assert float(student.grad.abs().max()) * unit < 10
    if kind == "as the teacher":
        assert value.item() == pytest.approx(0, abs=1e-6)


def test_close_rows_far_from_the_origin_keep_their_distances_in_fp32() -> None:
    """By |a|² + |b|² − 2ab these distances would be rounding noise."""
    draw = torch.Generator().manual_seed(2)
    offsets = torch.randn(6, 8, generator=draw)
    student, teacher = 1000 + 0.125 * (8 * offsets).round(), torch.randn(6, 5, generator=draw)
    torch.testing.assert_close(
        both(student, teacher).double(), both(student.double(), teacher.double()), rtol=1e-5, atol=0
    )


def test_rkd_angles_never_hold_a_cube() -> None:
    """Measured at the allocator, forward and backward; one B³ table alone would be 64 MiB, autograd keeps several."""
    student, teacher = torch.randn(256, 64, requires_grad=True), torch.randn(256, 96)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        rkd_angle(student, teacher).backward()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    block = 4 * relations.BLOCK
    assert block <= peak < 5 * block < 4 * 256**3
    assert student.grad.norm() > 0


def test_declared_defaults_are_those_of_the_papers() -> None:
    kinds: list[type[Method]] = [Similarity, Correlation, Rkd, Pkt]
    assert [kind.weights.b for kind in kinds] == [3000.0, 0.02, 1.0, 30000.0]
    assert all((kind.weights.r, kind.weights.a, kind.scope) == (1.0, 0.0, "global_batch") for kind in kinds)
    assert not any(kind.on_logits for kind in kinds)
    assert (Rkd().distance, Rkd().angle, Correlation().dim) == (25.0, 50.0, 128)


@pytest.mark.parametrize("method", [Similarity(), Correlation(), Rkd(), Pkt()])
def test_networks_of_different_shapes_train_together(method: Method) -> None:
    needs = method.needs(STUDENT, TEACHER)
    taps = {name: torch.randn(5, *STUDENT.shapes[name], requires_grad=True) for name in needs.student}
    teacher_taps = {name: torch.randn(5, *TEACHER.shapes[name]) for name in needs.teacher}
    helper = method.helper(STUDENT, TEACHER)
    helped = {} if helper is None else helper(taps, teacher_taps)
    logits = torch.randn(5, 10)
    loss = method.loss(
        LossInputs(logits, logits, taps, teacher_taps, helped, torch.arange(5), torch.arange(5))
    )
    loss.backward()
    assert loss.shape == ()
    assert bool(loss.isfinite())
    learning = [*taps.values(), *(helper.parameters() if helper else ())]
    assert all(tensor.grad is not None and float(tensor.grad.abs().max()) > 0 for tensor in learning)
    assert len(learning) == (5 if isinstance(method, Correlation) else 1)


def test_each_method_reads_its_tap() -> None:
    assert Similarity().needs(STUDENT, TEACHER) == Needs(("stage2",), ("stage3",))
    for method in (Correlation(), Rkd(), Pkt()):
        assert method.needs(STUDENT, TEACHER) == Needs(("pooled",), ("pooled",))
    helper = Correlation(dim=7).helper(STUDENT, TEACHER)
    helped = helper({"pooled": torch.randn(3, 6)}, {"pooled": torch.randn(3, 20)})
    assert {name: tuple(tensor.shape) for name, tensor in helped.items()} == {
        "student": (3, 7),
        "teacher": (3, 7),
    }


def test_similarity_reads_the_last_map() -> None:
    maps = {name: torch.randn(4, 3, 2, 2) for name in ("stage10", "stage2", "stage10.pre", "pooled", "stem")}
    seen = LossInputs(
        maps["stem"], maps["stem"], maps, {"stage3": maps["stem"]}, {}, torch.arange(4), torch.arange(4)
    )
    torch.testing.assert_close(Similarity().loss(seen), similarity(maps["stage10"], maps["stem"]))


@pytest.mark.parametrize("method", [Similarity(), Correlation(), Rkd(), Pkt()])
def test_a_network_without_the_tap_is_rejected_by_name(method: Method) -> None:
    bare = NetworkInfo("bare", {"stem": (8, 4, 4)}, 10)
    for pair in ((bare, TEACHER), (STUDENT, bare)):
        with pytest.raises(
            UserError, match=r"`(stage1|pooled)`, which bare does not have \(its taps: stem\)"
        ):
            method.needs(*pair)


SMALL = NetworkInfo("small", {"pooled": (5,)}, 10)
LARGE = NetworkInfo("large", {"pooled": (7,)}, 10)


def doubles(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs_of(helped: dict[str, Tensor], logits: Tensor, teacher_logits: Tensor) -> LossInputs:
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
def test_srd_is_one_logarithm_of_one_sum(shape: tuple[int, int], exponent: float) -> None:
    student, teacher = doubles(shape, 1), doubles(shape, 2)
    total = 0.0
    for s, t in zip(student.flatten().tolist(), teacher.flatten().tolist(), strict=True):
        total += abs(s - t) ** exponent
    assert srd(student, teacher, exponent).item() == pytest.approx(math.log(total), rel=1e-12)


def test_srd_gradients_are_those_of_small_differences() -> None:
    teacher = doubles((5, 6), 6)
    assert torch.autograd.gradcheck(lambda x: srd(x, teacher, 4.0), doubles((5, 6), 5).requires_grad_())


@pytest.mark.parametrize("gap", [0.0, 1e-30, 1e-12, 1e-6])
def test_srd_of_equal_tensors_has_finite_losses_and_gradients(gap: float) -> None:
    teacher = torch.zeros(4, 3)
    student = (teacher + gap).requires_grad_()
    found = srd(student, teacher, 4.0)
    found.backward()
    assert found.isfinite()
    assert student.grad is not None
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_srd_loss_is_twice_the_distance_plus_the_divergence(temperature: float) -> None:
    student, teacher = doubles((4, 7), 1), doubles((4, 7), 2)
    mine, theirs = doubles((4, 10), 3), doubles((4, 10), 4)
    each = [entropy_gap(s, t, temperature) for s, t in zip(mine.tolist(), theirs.tolist(), strict=True)]
    expected = 2 * math.log(((student - teacher) ** 4).sum().item()) + temperature**2 * sum(each) / 4
    found = Srd(T=temperature).loss(inputs_of({"student": student, "teacher": teacher}, mine, theirs))
    assert found.shape == ()
    assert found.item() == pytest.approx(expected, rel=1e-12)
    assert Srd.scope == "global_batch"


def test_both_sides_are_normalised_without_weights_and_the_projector_learns() -> None:
    method = Srd()
    assert method.needs(SMALL, LARGE) == Needs(("pooled",), ("pooled",))
    helper = method.helper(SMALL, LARGE)
    assert [name for name, _ in helper.named_parameters()] == ["project.weight"]
    student = doubles((6, 5), 1).float().requires_grad_()
    helped = helper({"pooled": student}, {"pooled": 3 + 9 * doubles((6, 7), 2).float()})
    for side in helped.values():
        assert side.shape == (6, 7)
        torch.testing.assert_close(side.mean(0), torch.zeros(7), atol=1e-5, rtol=0)
        torch.testing.assert_close(side.var(0, unbiased=False), torch.ones(7), atol=5e-3, rtol=0)
    logits = doubles((6, 10), 3).float().requires_grad_()
    method.loss(inputs_of(helped, logits, doubles((6, 10), 4).float())).backward()
    for tensor in (student, logits, *helper.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().sum() > 0


def test_wrong_options_and_networks_without_a_pooled_vector_are_rejected() -> None:
    with pytest.raises(UserError, match="exponent = 0"):
        Srd(exponent=0)
    with pytest.raises(UserError, match="T = -1"):
        Srd(T=-1)
    with pytest.raises(UserError, match="`pooled`, which maps only does not have"):
        Srd().needs(SMALL, NetworkInfo("maps only", {"stage1": (3, 2, 2)}, 10))
