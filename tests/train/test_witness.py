"""What a run's fingerprints cover, and that ranks that part are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.config.recipe import Optim, Train
from drumline.observe.run_log import RunLog
from drumline.parallel.world import single_process
from drumline.state import chain
from drumline.train.witness import Witness, state_tensors
from tests.train import ranks, tiny


def test_parameters_gradients_buffers_optimizer_and_average_are_covered() -> None:
    trained = tiny.state(tiny.normed(), optim=Optim(name="adamw"), train=Train(ema=0.9))
    tiny.step_of(trained, 8)(tiny.make(8), 0, 0.1)
    named = state_tensors(trained)
    assert {group for group, _ in named} == {"parameter", "gradient", "buffer", "optimizer", "average"}
    assert ("buffer", "1.running_var") in named
    assert ("optimizer", "exp_avg_sq/5.weight") in named
    assert ("gradient", "5.bias") in named
    assert named["parameter", "5.bias"] is trained.module[5].bias


def test_a_look_is_written_when_it_is_read_and_says_what_was_then(tmp_path: Path) -> None:
    trained = tiny.state(tiny.plain())
    with RunLog.open(tmp_path, keep_until_step=0) as run_log:
        witness = Witness(lambda: state_tensors(trained), single_process(tiny.CPU), run_log)
        for step, writes in ((1, "full"), (2, "short"), (3, "")):
            witness.look(step, torch.tensor([4, 2]), writes)
            with torch.no_grad():
                trained.module[6].bias.add_(1)
            assert witness.waiting
            assert not witness.read().findings
    first, second = chain.read_chain(tmp_path / chain.FILE)
    assert (first.step, bool(first.names), second.step, bool(second.names)) == (1, True, 2, False)
    assert first.groups["ids"] == second.groups["ids"]
    assert first.groups["optimizer"] == second.groups["optimizer"]
    assert first.groups["parameter"] != second.groups["parameter"]


def test_the_order_of_samples_counts(tmp_path: Path) -> None:
    trained, seen = tiny.state(tiny.plain()), set()
    with RunLog.open(tmp_path, keep_until_step=0) as run_log:
        witness = Witness(lambda: state_tensors(trained), single_process(tiny.CPU), run_log)
        for step, ids in enumerate(([1, 2, 3], [2, 1, 3], [1, 2], [1, 2, 4])):
            witness.look(step, torch.tensor(ids), "short")
            witness.read()
    for record in chain.read_chain(tmp_path / chain.FILE):
        seen.add(record.groups["ids"])
    assert len(seen) == 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_drift_apart_by_one_ulp_are_named_with_the_tensor(size: int) -> None:
    """With three ranks the odd one out is known; with two, it may be either."""
    who = [2] if size == 3 else [0, 1]
    for result in ranks.results(size):
        before, _, after, _ = result["agreement"]
        assert before == []
        assert after == [
            f"the ranks no longer hold the same parameter: '5.weight' differs on rank(s) {who} | "
            "between step 2, after which all agreed, and step 7"
        ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_sample_that_two_ranks_are_fed_is_named(size: int) -> None:
    for result in ranks.results(size):
        said = f"sample 0 and 3 others came twice in one global batch, on rank(s) [0, {size - 1}] | step 2"
        assert result["agreement"][1] == [said]


@pytest.mark.slow
def test_a_rank_with_a_tensor_more_is_named() -> None:
    for result in ranks.results(3):
        assert result["agreement"][3][0].startswith("rank(s) [2] hold other parameters, gradients or buffers")
