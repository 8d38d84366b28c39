"""CRD's loss against loops over probabilities, and its bank on one process and on several."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs, Memory, Method, Needs, NetworkInfo
from drumline.distillation.methods import contrast
from drumline.distillation.methods.contrast import ContrastBank, Crd, first_rows, log_partition, nce, scores
from drumline.parallel.world import single_process
from tests.distillation import bank_ranks
from tests.largest import Largest
from tests.launch.ranks import one_thread

WORLD = single_process(torch.device("cpu"))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 3])
SMALL, LARGE = NetworkInfo("small", {"pooled": (5,)}, 4), NetworkInfo("large", {"pooled": (7,)}, 4)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def unit(count: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, generator=generator, dtype=torch.float64))


def seen(helped: dict[str, Tensor], ids: Tensor, bank: Memory | None) -> LossInputs:
    logits = torch.zeros(len(ids), 4)
    return LossInputs(logits, logits, {}, {}, helped, LABELS[ids], ids, bank)


def small_bank(seed: int = 3, dim: int = 6, draws: int = 20, momentum: float = 0.5) -> ContrastBank:
    return ContrastBank(LABELS, seed, WORLD, dim=dim, draws=draws, momentum=momentum)


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def by_probabilities(
    anchors: Tensor, positives: Tensor, negatives: Tensor, keep: Tensor, z: float, samples: int, tau: float
) -> float:
    """The paper's loss of one direction: probabilities, one anchor and one negative at a time."""
    total = 0.0
    for anchor, positive, kept in zip(anchors.tolist(), positives.tolist(), keep.tolist(), strict=True):
        m = max(sum(kept), 1)
        p = math.exp(dot(anchor, positive) / tau) / z
        total -= math.log(p / (p + m / samples))
        for negative, there in zip(negatives.tolist(), kept, strict=True):
            if there:
                p = math.exp(dot(anchor, negative) / tau) / z
                total -= math.log((m / samples) / (p + m / samples))
    return total / len(anchors)


@pytest.mark.parametrize(("count", "draws", "dim"), [(4, 9, 5), (1, 1, 2), (6, 30, 8)])
@pytest.mark.parametrize("tau", [0.07, 0.5])
def test_nce_equals_loops_over_probabilities(count: int, draws: int, dim: int, tau: float) -> None:
    anchors, positives, negatives = unit(count, dim, 1), unit(count, dim, 2), unit(draws, dim, 3)
    keep = torch.rand(count, draws, generator=torch.Generator().manual_seed(4)) > 0.3
    keep[-1] = count == 1  # one anchor finds nothing but its own class
    positive, negative = scores(anchors, positives, negatives, tau)
    for z in (3.0, 5000.0):
        expected = by_probabilities(anchors, positives, negatives, keep, z, 50, tau)
        found = nce(positive, negative, keep, torch.tensor(math.log(z), dtype=torch.float64), 50)
        assert found.item() == pytest.approx(expected, rel=1e-10)


def test_the_normaliser_is_the_mean_over_counted_pairs_times_the_samples() -> None:
    anchors, positives, negatives = unit(4, 5, 1), unit(4, 5, 2), unit(9, 5, 3)
    keep = torch.rand(4, 9, generator=torch.Generator().manual_seed(5)) > 0.3
    counted = [
        math.exp(dot(a, p) / 0.07) for a, p in zip(anchors.tolist(), positives.tolist(), strict=True)
    ] + [
        math.exp(dot(a, n) / 0.07)
        for a, kept in zip(anchors.tolist(), keep.tolist(), strict=True)
        for n, there in zip(negatives.tolist(), kept, strict=True)
        if there
    ]
    expected = math.log(50 * sum(counted) / len(counted))
    found = log_partition(*scores(anchors, positives, negatives, 0.07), keep, 50)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_gradients_are_those_of_small_differences() -> None:
    positives, negatives = unit(3, 4, 2), unit(7, 4, 3)
    keep = torch.rand(3, 7, generator=torch.Generator().manual_seed(6)) > 0.3
    keep[2] = False
    log_z = torch.tensor(4.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: nce(*scores(x, positives, negatives, 0.2), keep, log_z, 50), unit(3, 4, 1).requires_grad_()
    )


