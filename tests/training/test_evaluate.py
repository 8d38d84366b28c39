"""Every sample is scored once, in the same company, and a broken model is never right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch
from drumline.parallel.world import World, single_process
from drumline.state.manifest import Position
from drumline.training import loop
from drumline.training.evaluate import Score, Tally, evaluate, padded, tally
from tests.training import ranks, tiny

NAN = math.nan


def naive(logits: torch.Tensor, labels: torch.Tensor) -> tuple[int, int, int]:
    """Sorts each row by hand: higher first, of equals the lower class first."""
    top1 = top5 = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        if any(math.isnan(value) for value in row):
            continue
        ranking = sorted(range(len(row)), key=lambda i: (-row[i], i))
        top1 += ranking[0] == label
        top5 += label in ranking[:5]
    return len(labels), top1, top5


def counts(logits: torch.Tensor, labels: torch.Tensor) -> Tally:
    return Tally(*(value.item() for value in tally(logits, labels)))


@pytest.mark.parametrize("classes", [2, 4, 5, 6, 20])
@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_counts_equal_a_naive_ranking_with_ties(classes: int, levels: int) -> None:
    draw = torch.Generator().manual_seed(classes * levels)
    logits = torch.randint(0, levels, (300, classes), generator=draw).float()
    labels = torch.randint(0, classes, (300,), generator=draw)
    found = counts(logits, labels)
    assert (found.samples, found.top1, found.top5) == naive(logits, labels)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_a_row_of_nan_is_never_right(classes: int) -> None:
    logits = torch.full((classes, classes), NAN)
    found = counts(logits, torch.arange(classes))
    assert (found.samples, found.top1, found.top5) == (classes, 0, 0)


@pytest.mark.parametrize("classes", [3, 10])
@pytest.mark.parametrize("where", [0, 1])
def test_a_single_nan_in_a_row_makes_it_wrong(classes: int, where: int) -> None:
    logits = torch.arange(classes).flip(0).float()[None].clone()
    assert counts(logits, torch.tensor([0]))[1:3] == (1, 1)
    logits[0, where] = NAN
    assert counts(logits, torch.tensor([0]))[1:3] == (0, 0)


def test_infinite_logits_are_ranked_and_left_out_of_the_sum_of_losses() -> None:
    logits = torch.tensor([[math.inf, 0.0, 0.0], [-math.inf, 0.0, 0.0], [-math.inf, -math.inf, -math.inf]])
    found = counts(logits, torch.tensor([0, 0, 0]))
    assert (found.samples, found.top1, found.loss, found.nonfinite, found.unsummed) == (3, 2, 0, 3, 3)


def test_a_large_loss_is_summed_as_it_is_and_one_that_would_overflow_the_sum_is_counted() -> None:
    logits = torch.tensor([[0.0, 3e7], [0.0, 1e20]])
    found = counts(logits, torch.tensor([0, 0]))
    assert (found.loss / 2**24, found.nonfinite, found.unsummed) == (3e7, 0, 1)


def test_a_score_with_an_output_that_is_not_finite_has_no_loss() -> None:
    model = tiny.normed(3)
    assert math.isfinite(score(model, [4, 4, 3]).loss)
    with torch.no_grad():
        next(iter(model.parameters())).fill_(NAN)
    found = score(model, [4, 4, 3])
    assert math.isnan(found.loss)
    assert (found.top1, found.nonfinite) == (0, 11)


def test_labels_are_read_as_the_outputs_they_mean() -> None:
    turned, order = tiny.normed(3), torch.arange(tiny.CLASSES).roll(1)
    head = [module for module in turned.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        head.weight[order], head.bias[order] = head.weight.clone(), head.bias.clone()
    plain = score(tiny.normed(3), [4, 4, 3])
    found = evaluate(
        turned, batches([4, 4, 3]), 11, 4, tiny.NORMALISE, single_process(tiny.CPU), None, outputs=order
    )
    assert (found.top1, found.top5) == (plain.top1, plain.top5)
    assert found.loss == pytest.approx(plain.loss, rel=1e-6)


def test_the_loss_is_the_cross_entropy_to_the_resolution_of_fixed_point() -> None:
    logits, labels = torch.randn(500, 7), torch.randint(0, 7, (500,))
    expected = nn.functional.cross_entropy(logits.double(), labels, reduction="sum").item()
    assert counts(logits, labels).loss / 2**24 == pytest.approx(expected, rel=1e-6)


def test_totals_do_not_depend_on_how_samples_are_grouped() -> None:
    logits, labels = torch.randn(101, 7), torch.randint(0, 7, (101,))
    whole = torch.stack(tally(logits, labels))
    for size in (1, 2, 17, 100):
        parts = [torch.stack(tally(logits[i : i + size], labels[i : i + size])) for i in range(0, 101, size)]
        assert torch.equal(torch.stack(parts).sum(0), whole)


def test_padding_adds_black_images_at_the_end() -> None:
    images = tiny.make(3).images
    filled = padded(images, 8)
    assert filled.shape == (8, 8, 8, 3)
    assert torch.equal(filled[:3], images)
    assert not filled[3:].any()
    assert padded(images, 3) is images


class Watched(nn.Module):
    """Remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.normed(3)
        self.shapes: list[int] = []
        self.modes: set[bool] = set()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.shapes.append(len(images))
        self.modes.add(self.inner[1].training)
        return self.inner(images)


