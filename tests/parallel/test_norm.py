"""BatchNorm with too few samples: refused before the first step, or warned of; always with the field that decides."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drumline.config.recipe import Data, Recipe, Run, Train
from drumline.core.errors import UserError
from drumline.models.base import copy_model
from drumline.parallel.norm import (
    MODES,
    SmallestBatch,
    WorldNorm,
    apply_norm_mode,
    commit_statistics,
    describe_norm,
    few_samples,
    forget_statistics,
    norm_count,
    over_all,
)
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import World, single_process
from drumline.training.loop import train
from drumline.training.state import Average, recompute_blocks
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
def test_one_value_per_channel_is_rejected_before_training(
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


class Net(nn.Module):
    """Norms of two kinds, beside one of samples."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=momentum), nn.ReLU())
            for _ in range(2)
        )
        self.group = nn.GroupNorm(2, 6)
        self.flat = nn.BatchNorm1d(6, momentum=momentum)
        self.head = nn.Linear(6, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.body:
            x = block(x)
        return self.head(self.flat(self.group(x).mean((2, 3))))


def images(count: int, seed: int = 0) -> Tensor:
    """Away from zero, as after a ReLU: squares of such values cancel."""
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 + 5


def run(model: nn.Module, parts: Sequence[Tensor], commit: bool = True) -> list[Tensor]:
    """A step's forwards and backwards; gives the gradients."""
    model.zero_grad()
    forget_statistics(model)
    for part in parts:
        model(part).square().sum().backward()
    if commit:
        commit_statistics(model)
    return [parameter.grad.clone() for parameter in model.parameters()]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def test_micro_is_plain_accumulation() -> None:
    plain, model = Net(), Net()
    assert apply_norm_mode(model, "micro", None, 4) is model
    assert same(run(plain, images(16).chunk(4)), run(model, images(16).chunk(4)))
    assert same(buffers(plain), buffers(model))
    assert model.flat.num_batches_tracked == 4


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (7, 6, 3)])
def test_deferred_statistics_are_those_of_one_norm_over_the_batch(
    momentum: float | None, sizes: Sequence[int]
) -> None:
    """The norm alone, so that its input does not depend on how an earlier one cuts the batch. Over three steps."""
    for kind, shape in (
        (nn.BatchNorm2d, (16, 5, 6, 6)),
        (nn.BatchNorm1d, (16, 5)),
        (nn.BatchNorm1d, (16, 5, 7)),
    ):
        whole, model = kind(5, momentum=momentum), kind(5, momentum=momentum)
        apply_norm_mode(model, "deferred", None, len(sizes))
        for step in range(3):
            batch = torch.randn(shape, generator=torch.Generator().manual_seed(step)) * 3 + 20
            whole(batch)
            for part in batch.split(list(sizes)):
                before = buffers(model)
                model(part)
                assert same(before, buffers(model))  # nothing moves before the commit
            commit_statistics(model)
            assert model.num_batches_tracked == step + 1
            for name in ("running_mean", "running_var"):
                theirs = getattr(whole, name)
                assert ((getattr(model, name) - theirs).abs() / theirs.abs()).max() < 1e-6


def test_deferred_norms_normalise_each_micro_batch_by_itself() -> None:
    plain, model = Net(), Net()
    apply_norm_mode(model, "deferred", None, 4)
    assert same(run(plain, images(16).chunk(4)), run(model, images(16).chunk(4)))
    assert list(plain.state_dict()) == list(model.state_dict())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_a_norm_used_twice_in_a_forward_follows_both() -> None:
    norm, whole = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    apply_norm_mode(norm, "deferred", None, 2)
    a, b = torch.randn(8, 3), torch.randn(4, 3) + 2
    norm(a), norm(b)
    commit_statistics(norm)
    whole(torch.cat([a, b]))
    torch.testing.assert_close(norm.running_var, whole.running_var, rtol=1e-6, atol=0)


