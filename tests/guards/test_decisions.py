"""The decisions of the guards, from numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from drumline.core.errors import UserError
from drumline.guards.checks.data import (
    different_scales,
    equal_batches,
    input_scales,
    miscounted,
    shared_ids,
)
from drumline.guards.checks.drift import (
    batch_fingerprint,
    difference,
    different_rates,
    digest,
    distance,
    fingerprints,
    state_on_some_ranks,
)
from drumline.guards.checks.nonfinite import all_finite
from drumline.guards.checks.schedule import Rates
from drumline.guards.checks.setup import (
    frozen_on_some_ranks,
    home,
    memory_elsewhere,
    memory_imbalance,
    misplaced,
    shared_gpu,
)
from drumline.guards.finding import Finding, GuardError, LoopState, Reports
from drumline.guards.script.hang import RankStatus, find_stall, unequal_steps
from drumline.guards.script.loaders import contents_of
from drumline.guards.script.losses import Losses
from drumline.guards.script.parameters import Probes
from drumline.guards.script.peers import Peers, PeerTimeout, Reporter
from drumline.guards.script.source_lines import SourceLine, line_to_change


def test_a_finding_reads_as_what_where_since_fix() -> None:
    finding = Finding("drift", "ranks differ", "'fc.weight' on rank 1", "step 3", "load it on every rank")
    assert str(finding).splitlines() == [
        "drumline guard [drift]: ranks differ",
        "  where: 'fc.weight' on rank 1",
        "  since: step 3",
        "  fix: load it on every rank",
    ]


def test_stop_raises_and_warn_prints_once_per_guard(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding("drift", "ranks differ", certain=True)
    with pytest.raises(GuardError) as stopped:
        Reporter("stop").report(finding)
    assert stopped.value.finding == finding
    reporter = Reporter("warn")
    for _ in range(3):
        reporter.report(finding)
    reporter.report(Finding("bypass", "other"))
    printed = capsys.readouterr().err
    assert printed == (
        "drumline guard [drift]: ranks differ\n  silence: ignore=['drift']\n"
        "drumline guard [bypass]: other\n  silence: ignore=['bypass']\n"
    )
    with pytest.raises(UserError, match="action='shout'"):
        Reporter("shout")  # type: ignore[arg-type]


def test_an_ignored_guard_never_reports(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter("stop", ["drift"])
    reporter.report(Finding("drift", "ranks differ", certain=True))
    reporter.report(Finding("drift", "ranks differ"))
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="use 'set-epoch'"):
        Reporter("warn", ["set-epochs"])


def test_the_majority_names_the_tensor_and_the_rank() -> None:
    right = {"a": 1, "b": 2}
    assert difference([right, right, right]) is None
    assert difference([right, {"a": 1, "b": 3}, right]) == ("b", [1])
    assert difference([right, {"a": 1, "b": 3}]) == ("b", [0, 1])
    assert difference([right, right, {"a": 1}]) == ("b", [2])


def test_fingerprints_change_with_a_swap_a_sign_and_an_ulp_in_any_layout() -> None:
    tensor = torch.arange(1.0, 9.0).reshape(1, 2, 2, 2)
    same = {"t": tensor.clone().to(memory_format=torch.channels_last)}
    assert digest(fingerprints({"t": tensor})) == digest(fingerprints(same))
    for change in (lambda t: t.flip(0, 1), lambda t: -t, lambda t: torch.nextafter(t, t + 1)):
        assert digest(fingerprints({"t": tensor})) != digest(fingerprints({"t": change(tensor)}))
    sparse = torch.eye(3).to_sparse()
    assert fingerprints({"s": sparse}) == {}


def test_equal_batches_are_found_and_a_few_shared_ids_are_normal() -> None:
    x = torch.randn(4, 3, 70, 70)
    assert batch_fingerprint([x]) == batch_fingerprint([x.clone()]) != batch_fingerprint([x + 1])
    assert equal_batches([5, 7, 5]) == [0, 2]
    assert equal_batches([None, None]) == []
    assert shared_ids([[1, 2, 3, 4], [5, 6, 7, 1]]) is None
    assert shared_ids([[1, 2, 3, 4], [5, 6, 7, 8], [4, 3, 2, 9]]) == (0, 2, 3)
    assert distance([[1.0, 2.0], [1.0, 2.0]]) == 0
    assert distance([[1.0, 2.0], [1.0, 1.0]]) == 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_non_finite_value_is_found_and_large_values_are_not(bad: float) -> None:
    gradients = [torch.ones(3), torch.full((4,), 1e30), torch.ones(2, dtype=torch.bfloat16)]
    assert all_finite(gradients)
    gradients[2][1] = bad
    assert not all_finite(gradients)


def statuses(**ranks: RankStatus) -> dict[int, RankStatus]:
    return {int(name[1:]): status for name, status in ranks.items()}


def test_waiting_for_a_rank_that_has_ended_or_waits_elsewhere_is_hopeless() -> None:
    waiting = RankStatus(24, "step", 31, True)
    stall = find_stall(statuses(r0=waiting, r1=RankStatus(24, "finished", 40)), 30)
    assert stall is not None
    assert stall.certain
    assert stall.where == "rank 0 waits in step 25; rank 1 finished after step 24"
    stall = find_stall(statuses(r0=waiting, r1=RankStatus(24, "between", 31, True, "train.py:9")), 30)
    assert stall is not None
    assert stall.certain
    assert "rank 1 is past step 24 at train.py:9" in stall.where


@pytest.mark.parametrize(
    "other",
    [
        RankStatus(24, "step", 500, True),  # both are slow
        RankStatus(25, "between", 500, True),  # is ahead: waits for the slow one itself
        RankStatus(25, "finished"),
    ],
)
def test_slow_steps_are_not_reported(other: RankStatus) -> None:
    assert find_stall(statuses(r0=RankStatus(24, "step", 500, True), r1=other), 30) is None


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (RankStatus(2, "step", 31, True, passes=[[1, 1], [3, 2]]), "rank 1 skipped step 3: 2 forward passes"),
        (RankStatus(2, "step", 31, True, passes=[[1, 1], [2, 2], [3, 1]]), "rank 1 skipped step 2"),
        (RankStatus(2, "step", 31, True, passes=[[1, 1], [3, 1]]), "rank 1 waits somewhere else"),
        (RankStatus(3, "step", 31, True, passes=[[1, 1]], comparing=True), "rank 1 waits somewhere else"),
    ],
)
def test_ranks_that_wait_for_each_other_at_different_points_are_ended(other: RankStatus, says: str) -> None:
    ready = RankStatus(2, "step", 31, True, passes=[[1, 1], [3, 1]], comparing=True)
    stall = find_stall(statuses(r0=ready, r1=other), 30)
    assert stall is not None
    assert stall.certain
    assert says in stall.what
    computing = replace(other, waits=False)
    assert find_stall(statuses(r0=ready, r1=computing), 30) is None
    assert find_stall(statuses(r0=ready, r1=other, r2=replace(other, idle=5)), 30) is None


def test_a_busy_rank_is_named_and_never_hopeless() -> None:
    stall = find_stall(
        statuses(r0=RankStatus(24, "step", 31, True), r1=RankStatus(24, "between", 31, False, "save.py:3")),
        30,
    )
    assert stall is not None
    assert not stall.certain
    assert "rank 1 keeps the others waiting" in stall.what
    several = statuses(
        r0=RankStatus(24, "step", 31, True),
        r1=RankStatus(24, "finished"),
        r2=RankStatus(24, "between", 31, False),
    )
    stall = find_stall(several, 30)
    assert stall is not None
    assert not stall.certain
    assert find_stall(statuses(r0=RankStatus(24, "step", 5, True), r1=RankStatus(24, "finished")), 30) is None


def test_a_rank_that_computes_is_not_waiting() -> None:
    evaluates = RankStatus(
        24, "step", 500, False, "evaluate.py:7"
    )  # a forward without no_grad(), after the loop
    assert (
        find_stall(statuses(r0=evaluates, r1=RankStatus(24, "between", 500, True, "train.py:9")), 30) is None
    )


def memory(
    gpu: str,
    used: float = 10,
    elsewhere: dict[str, int] | None = None,
    host: str = "a",
    in_run: bool = False,
) -> dict[str, Any]:
    report = {
        "host": host,
        "device": "cuda:0",
        "gpu": gpu,
        "used": int(used * 2**30),
        "elsewhere": elsewhere or {},
        "in_run": in_run,
    }
    return {"memory": report}


def reports(*messages: dict[str, Any], ranks: Sequence[int] = (), step: int = 3) -> Reports:
    return Reports(ranks or range(len(messages)), messages, step)


def test_memory_on_another_ranks_gpu_is_named() -> None:
    def found(elsewhere: dict[str, int], host: str = "a", in_run: bool = False) -> str | None:
        mine = memory("B", elsewhere=elsewhere, host=host, in_run=in_run)
        finding = memory_elsewhere(reports(memory("A", in_run=in_run), mine))
        return None if finding is None else finding.what

    assert found({"A": 2**30}) == "rank 1 holds 1.00 GiB on the GPU of rank 0"
    assert found({"C": 2**30}) is None, "a GPU that no rank uses: a model spread on purpose"
    assert found({"C": 2**29}, in_run=True) == "rank 1 holds 0.50 GiB on GPU C, which is not its own"
    assert found({"A": 2**30}, host="b") is None
    assert found({}, in_run=True) is None


def test_two_ranks_on_one_gpu_are_reported() -> None:
    finding = shared_gpu(reports(memory("A"), memory("A")))
    assert finding is not None
    assert "ranks 0 and 1 use the same GPU" in finding.what
    assert shared_gpu(reports(memory("A"), memory("A", host="b"))) is None
    assert shared_gpu(reports({"memory": None}, {"memory": None})) is None


@pytest.mark.parametrize(
    ("used", "in_run", "found"),
    [
        ([25, 10, 10, 10], False, 0),
        ([10, 11], False, None),
        ([1.9, 0.5], False, None),
        ([1.9, 0.5], True, 0),
        ([0.4, 0.1], True, None),
        ([10.0, 10.2, 11.0, 9.0], True, None),
        ([10], True, None),
        ([0, 0], True, None),
    ],
)
def test_a_rank_with_far_more_memory_than_the_median_is_reported(
    used: list[float], in_run: bool, found: int | None
) -> None:
    each = [memory(name, amount, in_run=in_run) for name, amount in zip("ABCD", used, strict=False)]
    finding = memory_imbalance(reports(*each))
    assert (None if finding is None else finding.where) == (
        None if found is None else f"rank {found}, cuda:0 on a"
    )


def loop_with(tensors: dict[str, torch.Tensor]) -> LoopState:
    return LoopState(1, torch.device("cpu"), {}, [], tensors, "now", in_run=False, equal_memory=True)


def test_a_tensor_on_a_different_device_is_named() -> None:
    there = torch.empty(2, device="meta")
    tensors = {"parameter 'a'": torch.ones(1), "teacher parameter 'fc.weight'": there, "buffer 'b'": there}
    finding = misplaced(loop_with(tensors))
    assert finding is not None
    assert finding.what == "teacher parameter 'fc.weight' and 1 more are on meta, but rank 1 computes on cpu"
    assert misplaced(loop_with({"parameter 'a'": torch.ones(1)})) is None
    assert home([torch.ones(1), there]) is None
    assert home([torch.ones(1)]) == torch.device("cpu")


@pytest.mark.parametrize(
    ("counts", "of", "what"),
    [
        ([50, 50], 100, None),
        ([100, 100], 100, None),
        ([51, 51], 101, "1 sample twice"),
        ([50, 49], 101, "2 samples left out"),
        ([50, None], 100, "only 1 of 2 ranks"),
        ([102, 102], 101, "counted 102 samples of 101: 1 sample twice"),  # all_reduced
        ([96, 96], 101, "counted 96 samples of 101: 5 samples left out"),
    ],
)
def test_an_evaluation_counts_each_sample_once(counts: list[int | None], of: int, what: str | None) -> None:
    finding = miscounted([0, 1], counts, of, "evaluation 1")
    assert (finding is None) == (what is None)
    assert finding is None or (what is not None and what in finding.what)


def rates(factor: Any, per_epoch: int | None = None) -> tuple[Rates, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return Rates(optimizer, scheduler, per_epoch), scheduler


@pytest.mark.filterwarnings("ignore:Detected call")
def test_a_rate_may_begin_and_end_at_zero_but_not_stay_there() -> None:
    watched, scheduler = rates(lambda step: [0, 0, 0, 1, 1, 0, 0, 0][step])
    found = []
    for step in range(1, 8):
        watched.forward()
        found.append(watched.check(step))
        scheduler.step()
    assert [finding is None for finding in found] == [True] * 6 + [False]
    assert found[-1] is not None
    assert found[-1].since == "step 6"


def test_a_phase_at_zero_that_the_schedule_leaves_again_is_healthy() -> None:
    watched, scheduler = rates(lambda step: 0.0 if 2 <= step < 40 else 1.0)
    for step in range(1, 30):
        watched.forward()
        assert watched.check(step) is None
        watched.optimizer.step()
        scheduler.step()


def test_a_schedule_that_is_never_stepped_is_reported_after_two_epochs_or_at_the_end() -> None:
    watched, _ = rates(lambda step: 1.0, per_epoch=3)
    assert [watched.check(step) is None for step in range(1, 9)] == [True] * 6 + [False] * 2
    assert watched.at_close(1, 0) is None
    finding = watched.at_close(5, 0)
    assert finding is not None
    assert "never stepped in 5 steps" in finding.what


def test_the_line_that_removes_the_wrapper_is_found_in_the_source(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "torch.save(model.module.state_dict())\nout = model.module(x)\nhead = model.module.head\n"
        "raw = model.module\nmodel = model.module\n"
    )
    found = line_to_change(None, [str(file)])
    assert found == SourceLine(str(file), 5)
    assert str(found) == f"{file}:5: `model = model.module`"
    file = tmp_path / "other.py"
    file.write_text("torch.save(model.module.state_dict())\nmodel.module.encode(x)\nout = model.module(x)\n")
    assert line_to_change(None, [str(file)]) == SourceLine(str(file), 3)
    called = SourceLine(str(file), 2)
    assert line_to_change(called, [str(file)]) == called
    file = tmp_path / "right.py"
    file.write_text("torch.save(model.module.state_dict())\nout = model(x)\n")
    assert line_to_change(None, [str(file)]) is None


def test_inputs_on_different_scales_are_found_and_different_data_is_not() -> None:
    x = torch.randn(16, 3, 4, 4)
    mine = input_scales([x, torch.arange(16)])
    assert len(mine) == 1
    assert different_scales([mine, input_scales([40 * x + 128])]) == (0, 1)
    assert different_scales([mine, input_scales([x + 12])]) == (0, 1)
    assert different_scales([mine, mine, input_scales([3 * x + 5])]) is None
    assert different_scales([mine, input_scales([torch.ones(16, 3)])]) is None, (
        "constant inputs have no scale"
    )
    assert different_scales([mine, []]) is None


def test_a_parameter_frozen_on_one_rank_is_named() -> None:
    def frozen(*names: str) -> dict[str, Any]:
        return {"frozen": list(names)}

    assert frozen_on_some_ranks(reports(frozen("a"), frozen("a"))) is None
    finding = frozen_on_some_ranks(reports(frozen(), frozen(), frozen("b"), ranks=[0, 4, 5]))
    assert finding is not None
    assert finding.what == "parameter 'b' is frozen on rank 5 and trained on rank 0"
    finding = frozen_on_some_ranks(reports(frozen("a", "b"), frozen()))
    assert finding is not None
    assert finding.what == "parameters 'a' and 1 more are frozen on rank 0 and trained on rank 1"


def test_optimizer_state_on_some_ranks_only_is_named() -> None:
    fresh = {"param_groups[0]['lr']": 1}
    loaded = {**fresh, "exp_avg of fc.weight": 7}
    assert state_on_some_ranks([0, 1], [fresh, fresh]) is None
    assert state_on_some_ranks([0, 1], [loaded, loaded]) is None
    finding = state_on_some_ranks([0, 1, 2], [loaded, fresh, fresh])
    assert finding is not None
    assert "on rank 0 and none on ranks 1, 2" in finding.what


def test_unequal_steps_and_rates_are_named_at_the_end() -> None:
    def last(steps: int, passes: list[list[int]], rate: float) -> dict[str, Any]:
        return {"steps": [steps], "passes": passes, "rates": {"param_groups[0]['lr']": rate}}

    even, short = last(24, [[1, 1]], 0.1), last(23, [[1, 1], [12, 2], [13, 1]], 0.1)
    assert unequal_steps(reports(even, even), 10, True) is None
    finding = unequal_steps(reports(even, short), 10, True)
    assert finding is not None
    assert finding.what.startswith("rank 1 skipped step 12: 2 forward passes in it")
    assert finding.where == "rank 0: 24 steps, rank 1: 23 steps"
    finding = unequal_steps(reports(even, last(23, [[1, 1]], 0.1)), 10, True)
    assert finding is not None
    assert finding.what == "ranks took unequal numbers of steps"
    assert different_rates(reports(even, short)) is None
    finding = different_rates(reports(even, last(24, [[1, 1]], 0.05)))
    assert finding is not None
    assert "param_groups[0]['lr'] is 0.1 on rank 0 and 0.05 on rank 1" in finding.what


class Wrapped(Dataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)


def test_a_data_set_is_identified_by_what_it_wraps() -> None:
    def inner(value: float) -> TensorDataset:
        return TensorDataset(torch.full((4, 2), value))

    class Opaque(Dataset[Any]):
        pass

    for wrap in (Wrapped, lambda one: Wrapped(Wrapped(one)), lambda one: Wrapped([one, one])):
        assert contents_of(wrap(inner(1.0))) == contents_of(wrap(inner(1.0))) != contents_of(wrap(inner(2.0)))
    assert "own" in contents_of(Wrapped(Opaque()).inner)
    both = contents_of(ConcatDataset([inner(1.0), inner(2.0)]))
    assert both != contents_of(ConcatDataset([inner(1.0), inner(3.0)]))


def test_the_mean_loss_leaves_out_non_finite_losses() -> None:
    losses = Losses(Probes(1), values=[torch.tensor(1.0)] * 20)
    assert losses.level() == (1.0, 0.0, 10)
    losses.values[15] = torch.tensor(torch.nan)
    assert losses.level() == (1.0, 0.0, 9)
    losses.values = [torch.tensor(torch.inf)] * 20
    assert losses.level() is None


def test_waiting_for_other_ranks_is_bounded_and_a_late_rank_still_compares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = torch.distributed.HashStore()
    early, late = Peers(0, (0, 1), store), Peers(1, (0, 1), store)
    early.timeout = 0.3
    with pytest.raises(PeerTimeout):
        early.gather("5", "mine", lambda: None)
    assert late.gather("5", "theirs", lambda: None) == ["mine", "theirs"]
    absent = Peers(0, (0, 1, 2), store)
    monkeypatch.setattr("drumline.guards.script.peers._GUARD_MISSING_SECONDS", 0.1)
    with pytest.raises(UserError, match="not called on rank 2"):
        absent.gather("6", "mine", lambda: None)
