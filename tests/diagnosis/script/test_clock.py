"""`drumline.clock` names planted problems of plain PyTorch scripts, changes nothing in them, and leaves nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import drumline
from drumline.guards.script import taps
from drumline.guards.script.peers import Peers
from tests.diagnosis.script.cost import seconds_per_step
from tests.guards.scripts_run import Outcome, run_script

PLANTED = str(Path(__file__).parent / "planted.py")
CODES = {"workers", "decode", "hand-over", "data", "host-line", "evaluation", "slow-rank", "rank-0"}
"""What cannot be found in a script where it is not planted, however busy the machine is."""


@cache
def planted(case: str, size: int = 1, steps: int = 60) -> Outcome:
    return run_script(PLANTED, size, case, str(steps))


def verdict_of(case: str, size: int = 1, steps: int = 60) -> list[dict[str, Any]]:
    outcome = planted(case, size, steps)
    assert outcome.codes == [0] * size, outcome.err
    found: list[dict[str, Any]] = json.loads(outcome.out[0].splitlines()[-1])["found"]
    # The machine that runs the tests may do other things, too.
    return [each for each in found if each["code"] != "machine-busy"]


def test_nothing_stands_out_in_a_healthy_script() -> None:
    assert not CODES & {each["code"] for each in verdict_of("healthy")}
    text = planted("healthy").err[0]
    assert "nothing stands out" in text or "Other programs use" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_dataset_is_named_with_the_workers_that_it_needs(workers: int) -> None:
    first = verdict_of(f"slow-data-{workers}")[0]
    assert first["code"] == "workers"
    wanted = int(first["flag"].removeprefix("DataLoader(num_workers=").rstrip(")").split(",")[0])
    assert workers < wanted <= 32, first
    assert 0.4 < first["saving"] < 0.95
    if not workers:
        assert "planted.py:31: `time.sleep(0.002)`" in first["text"]


def test_a_slow_line_of_the_script_is_named_with_file_and_line() -> None:
    first = verdict_of("slow-log")[0]
    assert first["code"] == "host-line"
    assert "planted.py:36: `time.sleep(0.02)` takes" in first["text"]
    assert 0.3 < first["saving"] < 0.9


def test_a_line_that_only_one_rank_runs_is_named_with_the_rank() -> None:
    lines = [each["text"] for each in verdict_of("slow-log", 2) if each["code"] == "host-line"]
    assert "on rank 0 alone" in lines[0]


def test_evaluations_are_no_wait_for_data() -> None:
    found = verdict_of("evaluation")
    assert CODES & {each["code"] for each in found} == {"evaluation"}


def test_a_tiny_batch_is_named() -> None:
    assert "small-batch" in [each["code"] for each in verdict_of("tiny-batch", steps=600)]


def test_only_the_first_rank_prints() -> None:
    outcome = planted("healthy", 2)
    assert outcome.codes == [0, 0], outcome.err
    assert "drumline.clock:" in outcome.err[0]
    assert "drumline.clock" not in outcome.err[1]


def test_times_are_taken_before_the_exchange_so_the_slow_rank_shows() -> None:
    outcome = planted("slow-rank", 2)
    assert outcome.codes == [0, 0], outcome.err
    values = json.loads(outcome.out[0].splitlines()[-1])["values"]
    waiting, slow = values["host_exchange_ms"]
    assert waiting > slow + 10, "rank 0 waits for rank 1, which sleeps 50 ms in each step"
    assert values["host_forward_ms"][1] > values["host_forward_ms"][0] + 10
    first = verdict_of("slow-rank", 2)[0]
    assert first["code"] == "slow-rank"
    assert first["text"].startswith("rank 1 ")
    assert "in forward" in first["text"]


def test_an_interrupted_script_reports_what_it_has() -> None:
    outcome = planted("interrupted")
    assert outcome.codes != [0]
    assert "KeyboardInterrupt" in outcome.err[0]
    assert "steps up to step 30" in outcome.err[0]


# ---- in this process


def loop(
    loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 0, scaler: Any = None
) -> None:
    for number, (inputs, labels) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if number == steps:
            break


def parts() -> tuple[DataLoader[Any], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(80, 6), torch.arange(80) % 4)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    return DataLoader(data, 4, shuffle=True), model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_the_bits_of_training_are_the_same_with_a_clock() -> None:
    weights = []
    for timed in (False, True):
        loader, model, optimizer = parts()
        clock = drumline.clock(loader, model, optimizer, report=False) if timed else None
        for _ in range(3):
            loop(loader, model, optimizer)
        if clock is not None:
            clock.verdict()
            clock.close()
        weights.append([*model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_closed_clock_leaves_no_hook_tap_or_thread() -> None:
    before = (torch.autograd.backward, DataLoader.__iter__, _BaseDataLoaderIter.__next__, torch.save)
    threads = threading.active_count()
    loader, model, optimizer = parts()
    with drumline.clock(loader, model, optimizer, report=False):
        assert torch.autograd.backward is not before[0]
        loop(loader, model, optimizer)
    assert (torch.autograd.backward, DataLoader.__iter__, _BaseDataLoaderIter.__next__, torch.save) == before
    assert not taps._ORIGINALS
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    assert threading.active_count() == threads


@pytest.mark.parametrize("first", ["clock", "guard"])
def test_a_clock_and_a_guard_close_in_any_order(first: str) -> None:
    before = torch.autograd.backward, _BaseDataLoaderIter.__next__
    loader, model, optimizer = parts()
    clock, guard = drumline.clock(loader, model, optimizer, report=False), drumline.guard(model, optimizer)
    loop(loader, model, optimizer)
    for each in (clock, guard) if first == "clock" else (guard, clock):
        each.close()
    assert (torch.autograd.backward, _BaseDataLoaderIter.__next__) == before


def test_two_clocks_and_a_second_one_each_count_their_own_steps() -> None:
    loader, model, optimizer = parts()
    outer = drumline.clock(loader, model, optimizer, report=False)
    for _ in range(2):
        with drumline.clock(loader, model, optimizer, report=False) as inner:
            loop(loader, model, optimizer)
        assert inner.verdict().evidence.intervals[-1].step == 20
    assert outer.verdict().evidence.intervals[-1].step == 40
    outer.close()


def test_accumulation_and_amp_count_a_step_for_each_update() -> None:
    loader, model, optimizer = parts()
    scaler = torch.amp.GradScaler("cpu")
    with drumline.clock(loader, model, optimizer, report=False) as clock:
        for number, (inputs, labels) in enumerate(loader):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if number % 4 == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        loop(loader, model, optimizer, scaler=scaler)
    assert clock.verdict().evidence.intervals[-1].step == 25
    assert clock._loop.counts.samples == 160


def test_a_replayed_graph_which_calls_nothing_counts_a_step_for_each_batch() -> None:
    loader, model, optimizer = parts()
    with drumline.clock(loader, model, optimizer, report=False) as clock:
        loop(loader, model, optimizer, steps=2)
        for _inputs, _labels in loader:
            time.sleep(0.001)
    assert clock.verdict().evidence.intervals[-1].step == 22


def test_the_parts_of_a_step_add_up_to_it() -> None:
    loader, model, optimizer = parts()
    with drumline.clock(loader, model, optimizer, report=False) as clock:
        loop(loader, model, optimizer)
    for each in clock.verdict().evidence.intervals:
        host = sum(each.mean(name) for name in each.values if name.startswith("host_"))
        assert host == pytest.approx(each.mean("step_ms"))


class Two(Peers):
    """The first of two ranks; the other one reports nothing."""

    def __init__(self) -> None:
        super().__init__(0, (0, 1), dist.HashStore())

    def clone(self) -> Peers:
        return self


def test_a_verdict_on_one_rank_leaves_the_intervals_as_they_are_on_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drumline.diagnosis.script.clock.peers_of", lambda group: Two())
    monkeypatch.setattr("drumline.diagnosis.script.clock._CLOSING_S", 0.1)
    loader, model, optimizer = parts()
    with drumline.clock(loader, model, optimizer, report=False) as clock:
        loop(loader, model, optimizer, steps=7)
        assert clock.verdict().evidence.intervals[-1].step == 3
        loop(loader, model, optimizer, steps=14)
        clock.verdict()
        assert [each.step for each in clock._history.stretches] == [3, 13]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(24):
            time.sleep(0.004)
            yield torch.randn(6), number % 4


def test_a_stream_without_a_length_and_batches_of_any_iterable_are_timed() -> None:
    _, model, optimizer = parts()
    stream = DataLoader(Stream(), 4)
    with drumline.clock(stream, model, optimizer, report=False) as clock:
        loop(stream, model, optimizer)
    own = [(torch.randn(4, 6), torch.arange(4)) for _ in range(6)]

    def slow() -> Iterator[Any]:
        for each in own:
            time.sleep(0.016)
            yield each

    generator = slow()
    with drumline.clock(generator, model, optimizer, report=False) as other:
        loop(other, model, optimizer)
    for each in (clock, other):
        whole = each.verdict().evidence.intervals
        assert whole[-1].step == 6
        assert whole[-1].mean("host_data_ms") > 10
        assert each.verdict().slowdowns[0].code in ("workers", "data", "decode")


def test_a_loop_that_fails_reports_the_steps_before(capsys: pytest.CaptureFixture[str]) -> None:
    loader, model, optimizer = parts()

    def fail() -> None:
        with drumline.clock(loader, model, optimizer):
            loop(loader, model, optimizer, steps=7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "steps up to step 7" in capsys.readouterr().err


def test_a_loader_that_fails_is_no_endless_wait_for_data() -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise OSError("unreadable")
            return torch.randn(6), index % 4

    _, model, optimizer = parts()
    loader = DataLoader(Broken(), 2)
    with drumline.clock(loader, model, optimizer, report=False) as clock:
        with pytest.raises(OSError, match="unreadable"):
            loop(loader, model, optimizer)
        assert clock._parts.present[1] == "other"


def test_a_verdict_that_fails_does_not_end_the_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise ZeroDivisionError("0 steps")

    monkeypatch.setattr("drumline.diagnosis.script.verdict.diagnose_script", fail)
    loader, model, optimizer = parts()
    with drumline.clock(loader, model, optimizer):
        loop(loader, model, optimizer)
    assert "no verdict, because of ZeroDivisionError: 0 steps" in capsys.readouterr().err


def test_a_clock_that_cannot_start_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: object) -> None:
        raise drumline.UserError("a group over MPI has no store", "use gloo")

    monkeypatch.setattr("drumline.diagnosis.script.clock.peers_of", fail)
    loader, model, optimizer = parts()
    with pytest.raises(drumline.UserError, match="MPI"):
        drumline.clock(loader, model, optimizer)
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_an_optimizer_without_a_fused_form_is_not_told_to_use_it() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

    loader, model, plain = parts()
    for optimizer, fused in ((Own(model.parameters()), True), (plain, False)):
        with drumline.clock(loader, model, optimizer, report=False) as clock:
            assert clock._message()["facts"]["fused"] is fused


def test_what_cannot_be_timed_is_refused_with_a_fix() -> None:
    loader, model, _ = parts()
    with pytest.raises(drumline.UserError, match=r"fix: drumline\.clock\(loader, model, optimizer\)"):
        drumline.clock(loader, model, [])


def test_a_step_costs_less_than_a_hundredth_of_ten_milliseconds() -> None:
    """Some 20 us; the bound leaves room for a loaded machine."""
    plain, timed = seconds_per_step(5, 400)
    assert timed - plain < 100e-6


def test_every_interval_of_a_long_run_is_kept_in_a_bounded_number() -> None:
    from drumline.diagnosis.script.history import MOST, History
    from drumline.observe.clock import StepTimes

    now: Callable[[], float] = iter(range(10**6)).__next__  # type: ignore[assignment]
    history, last, ended = History(now), 0, []
    for step in range(1, 20_001):
        if history.is_due(step):
            from drumline.core.account import PARTS

            taken = dict.fromkeys(PARTS, 1.0 * (step - last))
            history.end(step, step / 100, StepTimes(step - last, taken, 0, 0, 0), {"samples": 4.0 * step})
            ended.append(step)
            last = step
    assert len(history.stretches) <= MOST
    assert sum(each.times.steps for each in history.stretches) == last
    assert sum(each.counts["samples"] for each in history.stretches) == 4.0 * last
    assert history.stretches[0].step == 3, "the first steps stay apart"


def test_the_example_is_short_and_names_its_problem() -> None:
    example = Path(drumline.__file__).parents[2] / "examples" / "why_slow.py"
    assert len(example.read_text().splitlines()) < 40
    outcome = run_script(str(example), 1)
    assert outcome.codes == [0]
    assert "Try `DataLoader(num_workers=" in outcome.err[0]