def test_a_rehearsed_and_undone_step_leaves_nothing_for_the_next() -> None:
    """Also one that broke off before its commit, and a step without any forward."""
    model, other = Net(), Net()
    for each in (model, other):
        apply_norm_mode(each, "deferred", None, 4)
    before = buffers(model)
    run(model, images(16, seed=1).chunk(4))
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
    model(images(16, seed=2))
    run(model, images(16).chunk(4))
    run(other, images(16).chunk(4))
    assert same(buffers(model), buffers(other))
    after = buffers(model)
    commit_statistics(model)
    assert same(after, buffers(model))


@pytest.mark.parametrize("first", ["norms", "recomputation"])
def test_recomputation_does_not_feed_the_statistics_twice(first: str) -> None:
    """A norm may be a block by itself, or stand in one."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        )

    plain, model = build(), build()
    apply_norm_mode(plain, "deferred", None, 4)
    if first == "norms":
        apply_norm_mode(model, "deferred", None, 4)
    assert recompute_blocks(model) == 3
    if first == "recomputation":
        apply_norm_mode(model, "deferred", None, 4)
    for step in range(2):
        parts = images(16, step).chunk(4)
        assert same(run(plain, parts), run(model, parts))
        assert same(buffers(plain), buffers(model))
    assert model[1].num_batches_tracked == 2


def test_a_deferred_norm_in_evaluation_is_the_plain_one() -> None:
    plain, model = Net(), Net()
    apply_norm_mode(model, "deferred", None, 4)
    run(model, images(16).chunk(4))
    plain.load_state_dict(model.state_dict())
    before = buffers(model)
    assert torch.equal(plain.eval()(images(3)), model.eval()(images(3)))
    commit_statistics(model)
    assert same(before, buffers(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_moving_average_has_norms_of_its_own(mode: str) -> None:
    model = apply_norm_mode(Net(), mode, torch.clone, 4)
    model.train()(images(4))  # something has been seen
    average = Average(copy_model(model).eval().requires_grad_(False), model, 0.5)
    state = {name: tensor.clone() for name, tensor in average.module.state_dict().items()}
    expected = average.module(images(4))
    run(model, images(16).chunk(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    assert all(torch.equal(tensor, state[name]) for name, tensor in average.module.state_dict().items())
    assert torch.equal(average.module(images(4)), expected)
    copied = copy.deepcopy(model).train()
    before = buffers(model)
    run(copied, images(16).chunk(4))
    assert same(before, buffers(model))
    assert (mode == "frozen") == same(before, buffers(copied))


def test_with_one_micro_batch_there_is_nothing_to_defer() -> None:
    model = apply_norm_mode(Net(), "deferred", None, 1)
    model(images(4))
    assert model.flat.num_batches_tracked == 1


def test_frozen_norms_stay_frozen_and_train_their_affine_parameters() -> None:
    model = Net()
    run(model, images(16).chunk(4))
    apply_norm_mode(model, "frozen", None, 4)
    expected = copy.deepcopy(model).eval()(images(4))
    before = buffers(model)
    model.train()
    assert model.training
    assert model.body[0].training
    assert not model.flat.training
    assert torch.equal(model(images(4)), expected)
    run(model, images(16).chunk(4))
    assert same(before, buffers(model))
    assert model.flat.weight.grad.abs().sum() > 0
    assert model.eval().train().body[0][1].training is False


def test_sync_spans_what_total_sums_over() -> None:
    """Two replicas with the same samples: the sum over them is twice one's own."""
    plain, model = nn.Sequential(nn.BatchNorm2d(3)), nn.Sequential(nn.BatchNorm2d(3))
    weight = model[0].weight
    apply_norm_mode(model, "sync", lambda values: values * 2, 2)
    assert isinstance(model[0], WorldNorm)
    assert model[0].weight is weight
    assert list(plain.state_dict()) == list(model.state_dict())
    for part in images(8).chunk(2):
        torch.testing.assert_close(model(part), plain(part.repeat(2, 1, 1, 1))[:4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model[0].running_var, plain[0].running_var, rtol=1e-6, atol=0)
    assert model[0].num_batches_tracked == 2


def test_sync_of_one_replica_leaves_plain_norms_and_frees_those_of_torch() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3))
    apply_norm_mode(model, "sync", None, 2)
    assert type(model[0]) is nn.BatchNorm2d
    assert isinstance(model[1], WorldNorm)
    model(images(4))


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_other_stages_may_be_on_the_meta_device(mode: str) -> None:
    with torch.device("meta"):
        model = Net()
    model.flat = nn.BatchNorm1d(6)
    made = apply_norm_mode(model, mode, torch.clone, 2)
    made.train()
    forget_statistics(made)
    for _ in range(2):
        made.flat(torch.randn(4, 6))
    commit_statistics(made)
    moves = {"micro": 2, "deferred": 1, "sync": 2, "frozen": 0}
    assert made.flat.num_batches_tracked == moves[mode]
    assert made.body[0][1].weight.is_meta
    assert list(made.state_dict()) == list(Net().state_dict())


