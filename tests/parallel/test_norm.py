"""BatchNorm with too few samples: refused before the first step, or warned of; always with the field that decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from drumline.config.recipe import Data, Recipe, Run, Train
from drumline.core.errors import UserError
from drumline.parallel.norm import SmallestBatch, few_samples, over_all
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import World, single_process
from drumline.training.loop import train
from tests.training import tiny

STAGES = (
    "parallel.layout=pipeline parallel.virtual=true parallel.stages=2 parallel.micro_batches=4 data.batch=5"
)


def pooled(classes: int) -> nn.Module:
    """BatchNorm on maps of one pixel."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, classes)
    )


def smallest(recipe: Recipe, world: World) -> SmallestBatch:
    return create_strategy(recipe, world).smallest_batch()


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        ("data.batch=1", "data.batch = 1:", "a larger --data.batch"),
        ("data.batch=4 train.accumulate=4", "train.accumulate = 4", "smaller --train.accumulate"),
        ("data.batch=4 run.strict=true run.shards=4", "run.shards = 4", "--train.sync_bn"),
        (f"{STAGES} parallel.split=even", "parallel.micro_batches = 4", "--parallel.batchnorm frozen"),
        (f"{STAGES} parallel.split=time", "parallel.micro_batches = 4", "--parallel.batchnorm frozen"),
    ],
)
def test_one_value_per_channel_is_refused_before_training(
    tmp_path: Path, words: str, named: str, remedy: str
) -> None:
    recipe = Recipe.from_args(
        (
            "data.source=tests.training.few_ranks:load",
            "model.name=tests.parallel.test_norm:pooled",
            "train.steps=2",
            "parallel.threads=1",
            "run.device=cpu",
            f"run.dir={tmp_path}",
            *words.split(),
        )
    )
    with pytest.raises(UserError) as refused:
        train(recipe, single_process(tiny.CPU))
    assert refused.value.what.startswith(named)
    assert "BatchNorm cannot train on one value per channel" in refused.value.what
    assert remedy in refused.value.fix


def test_few_samples_in_a_shard_a_share_or_a_micro_batch_are_warned_of() -> None:
    one, three = single_process(tiny.CPU), replace(single_process(tiny.CPU), size=3)
    strict = Recipe(run=Run(strict=True, shards=8), data=Data(batch=16))
    assert "run.shards = 8 makes shards of 2" in few_samples(tiny.normed(), smallest(strict, one))
    assert "--train.sync_bn" in few_samples(tiny.normed(), smallest(strict, one))
    assert "train.accumulate = 4" in few_samples(
        tiny.normed(), smallest(Recipe(data=Data(batch=16), train=Train(accumulate=4)), one)
    )
    assert (
        "with data.batch = 20, one of 3 processes gets only 6 samples: BatchNorm (1 layer) computes its statistics"
        in few_samples(tiny.normed(), smallest(Recipe(data=Data(batch=20)), three))
    )


def test_enough_samples_and_norms_over_all_of_them_are_not_warned_of() -> None:
    one = single_process(tiny.CPU)
    strict = Recipe(run=Run(strict=True, shards=8), data=Data(batch=16))
    assert not few_samples(tiny.normed(), smallest(replace(strict, data=Data(batch=64)), one))
    assert not few_samples(tiny.plain(), smallest(strict, one))
    assert not few_samples(over_all(tiny.normed(), torch.Tensor.clone), smallest(strict, one))
    assert not few_samples(tiny.normed().eval(), smallest(strict, one))


def test_mixed_samples_stay_in_pairs() -> None:
    three = replace(single_process(tiny.CPU), size=3)
    assert smallest(Recipe(data=Data(batch=8)), three).samples == 2
    assert smallest(Recipe(data=Data(batch=9)), three).samples == 3
    assert smallest(Recipe(data=Data(batch=10, mixup=0.2)), three).samples == 2
