"""Losses are per-sample sums, and mixing does to a batch what a loop over its images would do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import Transform, mixing_plan
from drumline.training.task import Classification, mixed, partner
from tests.training import tiny


def plan(transform: Transform, count: int, seed: int = 3) -> torch.Tensor:
    import numpy as np

    return torch.from_numpy(mixing_plan(transform, seed, Request(2, np.arange(50, 50 + count))))


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [0]), (2, [1, 0]), (3, [1, 0, 2]), (5, [1, 0, 3, 2, 4]), (6, [1, 0, 3, 2, 5, 4])],
)
def test_neighbours_are_partners_and_a_last_odd_one_is_its_own(count: int, expected: list[int]) -> None:
    assert partner(torch.arange(count)).tolist() == expected


@pytest.mark.parametrize("count", [6, 7])
@pytest.mark.parametrize(
    "transform",
    [
        Transform(8, "none", mixup=0.4),
        Transform(8, "none", cutmix=1.0),
        Transform(8, "none", mixup=0.4, cutmix=1.0),
    ],
)
def test_mixing_equals_a_loop_over_images(transform: Transform, count: int) -> None:
    images, mix = torch.randn(count, 3, 8, 8), plan(transform, count)
    expected = images.clone()
    for i in range(count):
        other = i + 1 if i % 2 == 0 else i - 1
        other = i if other == count else other
        share, label_share, x0, y0, x1, y1 = mix[i].tolist()
        x0, y0, x1, y1 = int(x0), int(y0), int(x1), int(y1)
        expected[i] = share * images[i] + (1 - share) * images[other]
        expected[i, :, y0:y1, x0:x1] = images[other, :, y0:y1, x0:x1]
        pasted = (x1 - x0) * (y1 - y0)
        assert label_share == pytest.approx(1 - pasted / 64 if pasted else share, abs=1e-6)
    torch.testing.assert_close(mixed(images, mix), expected)
    assert not torch.equal(expected, images)


def test_an_unmixed_image_keeps_its_bits() -> None:
    images = torch.randn(4, 3, 8, 8)
    mix = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]] * 4)
    assert torch.equal(mixed(images, mix), images)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("count", [6, 7])
def test_mixed_labels_cost_what_soft_labels_cost(count: int, smoothing: float) -> None:
    mix = plan(Transform(8, "none", mixup=0.4, cutmix=1.0), count)
    batch = tiny.make(count, mix=mix)
    logits = torch.randn(count, tiny.CLASSES)
    outcome = Classification(smoothing)(_giving(logits), torch.empty(0), batch)
    hot = nn.functional.one_hot(batch.labels, tiny.CLASSES).double()
    expected = 0.0
    for i in range(count):
        other = i ^ 1 if i ^ 1 < count else i
        share = float(mix[i, 1])
        target = share * hot[i] + (1 - share) * hot[other]
        target = (1 - smoothing) * target + smoothing / tiny.CLASSES
        expected -= float((target * logits[i].double().log_softmax(0)).sum())
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_plain_labels_cost_the_sum_of_smoothed_cross_entropies(smoothing: float) -> None:
    batch, logits = tiny.make(9), torch.randn(9, tiny.CLASSES)
    outcome = Classification(smoothing)(_giving(logits), torch.empty(0), batch)
    logs = logits.double().log_softmax(1)
    own = -logs[torch.arange(9), batch.labels]
    expected = ((1 - smoothing) * own + smoothing * -logs.mean(1)).sum()
    assert outcome.loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_class_weights_scale_each_label_and_do_not_depend_on_how_a_batch_is_divided(parts: int) -> None:
    weights = torch.tensor([0.5, 2.0, 1.0, 0.0, 1.5, 1.0, 3.0, 1.0, 1.0, 0.25])[: tiny.CLASSES]
    mix = plan(Transform(8, "none", mixup=0.4, cutmix=1.0), 12)
    batch, logits = tiny.make(12, mix=mix), torch.randn(12, tiny.CLASSES)
    logs = logits.double().log_softmax(1)
    expected = 0.0
    for i in range(12):
        for label, share in ((batch.labels[i], mix[i, 1]), (batch.labels[i ^ 1], 1 - mix[i, 1])):
            loss = -(0.9 * logs[i, label] + 0.1 * logs[i].mean())
            expected += float(share * weights[label] * loss)
    objective = Classification(0.1, tiny.CLASSES, weights)
    size, total = 12 // parts, 0.0
    for first in range(0, 12, size):
        rows = slice(first, first + size)
        part = batch._replace(labels=batch.labels[rows], mix=mix[rows])
        total += float(objective(_giving(logits[rows]), torch.empty(0), part).loss)
    assert total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mixed", [False, True])
def test_samples_without_a_label_have_no_loss_and_the_others_that_of_their_mean(mixed: bool) -> None:
    """A mixed image counts with the labels that it has."""
    batch = tiny.make(12, mix=plan(Transform(8, "none", mixup=0.4), 12) if mixed else None)
    logits = torch.randn(12, tiny.CLASSES)
    labels = batch.labels.clone()
    labels[::3] = -1
    weights = torch.rand(tiny.CLASSES)
    outcome = Classification(0.1, tiny.CLASSES, weights, labelled=8 / 12)(
        _giving(logits), torch.empty(0), batch._replace(labels=labels)
    )
    expected = 0.0
    for i in range(12):
        share = float(batch.mix[i, 1]) if mixed else 1.0
        for label, part in ((labels[i], share), (labels[i ^ 1], 1 - share)):
            if label >= 0:
                loss = nn.functional.cross_entropy(logits[i], label, label_smoothing=0.1)
                expected += part * float(weights[label] * loss)
    assert outcome.loss.item() == pytest.approx(expected * 12 / 8, rel=1e-5)
    assert outcome.unlabelled is not None
    assert (int(outcome.unlabelled), int(outcome.correct)) == (4, int((logits.argmax(1) == labels).sum()))


def test_correct_counts_the_images_own_label() -> None:
    batch = tiny.make(40)
    logits = torch.randn(40, tiny.CLASSES)
    expected = sum(int(row.argmax()) == int(label) for row, label in zip(logits, batch.labels, strict=True))
    assert int(Classification()(_giving(logits), torch.empty(0), batch).correct) == expected


def test_the_loss_is_computed_in_fp32_from_half_precision_logits() -> None:
    batch, logits = tiny.make(5), torch.randn(5, tiny.CLASSES).bfloat16()
    outcome = Classification()(_giving(logits), torch.empty(0), batch)
    assert outcome.loss.dtype == torch.float32
    expected = nn.functional.cross_entropy(logits.double(), batch.labels, reduction="sum")
    assert outcome.loss.item() == pytest.approx(expected.item(), rel=1e-6)


def _giving(logits: torch.Tensor) -> nn.Module:
    """A model that has made up its mind."""

    class Given(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return logits

    return Given()
