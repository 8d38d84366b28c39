"""What the first step, taken once without effect, finds out about a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.parallel.world import single_process
from drumline.train.loop import train
from tests.train import tiny


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
        "model.name=tests.train.test_rehearse:by_layer",
        "model.name=tests.train.test_rehearse:by_layer train.ema=0.9 optim.name=lamb",
        "model.name=tests.train.test_rehearse:by_function optim.clip=1",
        "model.name=tests.train.test_rehearse:by_function run.strict=true run.shards=2",
    ],
)
def test_a_sparse_gradient_is_refused_by_name_before_the_first_step(tmp_path: Path, words: str) -> None:
    recipe = Recipe.from_args(
        (
            "data.source=tests.train.few_ranks:load",
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