class Activated(nn.BatchNorm2d):
    """As some libraries have them."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop = nn.Dropout(0.1)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize("mode", ["deferred", "sync"])
def test_more_than_a_batch_norm_is_rejected_where_it_would_change(mode: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Activated(3))
    with pytest.raises(
        UserError, match=rf"parallel.batchnorm = {mode}: 1 is a Activated, which is more than"
    ):
        apply_norm_mode(model, mode, torch.clone, 2)
    assert type(model[1]) is Activated


def test_more_than_a_batch_norm_may_be_frozen_or_left_as_it_is() -> None:
    model = nn.Sequential(Activated(3))
    assert apply_norm_mode(model, "micro", None, 2)[0].training
    apply_norm_mode(model, "frozen", None, 2).train()
    assert not model[0].training
    assert model[0].drop.training


@pytest.mark.parametrize("mode", ["micro", "deferred"])
def test_torchs_own_sync_norm_is_rejected_where_stages_would_wait_for_each_other(mode: str) -> None:
    with pytest.raises(UserError, match=r"parallel.batchnorm = .*0 is a SyncBatchNorm.*other stages"):
        apply_norm_mode(nn.Sequential(nn.SyncBatchNorm(3)), mode, None, 2)


def test_without_running_statistics_nothing_is_deferred_and_nothing_can_freeze() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    apply_norm_mode(norm, "deferred", None, 2)
    norm(torch.randn(4, 3))
    commit_statistics(norm)
    with pytest.raises(UserError, match=r"parallel.batchnorm = frozen: the model has no running statistics"):
        apply_norm_mode(norm, "frozen", None, 2)


def test_other_norms_are_left_alone() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.GroupNorm(1, 3), nn.LayerNorm(8))
    kinds = [type(part) for part in model]
    for mode in MODES:
        apply_norm_mode(model, mode, torch.clone, 2).train()
    assert [type(part) for part in model] == kinds
    assert all(part.training and "forward" not in vars(part) for part in model)
    assert norm_count(model) == 0
    assert describe_norm("micro", norm_count(model), 4, 16) == ""
    assert describe_norm("deferred", norm_count(model), 4, 16) == (
        "parallel.batchnorm = deferred changes nothing: the model has no BatchNorm"
    )


def test_the_choice_is_said_with_its_meaning() -> None:
    assert norm_count(Net()) == 3
    assert describe_norm("micro", 3, 4, 16) == (
        "BatchNorm micro: each of 4 micro-batches of 16 samples is normalised on its own; "
        "running statistics are updated 4 times a step"
    )
    assert describe_norm("deferred", 3, 4, 16).endswith(
        "updated once a step, from all micro-batches together"
    )
    assert (
        "over all 2 replicas, 32 samples in total; running statistics are updated 4 times"
        in describe_norm("sync", 3, 4, 16, 2)
    )
    assert "which do not change; weight and bias are trained" in describe_norm("frozen", 3, 4, 16)
    assert describe_norm("micro", 3, 1, 16).endswith(
        "the batch of 16 samples is normalised on its own; running statistics are updated once a step"
    )


def test_few_samples_are_warned_of_where_they_are_normalised_alone() -> None:
    assert "Warning: statistics of 4 samples are noisy" in describe_norm("micro", 3, 4, 4, 2)
    assert "Warning: statistics of 1 sample are noisy" in describe_norm("deferred", 3, 4, 1)
    assert "Warning" not in describe_norm("sync", 3, 4, 4, 2)
    assert "Warning" not in describe_norm("frozen", 3, 4, 1)