def batches(sizes: list[int]) -> Iterator[Batch]:
    whole, first = tiny.make(sum(sizes), 50), 0
    for size in sizes:
        yield tiny.part(whole, slice(first, first + size))
        first += size


def score(model: nn.Module, sizes: list[int], world: World | None = None) -> Score:
    return evaluate(
        model, batches(sizes), sum(sizes), max(sizes), tiny.NORMALISE, world or single_process(tiny.CPU), None
    )


def test_a_score_equals_a_naive_one_and_padding_is_not_counted() -> None:
    model = Watched()
    found = score(model, [4, 4, 3])
    whole = tiny.make(11, 50)
    with torch.no_grad():
        logits = tiny.normed(3).eval()(tiny.normalised(whole.images))
    assert (found.samples, found.top1, found.top5) == naive(logits, whole.labels)
    assert found.loss == pytest.approx(nn.functional.cross_entropy(logits, whole.labels).item(), rel=1e-4)
    assert model.shapes == [4, 4, 4]
    assert found.accuracy == found.top1 / 11
    assert found.accuracy5 == found.top5 / 11


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_scored_in_eval_mode_and_given_back_as_it_was(training: bool) -> None:
    model = Watched().train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    score(model, [4, 3])
    assert model.modes == {False}
    assert all(module.training is training for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("said", [10, 12])
def test_a_wrong_count_stops_the_run(said: int) -> None:
    with pytest.raises(UserError, match=f"11 samples were scored, the evaluation set has {said}"):
        evaluate(tiny.normed(3), batches([4, 4, 3]), said, 4, tiny.NORMALISE, single_process(tiny.CPU), None)


def test_whoever_watches_hears_how_far_it_is() -> None:
    heard: list[int] = []
    evaluate(
        tiny.normed(3),
        batches([4, 4, 3]),
        11,
        4,
        tiny.NORMALISE,
        single_process(tiny.CPU),
        None,
        heard.append,
    )
    assert heard == [4, 8, 11]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_counts_and_loss_are_the_same_on_any_number_of_processes(size: int) -> None:
    """Twenty-three samples in batches of four; to the last bit of the loss."""
    one = ranks.evaluation(single_process(tiny.CPU))
    assert one["samples"] == ranks.SAMPLES
    assert [result["score"] for result in ranks.results(size)] == [one] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_sample_counted_twice_on_one_rank_stops_all(size: int) -> None:
    counted, there_are = (size + 1) * ranks.EVAL_BATCH, size * ranks.EVAL_BATCH
    message = f"{counted} samples were scored, the evaluation set has {there_are}: some were counted twice"
    assert all(message in result["miscount"] for result in ranks.results(size))


@pytest.mark.parametrize(
    ("accuracy", "nonfinite", "weights", "best"),
    [(6, 0, [], True), (6, 1, [], False), (6, 0, ["conv1.weight"], False), (5, 0, [], False)],
)
def test_what_is_not_finite_is_never_the_best(
    accuracy: int, nonfinite: int, weights: list[str], best: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    run: Any = SimpleNamespace(
        reporter=SimpleNamespace(drain=lambda: None, evaluated=lambda *told: told),
        sets=SimpleNamespace(bad=()),
        world=single_process(tiny.CPU),
        output=None,
        state=SimpleNamespace(nonfinite=lambda: weights),
        step=SimpleNamespace(autocast=None),
        log=notes.append,
    )
    monkeypatch.setattr(loop.broken, "agree", lambda *given: None)
    monkeypatch.setattr(
        loop,
        "score_model",
        lambda run: (Score(10, accuracy, 10, 0.5, nonfinite), Score(10, accuracy, 10, 0.5)),
    )
    _, position = loop.evaluate_run(run, Position(7, 10, best_step=3, best_accuracy=0.5))
    assert position.best_step == (7 if best else 3)
    assert bool(notes) is (nonfinite > 0 or bool(weights))


def test_weights_that_are_not_finite_are_found_even_where_the_output_is() -> None:
    trained = tiny.state(tiny.normed())
    assert trained.nonfinite() == []
    with torch.no_grad():
        trained.module[0].weight[0] = -math.inf
        trained.module[1].running_var[0] = NAN
        trained.module[1].running_mean[0] = math.inf
    assert trained.nonfinite() == ["0.weight", "1.running_var"]
