"""Strict mode: the same bits on 1, 2, 3 and 4 processes, and the gradient of the global batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.recipe import Model, Recipe, Run
from drumline.core.errors import UserError
from drumline.models import create_model
from drumline.parallel.strategy import create_strategy
from drumline.parallel.strict.ordered import OrderedSum, bucketed
from drumline.parallel.world import single_process
from drumline.state.checkpoint import read_checkpoint
from drumline.state.verify import verify_run
from drumline.training.loop import train
from drumline.training.sets import normaliser, open_sets
from tests.launch.ranks import one_thread
from tests.parallel import strict_ranks

CPU = torch.device("cpu")
CASES = list(strict_ranks.cases())
NETS = strict_ranks.NETS


@cache
def found(size: int) -> dict[str, Any]:
    return strict_ranks.results(size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_do_not_depend_on_the_number_of_processes(case: str, size: int) -> None:
    assert found(size)[case] == found(1)[case]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_small_buckets_of_any_type_add_up_to_the_same_bits(size: int) -> None:
    one, several = found(1)["wire"], found(size)["wire"]
    assert several["buckets"] >= 4
    for mine, theirs in zip(one["gradients"], several["gradients"], strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert one["strides"] == several["strides"]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "share"), [(2, 1.5), (3, 1.0), (4, 1.0)])
def test_the_wire_carries_what_a_ring_all_reduce_would(size: int, share: float) -> None:
    """6 shards. On 2 processes each holds 3, which the tree never adds alone; of 4, rank 0 holds one shard."""
    assert found(size)["wire"]["sent"] == pytest.approx(share, rel=1e-3)


@pytest.mark.slow
def test_every_case_is_a_run_of_its_own() -> None:
    assert len({found(1)[case] for case in CASES}) == len(CASES)


def ended(recipe: Recipe, folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The model and the optimizer after a run in this process."""
    with one_thread():
        train(replace(recipe, run=replace(recipe.run, dir=str(folder), name=name)), single_process(CPU))
    _, groups = read_checkpoint(folder / name / "checkpoints" / f"step-{strict_ranks.STEPS}")
    return {**groups["model"], **groups["optimizer"]}


def plainly(recipe: Recipe) -> Recipe:
    return replace(recipe, run=Run(seed=recipe.run.seed))


def test_one_shard_is_a_plain_run_bit_by_bit(tmp_path: Path) -> None:
    recipe = strict_ranks.base("one", shards=1)
    strict, plain = ended(recipe, tmp_path, "strict"), ended(plainly(recipe), tmp_path, "plain")
    assert all(torch.equal(strict[name], plain[name]) for name in plain)


@pytest.mark.parametrize("shards", [4, 6])
def test_with_norms_over_the_global_batch_shards_train_as_the_whole_batch_does(
    shards: int, tmp_path: Path
) -> None:
    recipe = strict_ranks.base("whole", shards=shards)
    recipe = replace(recipe, train=replace(recipe.train, sync_bn=True))
    strict, plain = ended(recipe, tmp_path, "strict"), ended(plainly(recipe), tmp_path, "plain")
    for name, expected in plain.items():
        scale = expected.abs().max().clamp(min=1e-3)
        assert (strict[name] - expected).abs().max() <= 2e-4 * scale, name


def test_shards_with_their_own_norms_train_otherwise(tmp_path: Path) -> None:
    """So that the test above can fail."""
    recipe = strict_ranks.base("apart", shards=4)
    strict, plain = ended(recipe, tmp_path, "strict"), ended(plainly(recipe), tmp_path, "plain")
    assert not torch.allclose(strict["bn1.running_var"], plain["bn1.running_var"], rtol=1e-3)