@pytest.mark.parametrize("score", [-2000.0, 0.0, 2000.0])
def test_no_score_overflows_and_an_anchor_may_have_no_negative(score: float) -> None:
    positive = torch.full((2,), score, requires_grad=True)
    negative = torch.full((2, 3), -score, requires_grad=True)
    keep = torch.tensor([[True, True, False], [False, False, False]])
    log_z = log_partition(positive.detach(), negative.detach(), keep, 50)
    found = nce(positive, negative, keep, log_z, 50)
    found.backward()
    assert log_z.isfinite()
    assert found.isfinite()
    assert positive.grad is not None
    assert negative.grad is not None
    assert positive.grad.isfinite().all()
    assert negative.grad.isfinite().all()
    assert (negative.grad[~keep] == 0).all()


def test_the_loss_learns_to_distinguish_samples() -> None:
    positives, negatives, keep = unit(3, 4, 2), unit(7, 4, 3), torch.ones(3, 7, dtype=torch.bool)
    log_z = torch.tensor(4.0, dtype=torch.float64)
    near = nce(*scores(positives, positives, negatives, 0.2), keep, log_z, 50)
    far = nce(*scores(-positives, positives, negatives, 0.2), keep, log_z, 50)
    assert near < far


def test_both_directions_are_summed_and_each_reads_the_other_bank() -> None:
    method, bank, ids = Crd(K=20, dim=6, tau=0.3), small_bank(), torch.tensor([4, 0, 9, 5])
    bank.at(7)
    before = bank.collect()
    helped = {"student": 3 * unit(4, 6, 1), "teacher": 0.2 * unit(4, 6, 2)}
    student, teacher = unit(4, 6, 1), unit(4, 6, 2)
    negatives = bank.negatives()
    keep = torch.tensor([[LABELS[i] != LABELS[n] for n in negatives] for i in ids])
    assert not keep.all()
    loss, expected = method.loss(seen(helped, ids, bank)), 0.0
    for number, (anchors, other) in enumerate(((student, "teacher"), (teacher, "student"))):
        rows = before[other].double()
        found = scores(anchors, rows[ids], rows[negatives], 0.3)
        z = log_partition(*found, keep, len(LABELS)).exp().item()
        expected += by_probabilities(anchors, rows[ids], rows[negatives], keep, z, len(LABELS), 0.3)
        assert bank.log_z[number].item() == pytest.approx(math.log(z), rel=1e-5)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-5)  # the bank and the normaliser are float32
    after = bank.collect()
    for name, new in (("student", student), ("teacher", teacher)):
        moved = before[name].clone()
        for row, i in zip(new, ids.tolist(), strict=True):
            mixed = 0.5 * before[name][i].double() + 0.5 * row
            moved[i] = (mixed / mixed.norm()).float()
        torch.testing.assert_close(after[name], moved)


def test_the_normaliser_is_set_once() -> None:
    bank, method, ids = small_bank(), Crd(K=20, dim=6), torch.arange(4)
    assert bank.log_z.isneginf().all()
    method.loss(seen({"student": unit(4, 6, 1).float(), "teacher": unit(4, 6, 2).float()}, ids, bank))
    first = bank.log_z.clone()
    assert first.isfinite().all()
    assert first[0] != first[1]
    method.loss(seen({"student": unit(4, 6, 3).float(), "teacher": unit(4, 6, 4).float()}, ids, bank))
    assert torch.equal(bank.log_z, first)


