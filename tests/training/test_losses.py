"""The loss on the labels: one number per sample, the user's own checked before the first step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from drumline.config.learning import Train
from drumline.core.errors import UserError
from drumline.data.feed.balance import class_weights
from drumline.training.losses import OwnLoss, binary_cross_entropy, loss_weights, make_loss
from drumline.training.task import Classification
from tests.own_code import focal
from tests.training import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_bce_asks_of_each_class_whether_it_is_the_label(smoothing: float) -> None:
    logits, labels = torch.randn(7, 5), torch.randint(5, (7,))
    targets = F.one_hot(labels, 5) * (1 - smoothing) + smoothing / 5
    ones, zeros = logits.double().sigmoid().log(), (-logits.double()).sigmoid().log()
    expected = -(targets * ones + (1 - targets) * zeros).mean(1)
    torch.testing.assert_close(
        binary_cross_entropy(logits, labels, smoothing).double(), expected, atol=1e-6, rtol=1e-5
    )
    made = make_loss(Train(loss="bce", label_smoothing=smoothing), 5, CPU)
    assert torch.equal(made(logits, labels), binary_cross_entropy(logits, labels, smoothing))


def test_an_own_loss_gets_fp32_logits_and_is_mixed_as_the_built_in_ones() -> None:
    loss = make_loss(Train(loss="tests.own_code:focal"), tiny.CLASSES, CPU)
    batch = tiny.make(6)
    mixing = torch.tensor([[0.7, 0.7, 0, 0, 0, 0]] * 6)
    logits = torch.randn(6, tiny.CLASSES).bfloat16().float()
    objective = Classification(classes=tiny.CLASSES, loss=loss)
    others = batch.labels[[1, 0, 3, 2, 5, 4]]
    mixed = objective.loss_sums(logits, batch._replace(mix=mixing)).loss
    with torch.autocast("cpu", torch.bfloat16):
        again = objective.loss_sums(logits, batch._replace(mix=mixing)).loss
    expected = (0.7 * focal(logits, batch.labels) + 0.3 * focal(logits, others)).sum()
    torch.testing.assert_close(mixed, expected)
    assert torch.equal(mixed, again)


def test_a_reduction_is_turned_off() -> None:
    logits, labels = torch.randn(6, 4), torch.arange(6) % 4
    for name in ("torch.nn:MultiMarginLoss", "torch.nn.functional:multi_margin_loss"):
        losses = OwnLoss(name, 4, CPU)(logits, labels)
        assert torch.equal(losses, F.multi_margin_loss(logits, labels, reduction="none"))


def test_a_module_keeps_its_constants() -> None:
    loss = OwnLoss("tests.own_code:Weighted", 10, CPU)
    logits, labels = torch.randn(6, 10), torch.arange(6)
    expected = F.cross_entropy(logits, labels, torch.linspace(0.5, 1.5, 10), reduction="none")
    assert torch.equal(loss(logits, labels), expected)
    loss.check()


def test_a_module_that_remembers_is_rejected() -> None:
    loss = OwnLoss("tests.own_code:Remembering", 10, CPU)
    objective = Classification(classes=10, loss=loss)
    objective.check()
    loss(torch.randn(6, 10), torch.arange(6))
    with pytest.raises(UserError, match=r"^train.loss tests.own_code:Remembering: changes its buffers"):
        objective.check()


def test_an_own_loss_runs_outside_any_autocast() -> None:
    loss, logits, labels = (
        OwnLoss("tests.own_code:of_products", 4, CPU),
        torch.randn(6, 4),
        torch.arange(6) % 4,
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(logits, labels), F.cross_entropy(logits, labels, reduction="none"))


def test_a_loss_may_draw_random_numbers_and_keep_what_each_call_computes_alike() -> None:
    OwnLoss("tests.own_code:Caching", 4, CPU)


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        ("Calls", "keeps a state between its calls", "from logits and labels alone"),
        ("weaker", "keeps a state between its calls", "from logits and labels alone"),
        ("averaged", r"returned a tensor of shape \(\) for 3 samples", "reduction='none'"),
        ("detached", "do not depend on the logits", "without .detach()"),
        ("of_three", r"cannot be called as \(logits, labels\)", "the first two parameters"),
        ("Learned", "has the parameters scale, which no optimizer trains", "model.name"),
        ("focus", "has nothing called focus", "define focus(logits, labels)"),
    ],
)
def test_a_mistake_is_reported_before_the_first_step(name: str, words: str, fix: str) -> None:
    with pytest.raises(UserError, match=rf"^train.loss tests.own_code:{name}: .*{words}") as error:
        make_loss(replace(Train(), loss=f"tests.own_code:{name}"), 10, CPU)
    assert fix in error.value.fix


def test_a_loss_for_other_targets_is_reported_with_the_shapes() -> None:
    with pytest.raises(
        UserError, match=r"raised ValueError for logits of shape \(3, 4\) and labels of shape \(3,\)"
    ):
        OwnLoss("torch.nn:BCEWithLogitsLoss", 4, CPU)


def test_weights_have_a_mean_of_one_over_the_samples_that_are_drawn() -> None:
    source = tiny.imbalanced(30, 10, 0, 5)
    for balance in ("none", "sqrt", "balanced"):
        drawn = class_weights((30, 10, 0, 5), balance) / class_weights((30, 10, 0, 5), balance).sum()
        for named in (None, {}, {"b": 4.0}, {"a": 0.0}):
            weights = loss_weights(source, balance, named)
            assert (weights * drawn).sum() == pytest.approx(1)
    assert loss_weights(source, "none", None).tolist() == pytest.approx([0.5, 1.5, 0, 3])
    assert loss_weights(source, "none", {"b": 4.0})[1] == pytest.approx(
        4 * loss_weights(source, "none", {"b": 4.0})[0]
    )


def test_weights_of_unknown_classes_or_of_nothing_are_rejected() -> None:
    with pytest.raises(UserError, match="no class 'bee'") as raised:
        loss_weights(tiny.imbalanced(3, 4), "none", {"bee": 2.0})
    assert "'a', 'b'" in raised.value.fix
    with pytest.raises(UserError, match="every class in the data has weight 0"):
        loss_weights(tiny.imbalanced(3, 4), "none", {"a": 0.0, "b": 0.0})
