"""What a run's fingerprints cover, and that ranks that part are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.config.recipe import Optim, Train
from drumline.guards.run.fingerprints import FingerprintMonitor
from drumline.observe.run_log import RunLog
from drumline.parallel.world import single_process
from drumline.state import chain
from drumline.training.guards import state_tensors
from tests.training import ranks, tiny


def test_parameters_gradients_buffers_optimizer_and_average_are_covered() -> None:
    trained = tiny.state(tiny.normed(), optim=Optim(name="adamw"), train=Train(ema=0.9))
    tiny.step_of(trained, 8)(tiny.make(8), 0, 0.1)
    named = state_tensors(trained)
    assert {group for group, _ in named} == {"parameter", "gradient", "buffer", "optimizer", "average"}
    assert ("buffer", "1.running_var") in named
    assert ("optimizer", "exp_avg_sq/5.weight") in named
    assert ("gradient", "5.bias") in named
    assert named["parameter", "5.bias"] is trained.module[5].bias


def test_fingerprints_are_recorded_when_they_are_compared_and_show_the_state_at_their_step(
    tmp_path: Path,
) -> None:
    trained = tiny.state(tiny.plain())
    with RunLog(tmp_path).begin(0) as run_log:
        monitor = FingerprintMonitor(lambda: state_tensors(trained), single_process(tiny.CPU), run_log)
        for step, writes in ((1, "full"), (2, "short"), (3, "")):
            monitor.take(step, torch.tensor([4, 2]), writes)
            with torch.no_grad():
                trained.module[6].bias.add_(1)
            assert monitor.pending
            assert not monitor.compare().findings
    first, second = chain.read_whole(tmp_path / chain.FILE)[0]
    assert (first.step, bool(first.names), second.step, bool(second.names)) == (1, True, 2, False)
    assert first.groups["ids"] == second.groups["ids"]
    assert first.groups["optimizer"] == second.groups["optimizer"]
    assert first.groups["parameter"] != second.groups["parameter"]


def test_the_fingerprint_of_a_batch_depends_on_the_order_of_its_samples(tmp_path: Path) -> None:
    trained, seen = tiny.state(tiny.plain()), set()
    with RunLog(tmp_path).begin(0) as run_log:
        monitor = FingerprintMonitor(lambda: state_tensors(trained), single_process(tiny.CPU), run_log)
        for step, ids in enumerate(([1, 2, 3], [2, 1, 3], [1, 2], [1, 2, 4])):
            monitor.take(step, torch.tensor(ids), "short")
            monitor.compare()
    for record in chain.read_whole(tmp_path / chain.FILE)[0]:
        seen.add(record.groups["ids"])
    assert len(seen) == 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_drift_apart_by_one_ulp_are_named_with_the_tensor(size: int) -> None:
    """With three ranks the rank that differs is known; with two, it may be either."""
    who = "rank 2" if size == 3 else "ranks 0, 1"
    for result in ranks.results(size):
        before, _, after, _ = result["agreement"]
        assert before == []
        assert after == [
            f"ranks have drifted apart: parameter '5.weight' differs on {who} | "
            "between step 2, after which all agreed, and step 7"
        ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_sample_that_two_ranks_are_fed_is_named(size: int) -> None:
    for result in ranks.results(size):
        expected = f"sample 0 and 3 others came twice in one global batch, on ranks 0, {size - 1} | step 2"
        assert result["agreement"][1] == [expected]


@pytest.mark.slow
def test_a_rank_with_an_extra_tensor_is_named() -> None:
    for result in ranks.results(3):
        assert result["agreement"][3][0].startswith("rank 2 holds different parameters, gradients or buffers")