def test_vectors_that_are_not_finite_are_not_stored_in_the_bank() -> None:
    bank, method, ids = small_bank(), Crd(K=20, dim=6), torch.tensor([4, 0, 9])
    before = bank.collect()
    student, teacher = unit(3, 6, 1).float(), unit(3, 6, 2).float()
    student[1, 2] = math.inf
    loss = method.loss(seen({"student": student, "teacher": teacher}, ids, bank))
    assert not loss.isfinite()
    after = bank.collect()
    assert [bool(value) for value in after["log_z"].isfinite()] == [False, True]
    assert after["log_z"][0] == -math.inf
    for name, kept in (("student", [0]), ("teacher", [])):
        same_rows = (after[name] == before[name]).all(1)
        assert [i for i in ids.tolist() if same_rows[i]] == kept
        assert after[name].isfinite().all()
    method.loss(seen({"student": unit(3, 6, 3).float(), "teacher": teacher}, ids, bank))
    last = bank.log_z
    assert last.isfinite().all()
    assert last[1] == after["log_z"][1]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_sample_that_occurs_twice_takes_its_last_vectors_as_if_it_had_come_once(
    monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    write = Tensor.index_copy_

    def reversed_write(rows: Tensor, axis: int, index: Tensor, source: Tensor) -> Tensor:
        return write(rows, axis, index.flip(0), source.flip(0))

    if reverse:  # a device may write the rows in any order
        monkeypatch.setattr(Tensor, "index_copy_", reversed_write)
    once, twice = small_bank(), small_bank()
    student, teacher = unit(5, 6, 1).float(), unit(5, 6, 2).float()
    twice.update(torch.tensor([4, 0, 4, 9, 0]), student, teacher)
    once.update(torch.tensor([4, 9, 0]), student[2:], teacher[2:])
    for name, rows in once.collect().items():
        assert torch.equal(rows, twice.collect()[name])


def test_an_update_needs_memory_in_proportion_to_the_batch() -> None:
    bank, ids = small_bank(), torch.arange(1000) % len(LABELS)
    with Largest() as largest:
        bank.update(ids, unit(1000, 6, 1).float(), unit(1000, 6, 2).float())
    assert largest.size == 1000 * 2 * 6


def test_first_rows_depend_on_the_seed_and_the_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small_bank().collect()
    monkeypatch.setattr(contrast, "_CHUNK", 3)
    pieces = small_bank().collect()
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    assert not torch.equal(small_bank(seed=4).collect()["student"], whole["student"])
    assert not torch.equal(whole["student"], whole["teacher"])
    rows = torch.from_numpy(first_rows(3, torch.arange(2000).numpy(), 12))
    assert torch.equal(first := rows[7], torch.from_numpy(first_rows(3, torch.tensor([7]).numpy(), 12))[0])
    assert first.shape == (2, 12)
    assert rows.abs().max() <= 0.5
    assert rows.abs().max() > 0.499
    assert rows.mean().abs() < 0.01
    assert rows.norm(dim=2).mean().item() == pytest.approx(1.0, abs=0.02)


def reference_draws(seed: int, step: int, count: int, samples: int) -> list[int]:
    """SplitMix64 in Python's integers. The seed gives a key; key and step give the numbers."""
    word, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        return z ^ (z >> 31)

    key = mix((mix((seed + golden) & word) + step * golden) & word)
    return [(mix((key + (slot + 1) * golden) & word) & (2**63 - 1)) % samples for slot in range(count)]


@pytest.mark.parametrize("seed", [0, 3, 2**64 - 1])
@pytest.mark.parametrize("step", [0, 1, 10**6])
def test_negatives_are_a_function_of_seed_step_and_slot(seed: int, step: int) -> None:
    bank = small_bank(seed=seed, draws=64)
    bank.at(step)
    assert bank.negatives().tolist() == reference_draws(seed, step, 64, len(LABELS))


def test_negatives_are_uniform_and_differ_from_step_to_step() -> None:
    labels = torch.zeros(50, dtype=torch.int64)
    bank = ContrastBank(labels, 1, WORLD, dim=2, draws=20_000, momentum=0.5)
    drawn = []
    for step in range(5):
        bank.at(step)
        drawn.append(bank.negatives())
    counts = torch.stack(drawn).flatten().bincount(minlength=50).double()
    assert len(counts) == 50
    chi = ((counts - 2000) ** 2 / 2000).sum()
    assert 20 < chi < 90  # 49 degrees of freedom: outside with probability below 1e-3
    same = (drawn[0] == drawn[1]).double().mean()
    assert 0.01 < same < 0.03


def test_the_bank_is_a_memory_and_other_methods_have_none() -> None:
    bank = Crd(K=20, dim=6).memory(LABELS, 3, WORLD)
    memory: Memory = bank
    state = memory.collect()
    assert {name: tuple(value.shape) for name, value in state.items()} == memory.shapes()
    assert Method().memory(LABELS, 3, WORLD) is None
    saved = [tensor.clone() for tensor in memory.live()]
    Crd(K=20, dim=6).loss(
        seen({"student": unit(2, 6, 1).float(), "teacher": unit(2, 6, 2).float()}, torch.arange(2), bank)
    )
    assert not torch.equal(bank.collect()["student"], state["student"])
    for tensor, value in zip(memory.live(), saved, strict=True):
        tensor.copy_(value)
    assert all(torch.equal(bank.collect()[name], state[name]) for name in state)
    with pytest.raises(AssertionError):
        bank.restore({**state, "student": state["student"][:-1]})


def test_the_banks_keep_the_rows_of_both_networks_separate() -> None:
    bank = small_bank()
    state = bank.collect()
    rows = bank.fetch(torch.tensor([5, 5, 2]))
    assert torch.equal(rows.student, state["student"][[5, 5, 2]])
    assert torch.equal(rows.teacher, state["teacher"][[5, 5, 2]])


def test_crd_trains_the_student_and_both_embeddings() -> None:
    method = Crd(K=20, dim=6)
    assert method.needs(SMALL, LARGE) == Needs(("pooled",), ("pooled",))
    assert (method.scope, method.mixes) == ("global_batch", False)
    helper = method.helper(SMALL, LARGE)
    student = torch.randn(4, 5, requires_grad=True)
    helped = helper({"pooled": student}, {"pooled": torch.randn(4, 7)})
    assert helped["student"].shape == helped["teacher"].shape == (4, 6)
    method.loss(seen(helped, torch.arange(4), method.memory(LABELS, 3, WORLD))).backward()
    for tensor in (student, *helper.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().sum() > 0


@pytest.mark.parametrize("option", [{"K": 0}, {"tau": 0}, {"momentum": 1}, {"momentum": -0.1}, {"dim": 0}])
def test_wrong_options_are_rejected(option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"distill.options: crd.{next(iter(option))} = "):
        Crd(**option)


def test_networks_without_a_pooled_vector_are_rejected() -> None:
    with pytest.raises(UserError, match="`pooled`, which maps only does not have"):
        Crd().needs(SMALL, NetworkInfo("maps only", {"stage1": (3, 2, 2)}, 4))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_restored_bank_continues_with_the_same_bits() -> None:
    found = bank_ranks.job(WORLD)
    assert same(found["resumed"]["last"], found["last"])
    assert torch.equal(found["resumed"]["losses"], found["losses"][bank_ranks.STEPS // 2 :])
    assert not same(found["first"], found["last"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_banks_losses_and_weights_are_the_same_bits_on_any_number_of_processes(size: int) -> None:
    one = bank_ranks.job(WORLD)
    held = 0
    for rank, found in enumerate(bank_ranks.results(size)):
        assert same(found["weights"], one["weights"])
        for name in ("first", "last"):
            assert same(found[name], {} if rank else one[name]), name
        assert torch.equal(found["losses"], one["losses"])
        assert same(found["resumed"]["last"], found["last"])
        held += found["held"]
    # Each process holds its share, a spare row and the two normalisers.
    assert held == one["held"] + (size - 1) * (2 * bank_ranks.METHOD.dim + 2)


@pytest.mark.slow
def test_a_bank_saved_by_three_processes_continues_in_one() -> None:
    state = bank_ranks.results(3)[0]["last"]
    bank = bank_ranks.METHOD.memory(bank_ranks.LABELS, 99, WORLD)
    bank.restore(state)
    assert same(bank.collect(), state)
