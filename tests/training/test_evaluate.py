"""Every sample is scored once, together with the same others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drumline.core.errors import UserError
from drumline.core.precision import FP32
from drumline.data.feed.batch import Batch
from drumline.parallel.world import World, single_process
from drumline.state.manifest import Position
from drumline.training import loop
from drumline.training.evaluate import evaluate, padded
from drumline.training.metrics import METRICS, Score
from tests.training import ranks, tiny
from tests.training.test_metrics import naive

NAN = math.nan


def test_a_score_with_an_output_that_is_not_finite_has_no_loss() -> None:
    model = tiny.normed(3)
    assert math.isfinite(score(model, [4, 4, 3]).values["loss"])
    with torch.no_grad():
        next(iter(model.parameters())).fill_(NAN)
    found = score(model, [4, 4, 3])
    assert math.isnan(found.values["loss"])
    assert (found.correct, found.nonfinite) == (0, 11)


def test_labels_are_read_as_the_outputs_they_mean() -> None:
    turned, order = tiny.normed(3), torch.arange(tiny.CLASSES).roll(1)
    head = [module for module in turned.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        head.weight[order], head.bias[order] = head.weight.clone(), head.bias.clone()
    plain = score(tiny.normed(3), [4, 4, 3])
    found = evaluate(
        turned, batches([4, 4, 3]), 11, 4, tiny.NORMALISE, single_process(tiny.CPU), FP32, outputs=order
    )
    assert found.counts == plain.counts
    assert found.values["loss"] == pytest.approx(plain.values["loss"], rel=1e-6)


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
        model, batches(sizes), sum(sizes), max(sizes), tiny.NORMALISE, world or single_process(tiny.CPU), FP32
    )


def test_a_score_equals_a_naive_one_and_padding_is_not_counted() -> None:
    model = Watched()
    found = score(model, [4, 4, 3])
    whole = tiny.make(11, 50)
    with torch.no_grad():
        logits = tiny.normed(3).eval()(tiny.normalised(whole.images))
    assert (found.samples, found.correct, found.counts["correct5"]) == naive(logits, whole.labels)
    assert found.values["loss"] == pytest.approx(
        nn.functional.cross_entropy(logits, whole.labels).item(), rel=1e-4
    )
    assert model.shapes == [4, 4, 4]
    assert found.accuracy == found.correct / 11
    assert found.values["top5"] == found.counts["correct5"] / 11


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
        evaluate(tiny.normed(3), batches([4, 4, 3]), said, 4, tiny.NORMALISE, single_process(tiny.CPU), FP32)


def test_progress_is_reported_after_each_batch() -> None:
    done: list[int] = []
    evaluate(
        tiny.normed(3),
        batches([4, 4, 3]),
        11,
        4,
        tiny.NORMALISE,
        single_process(tiny.CPU),
        FP32,
        done.append,
    )
    assert done == [4, 8, 11]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_counts_and_metrics_are_the_same_on_any_number_of_processes(size: int) -> None:
    """Twenty-three samples in batches of four; to the last bit of each metric, those of several sums too."""
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
    logged: list[str] = []
    recorded_best: list[bool] = []

    def recorded(step: int, seen: object, best: bool) -> None:
        recorded_best.append(best)

    run: Any = SimpleNamespace(
        reporter=SimpleNamespace(drain=lambda: None, evaluated=lambda *given: None),
        page=SimpleNamespace(recording=lambda: SimpleNamespace(add=None), evaluated=recorded),
        sets=SimpleNamespace(bad=()),
        world=single_process(tiny.CPU),
        record_broken_samples=lambda: None,
        state=SimpleNamespace(nonfinite=lambda: weights),
        step=SimpleNamespace(precision=FP32),
        best_metric=METRICS[0],
        log=logged.append,
    )
    monkeypatch.setattr(loop, "gather_bad_samples", lambda *given: None)
    monkeypatch.setattr(
        loop,
        "score_model",
        lambda run, record: tuple(Score(10, odd, {"top1": accuracy / 10}, {}) for odd in (nonfinite, 0)),
    )
    _, position = loop.evaluate(run, Position(7, 10, best_step=3, best_value=0.5))
    assert position.best_step == (7 if best else 3)
    assert recorded_best == [best]
    assert bool(logged) is (nonfinite > 0 or bool(weights))


def test_weights_that_are_not_finite_are_found_even_where_the_output_is() -> None:
    trained = tiny.state(tiny.normed())
    assert trained.nonfinite() == []
    with torch.no_grad():
        trained.module[0].weight[0] = -math.inf
        trained.module[1].running_var[0] = NAN
        trained.module[1].running_mean[0] = math.inf
    assert trained.nonfinite() == ["0.weight", "1.running_var"]
