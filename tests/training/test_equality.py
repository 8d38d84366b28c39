"""What counts as equal, as rounding and as wrong."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor

from drumline.core.precision import BF16, FP16, FP32, Precision
from drumline.training import equality
from drumline.training.equality import EqualityReport, Subject, compare, merge, tolerance

NAMES = ("a.weight", "a.bias", "b.weight")


def values(seed: int = 0) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 3, generator=generator) for name in NAMES}


def other(name: str, change: float) -> dict[str, Tensor | None]:
    """One value of a tensor moved by this share of the tensor's scale."""
    changed = values()
    tensor = changed[name]
    assert tensor is not None
    tensor[1, 2] += change * tensor.abs().max()
    return changed


def test_equal_bits_are_equal() -> None:
    report = compare(values(), values(), NAMES)
    assert (report.equal, report.total, report.wrong) == (3, 3, 0)
    assert report.worst is None
    assert report.first_wrong is None


@pytest.mark.parametrize(("change", "precision", "passes"), [
    (3e-6, FP32, True),
    (3e-5, FP32, False),
    (1e-2, BF16, True),
    (1e-2, FP16, True),
    (5e-2, BF16, False),
])  # fmt: skip
def test_rounding_passes_and_its_size_is_reported(change: float, precision: Precision, passes: bool) -> None:
    report = compare(other("b.weight", change), values(), NAMES, precision=precision)
    assert (report.equal, report.wrong) == (2, 0 if passes else 1)
    assert report.worst is not None
    assert report.worst.name == "b.weight"
    assert report.worst.relative == pytest.approx(change, rel=0.1)
    assert report.worst.limit == tolerance(torch.float32, precision)


