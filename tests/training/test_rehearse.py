"""What the first step, taken once without effect, finds out about a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drumline.config.recipe import Parallel, Recipe, Train
from drumline.core.errors import UserError
from drumline.parallel.strategy import strategy_class
from drumline.parallel.world import World, single_process
from drumline.training.loop import train
from drumline.training.rehearse import why_not_captured
from tests.training import tiny


class Words(nn.Module):
    """Adds a learnt vector to each row, looked up by a layer or by a function."""

    def __init__(self, by_layer: bool) -> None:
        super().__init__()
        self.table, self.by_layer = nn.Embedding(4, 3, sparse=by_layer), by_layer

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(len(rows)) % 4
        found = self.table(ids) if self.by_layer else F.embedding(ids, self.table.weight, sparse=True)
        return rows + found


def by_layer(classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), Words(True), nn.Linear(3, classes))


def by_function(classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), Words(False), nn.Linear(3, classes))


@pytest.mark.parametrize(
    "words",
    [
        "model.name=tests.training.test_rehearse:by_layer",
        "model.name=tests.training.test_rehearse:by_layer train.ema=0.9 optim.name=lamb",
        "model.name=tests.training.test_rehearse:by_function optim.clip=1",
        "model.name=tests.training.test_rehearse:by_function run.strict=true run.shards=2",
    ],
)
def test_a_sparse_gradient_is_rejected_by_name_before_the_first_step(tmp_path: Path, words: str) -> None:
    recipe = Recipe.from_args(
        (
            "data.source=tests.training.few_ranks:load",
            "data.batch=16",
            "train.steps=2",
            "parallel.threads=1",
            "run.device=cpu",
            f"run.dir={tmp_path}",
            *words.split(),
        )
    )
    with pytest.raises(UserError) as refused:
        train(recipe, single_process(tiny.CPU))
    assert refused.value.what.startswith("the gradient of 2.table.weight is sparse")
    assert "sparse=False" in refused.value.fix


GPU = replace(single_process(torch.device("cpu")), device=torch.device("cuda", 0))


def prepared(recipe: Recipe, world: World, spans_devices: bool = False) -> Any:
    """As much of a run as decides about its CUDA graph."""
    kind = strategy_class(recipe, world.size)
    strategy = SimpleNamespace(world=world)
    strategy.why_not_captured = MethodType(kind.why_not_captured, strategy)
    task = SimpleNamespace(spans_devices=spans_devices)
    return SimpleNamespace(recipe=recipe, world=world, strategy=strategy, task=task)


@pytest.mark.parametrize(
    ("recipe", "world", "reason"),
    [
        (Recipe(), single_process(torch.device("cpu")), "no GPU"),
        (Recipe(), replace(GPU, size=2), "several processes"),
        (Recipe(parallel=Parallel(layout="dp")), GPU, "DataParallel"),
        (Recipe(train=Train(gradient_checkpointing=True)), GPU, "gradient checkpointing"),
        (Recipe(train=Train(capture="off")), GPU, "train.capture = off"),
    ],
)
def test_a_step_is_captured_only_where_that_is_right_and_the_reason_is_given(
    recipe: Recipe, world: Any, reason: str
) -> None:
    why = why_not_captured(prepared(recipe, world))
    assert reason in why
    if recipe.train.capture == "auto":
        with pytest.raises(UserError, match=r"train.capture = on is not possible"):
            why_not_captured(prepared(replace(recipe, train=replace(recipe.train, capture="on")), world))


def test_one_gpu_alone_is_captured() -> None:
    assert why_not_captured(prepared(Recipe(), GPU)) == ""


def test_a_teacher_on_several_gpus_is_not_captured() -> None:
    assert "several GPUs" in why_not_captured(prepared(Recipe(), GPU, spans_devices=True))


def ends_in(last: nn.Module, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes), last
    )


def softmax(classes: int) -> nn.Module:
    return ends_in(nn.Softmax(dim=1), classes)


def sigmoid(classes: int) -> nn.Module:
    return ends_in(nn.Sigmoid(), classes)


def log_softmax(classes: int) -> nn.Module:
    return ends_in(nn.LogSoftmax(dim=1), classes)


def likelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(logits.clamp_min(1e-9).log(), labels, reduction="none")


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("model.name=tests.training.test_rehearse:softmax", True),
        ("model.name=tests.training.test_rehearse:softmax train.accumulate=2 data.mixup=0.2", True),
        ("model.name=tests.training.test_rehearse:softmax run.strict=true run.shards=2", True),
        ("model.name=tests.training.test_rehearse:softmax train.loss=bce", True),
        (
            "model.name=tests.training.test_rehearse:softmax parallel.layout=pipeline parallel.stages=2 "
            "parallel.virtual=true",
            True,
        ),
        ("model.name=tests.training.test_rehearse:sigmoid", False),
        ("model.name=tests.training.test_rehearse:log_softmax", False),
        (
            "model.name=tests.training.test_rehearse:softmax train.loss=tests.training.test_rehearse:likelihood",
            False,
        ),
    ],
)
def test_a_model_that_ends_in_a_softmax_is_a_warning(tmp_path: Path, words: str, warned: bool) -> None:
    recipe = Recipe.from_args(
        (
            "data.source=tests.training.few_ranks:load",
            "data.batch=16",
            "train.steps=2",
            "parallel.threads=1",
            f"run.dir={tmp_path}",
            "run.name=a",
            "run.device=cpu",
            *words.split(),
        )
    )
    train(recipe, single_process(torch.device("cpu")))
    log = (tmp_path / "a" / "log.txt").read_text()
    assert ("WARNING: the outputs of the model are probabilities" in log) == warned