def test_running_statistics_are_the_mean_of_the_shards(tmp_path: Path) -> None:
    recipe = strict_ranks.base("means", shards=4)
    recipe = replace(recipe, train=replace(recipe.train, steps=1), optim=replace(recipe.optim, lr=0.0))
    with one_thread():
        run = replace(recipe, run=replace(recipe.run, dir=str(tmp_path)))
        train(run, single_process(CPU))
    _, groups = read_checkpoint(tmp_path / "means" / "checkpoints" / "step-1")
    momentum = 0.1
    torch.manual_seed(recipe.run.seed)
    model = create_model("resnet8", classes=10).train()
    halves = []
    sets = open_sets(recipe, single_process(CPU))
    strategy = create_strategy(recipe, replace(single_process(CPU), size=4))
    batch = next(iter(sets.training(recipe, slice(0, recipe.data.batch), 0, 1)))
    images = normaliser(sets, recipe)(batch.images)
    for rank in range(4):
        halves.append(model.conv1(images[strategy.batch_slice(rank)]))  # type: ignore[operator]
    mean = torch.stack([half.mean((0, 2, 3)) for half in halves]).mean(0) * momentum
    assert torch.allclose(groups["model"]["bn1.running_mean"], mean, atol=1e-6)
    assert groups["model"]["bn1.num_batches_tracked"] == 1


def test_a_parameter_that_never_gets_a_gradient_is_reported_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(strict_ranks.base("odd"), model=Model(name="tests.parallel.strict_nets:odd"))
    state = ended(recipe, tmp_path, "odd")
    assert torch.equal(state["blocks.odd.never"], torch.ones(3)), "not even decayed"
    assert "blocks.odd.never" in capsys.readouterr().err


def test_a_parameter_that_gets_its_first_gradient_late_ends_the_run_by_name(tmp_path: Path) -> None:
    """Without a gradient in the rehearsed step it was to be left out; to do so in silence would not train it."""
    recipe = replace(strict_ranks.base("late"), model=Model(name="tests.parallel.strict_nets:late"))
    with pytest.raises(
        UserError, match=r"'blocks.late.scale' got no gradient in the first step, and has one"
    ):
        ended(recipe, tmp_path, "late")


def test_random_numbers_that_no_seed_reaches_are_rejected_or_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(strict_ranks.base("drawn"), model=Model(name=f"{NETS}:unkeyed"))
    with pytest.raises(UserError, match=r"run.strict: the model draws from Python's `random`"):
        ended(recipe, tmp_path, "strict")
    ended(plainly(recipe), tmp_path, "plain")
    assert "the run cannot be repeated" in capsys.readouterr().err


def test_a_buffer_that_forward_replaces_counts_as_one_that_it_writes_to(tmp_path: Path) -> None:
    states = [
        ended(replace(strict_ranks.base(name), model=Model(name=f"{NETS}:{name}")), tmp_path, name)
        for name in ("replacing", "writing")
    ]
    assert states[0]["blocks.level.level"] != 0
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_recomputing_layers_that_meet_other_shards_changes_no_statistics(tmp_path: Path) -> None:
    """Shards take turns in the middle of a recomputed block, which must not count its norms' batch twice."""
    recipe = strict_ranks.base("once")
    once = replace(recipe, train=replace(recipe.train, sync_bn=True))
    twice = replace(once, train=replace(once.train, gradient_checkpointing=True))
    expected, state = ended(once, tmp_path, "once"), ended(twice, tmp_path, "twice")
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_complex_gradients_keep_their_imaginary_part() -> None:
    parameter = torch.randn(3, dtype=torch.complex64).requires_grad_()
    summed = OrderedSum([parameter], single_process(CPU), 2)
    summed.begin()
    for shard in range(2):
        summed.shard_begin(shard)
        (parameter * (1 + 2j)).real.sum().backward()
        summed.shard_end(shard)
    summed.finish()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.full((3,), 2 - 4j))


def test_buckets_go_from_the_last_layer_to_the_first_by_type_and_size() -> None:
    sizes = (100, 300, 50, 400)
    parameters = [torch.zeros(size) for size in sizes]
    assert bucketed(parameters, 1600) == [[3], [2, 1, 0]]
    parameters[1] = parameters[1].double()
    assert bucketed(parameters, 10**6) == [[3, 2], [1], [0]]
    assert bucketed([], 10) == []


def test_the_final_state_is_verified(tmp_path: Path) -> None:
    ended(strict_ranks.base("x"), tmp_path, "checked")
    assert verify_run(tmp_path / "checked").sound