@pytest.mark.parametrize("piece", [1, 5, 12])
@pytest.mark.parametrize("factor", [1 + 1e-7, 1.5, -0.5, math.nan])
def test_a_large_tensor_is_compared_piece_by_piece_with_the_same_result(
    piece: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = values()
    own["b.weight"] = factor * own["b.weight"]  # type: ignore[operator]
    for changed in (own, other("b.weight", 3e-4)):
        whole = compare(changed, values(), NAMES).worst
        with monkeypatch.context() as patch:
            patch.setattr(equality, "PIECE", piece)
            parts = compare(changed, values(), NAMES).worst
        assert whole is not None
        assert parts is not None
        assert (parts.name, parts.odd, parts.absolute) == (whole.name, whole.odd, whole.absolute)
        assert parts.scaled_by == pytest.approx(whole.scaled_by)


def test_a_gradient_that_is_nothing_but_rounding_is_measured_by_its_module() -> None:
    """A bias before a BatchNorm: its gradient is zero, so another order of sums changes all of its digits."""
    own, reference = values(), values()
    reference["a.bias"], own["a.bias"] = torch.full((3,), 2e-8), torch.full((3,), -3e-8)
    assert compare(own, reference, NAMES).wrong == 0
    own["a.bias"] = torch.full((3,), 1e-3)
    assert compare(own, reference, NAMES).first_wrong.name == "a.bias"


def test_a_counter_beside_it_does_not_excuse_a_buffer() -> None:
    own = {"n.running_mean": torch.ones(2), "n.num_batches_tracked": torch.tensor(10**6)}
    moved = {**own, "n.running_mean": torch.ones(2) * 1.01}
    assert compare(moved, own, tuple(own), subject=Subject.BUFFERS_MOVED).wrong == 1
    late = {**own, "n.num_batches_tracked": torch.tensor(10**6 + 1)}
    report = compare(late, own, tuple(own), subject=Subject.BUFFERS_MOVED, precision=BF16)
    assert report.first_wrong.name == "n.num_batches_tracked"


def test_untouched_means_the_same_bits() -> None:
    report = compare(other("a.bias", 1e-6), values(), NAMES, subject=Subject.BUFFERS_UNTOUCHED)
    assert report.first_wrong.name == "a.bias"


def test_the_first_wrong_one_is_first_on_the_datas_way_not_the_worst() -> None:
    own = values(seed=1)
    own["a.weight"] = other("a.weight", 0.01)["a.weight"]
    report = compare(own, values(), ("b.weight", "a.weight", "a.bias"))
    assert report.first_wrong.name == "b.weight"
    assert report.worst.name != "a.weight"


def test_a_gradient_that_one_side_lacks_is_wrong_unless_it_is_zero() -> None:
    lacks = {**values(), "a.bias": None}
    here, there = compare(lacks, values(), NAMES), compare(values(), lacks, NAMES)
    assert here.first_wrong.odd == "has no gradient here"
    assert there.first_wrong.odd == "has a gradient here, though none in the reference"
    assert compare(lacks, lacks, NAMES).equal == 3
    zeros = {**values(), "a.bias": torch.zeros(4, 3)}
    assert compare(zeros, lacks, NAMES).wrong == compare(lacks, zeros, NAMES).wrong == 0


def test_nan_on_both_sides_is_equal_and_reported_and_on_one_side_wrong() -> None:
    bad = other("b.weight", math.nan)
    both = compare(bad, other("b.weight", math.nan), NAMES)
    assert both.wrong == 0
    assert [row.finite for row in both.rows] == [True, True, False]
    near = other("b.weight", math.nan)
    near["b.weight"][0, 0] *= 1 + 1e-6
    assert compare(near, bad, NAMES).wrong == 0
    assert compare(bad, values(), NAMES).first_wrong.odd == "has NaN or infinity on one side alone"
    assert compare(values(), other("b.weight", math.inf), NAMES).wrong == 1


def test_another_shape_is_wrong() -> None:
    own = {**values(), "b.weight": torch.zeros(3, 4)}
    assert compare(own, values(), NAMES).first_wrong.odd == "is (3, 4) here and (4, 3) in the reference"


def test_kernels_that_each_process_chooses_widen_what_passes() -> None:
    near, far = other("b.weight", -5e-5), other("b.weight", 1e-2)
    assert compare(near, values(), NAMES).wrong == 1
    assert compare(near, values(), NAMES, loose=True).wrong == 0
    assert compare(far, values(), NAMES, loose=True).wrong == 1
    assert compare(near, values(), NAMES, loose=True, subject=Subject.BUFFERS_UNTOUCHED).wrong == 1
    counts = {"n": torch.tensor([3])}, {"n": torch.tensor([4])}
    assert compare(*counts, ["n"], loose=True, subject=Subject.BUFFERS_MOVED).wrong == 1


def test_a_gradient_scaled_all_over_is_recognised() -> None:
    quarter = {name: tensor / 4 for name, tensor in values().items()}
    assert [row.scaled_by for row in compare(quarter, values(), NAMES).rows] == pytest.approx([0.25] * 3)
    assert compare(other("b.weight", 0.3), values(), NAMES).first_wrong.scaled_by == 0


def test_reports_of_ranks_merge_by_the_worst_copy_and_miss_no_tensor() -> None:
    """Rank 0 holds the first module, ranks 1 and 2 the second: rank 2's copy is wrong."""

    def part(tensors: dict[str, Tensor | None], module: str, rank: int) -> EqualityReport:
        held = {name: tensor for name, tensor in tensors.items() if name.startswith(module)}
        return pickle.loads(pickle.dumps(compare(held, values(), NAMES, rank=rank)))

    first, second = part(values(), "a.", 0), part(values(), "b.", 1)
    whole = merge([first, second])
    assert (whole.equal, whole.total, whole.wrong) == (3, 3, 0)
    wrong = merge([first, second, part(other("b.weight", 0.1), "b.", 2)])
    assert (wrong.equal, wrong.total, wrong.wrong) == (2, 3, 1)
    assert (wrong.first_wrong.name, wrong.first_wrong.rank) == ("b.weight", 2)
    both = merge([part(other("b.weight", 0.1), "b.", 1), part(other("a.bias", 0.1), "a.", 0)])
    assert (both.first_wrong.name, both.first_wrong.rank, both.wrong) == ("a.bias", 0, 2)
    nobody = merge([first])
    assert (nobody.first_wrong.name, nobody.first_wrong.odd) == ("b.weight", "is held by no rank")


def test_tolerances_are_those_of_the_type() -> None:
    assert tolerance(torch.float32) == 1e-5
    assert tolerance(torch.float32, BF16) == 2e-2
    assert tolerance(torch.float64) < 1e-10
    assert tolerance(torch.int64) == 0
