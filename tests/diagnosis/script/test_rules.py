"""The rules for scripts, on made-up evidence: each fires on its problem, in the words of a script, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.diagnosis.evidence import Evidence
from drumline.diagnosis.script.ranks import evidence_of
from drumline.diagnosis.script.verdict import diagnose_script, lines, progress_line
from drumline.diagnosis.slowdown import Slowdown


def message(facts: dict[str, Any], seen: list[Any] | None = None, **values: float) -> dict[str, Any]:
    """One rank's, with three equal intervals of steps that take 100 ms unless the values say otherwise."""
    given = {
        "step_ms": 100.0,
        "compute_ms": 90.0,
        "host_forward_ms": 50.0,
        "host_backward_ms": 40.0,
        **values,
    }
    given.setdefault("data_ms", given.get("host_data_ms", 0.0))
    rows = [
        {"step": step, "epoch": 1.0, "steps": 10, "samples": 640.0, "values": given} for step in (10, 20, 30)
    ]
    known = {"gpu": False, "cores": 8, "machine_cores": 8, "local_ranks": 1, "rank_batch": 64}
    return {"intervals": rows, "lines": seen or [], "facts": {**known, **facts}}


def found(*messages: dict[str, Any] | None) -> dict[str, Slowdown]:
    return {each.code: each for each in diagnose_script(evidence_of(messages))}


USED = {"own_cores": 1.0, "busy_cores": 1.0}


def test_nothing_is_said_without_a_reason() -> None:
    assert found(message({"workers": 2}, **USED)) == {}
    assert found() == {}


def test_a_loop_that_makes_batches_itself_gets_as_many_workers_as_the_model_needs() -> None:
    one = found(message({"workers": 0}, host_data_ms=80.0, data_cpu_ms=80.0, **USED))["workers"]
    assert one.flag == "DataLoader(num_workers=4, persistent_workers=True)"
    assert one.saving == pytest.approx(0.795, abs=0.01)


def test_no_worker_is_advised_without_a_core_for_it() -> None:
    busy = {"own_cores": 1.0, "busy_cores": 8.0}
    four = message({"workers": 4}, host_data_ms=80.0, loader_cores=4.0, **busy)
    assert "no core is free" in found(four)["decode"].text


def test_workers_that_wait_for_a_disk_need_no_core() -> None:
    busy = {"own_cores": 1.0, "busy_cores": 8.0}
    four = message({"workers": 4}, host_data_ms=80.0, loader_cores=0.1, **busy)
    assert found(four)["workers"].flag == "DataLoader(num_workers=20)"


def test_batches_that_are_ready_and_slow_to_take_over_need_no_workers() -> None:
    assert set(found(message({"workers": 4}, host_data_ms=60.0, taking_ms=55.0, **USED))) == {"hand-over"}


def test_on_a_busy_machine_a_wait_that_the_queue_for_a_core_explains_is_no_reason() -> None:
    busy = {"own_cores": 1.0, "busy_cores": 8.0, "loop_queued": 0.4, "loop_cores": 0.5}
    assert set(found(message({"workers": 2}, host_data_ms=20.0, taking_ms=19.0, **busy))) == {"machine-busy"}
    assert "hand-over" in found(message({"workers": 2}, host_data_ms=60.0, taking_ms=59.0, **busy))


def test_workers_that_wait_for_a_core_as_the_loop_does_do_not_wait_for_a_disk() -> None:
    busy = {"own_cores": 1.0, "busy_cores": 8.0, "loop_queued": 0.7, "loop_cores": 0.1}
    assert "decode" in found(message({"workers": 2}, host_data_ms=80.0, loader_cores=0.4, **busy))
    assert "workers" in found(message({"workers": 2}, host_data_ms=80.0, loader_cores=0.02, **busy))


def test_workers_that_start_anew_for_each_pass_are_kept() -> None:
    one = found(message({"workers": 4}, host_data_ms=30.0, loader_start_ms=29.0, **USED))
    assert one["loader-start"].flag == "DataLoader(persistent_workers=True)"
    assert set(one) == {"loader-start"}, "and are no wait for data besides"


def test_on_a_gpu_a_line_costs_what_the_gpu_idles() -> None:
    seen = [["other", "/s/train.py", 88, 90], ["other", "", 0, 10], ["forward", "/s/train.py", 80, 50]]
    idle = {"host_other_ms": 40.0, "late_ms": 15.0, "data_ms": 0.0}
    one = found(message({"gpu": True, "workers": 4}, seen, **idle, **USED))["host-line"]
    assert "train.py:88 blocks the host in every step (36.0 ms); the GPU is then idle for 15.0 ms" in one.text
    assert one.saving == pytest.approx(0.15)
    never_idle = {**idle, "late_ms": 0.0}
    assert "host-line" not in found(message({"gpu": True, "workers": 4}, seen, **never_idle, **USED))


def test_copies_that_are_not_pinned_are_named_with_the_argument() -> None:
    copies = {"copy_ms": 12.0, "data_ms": 12.0}
    one = found(message({"gpu": True, "workers": 4, "pinned": False}, **copies, **USED))["copy"]
    assert "DataLoader(pin_memory=True)" in f"{one.flag} {one.fix}"


def test_no_advice_is_a_setting_or_a_command_of_drumline() -> None:
    every = [
        found(message({"workers": workers, "rank_batch": 2}, host_data_ms=50.0, host_other_ms=45.0, **USED))
        for workers in (0, 4)
    ]
    for each in (slow for one in every for slow in one.values()):
        assert "drumline " not in each.fix
        assert "data." not in each.flag


def test_a_rank_that_reports_nothing_is_left_out_and_named() -> None:
    messages = [message({"workers": 4}, **USED), None]
    evidence = evidence_of(messages)
    assert evidence.intervals[-1].ranks == 1
    assert "without rank 1" in lines(evidence, [], 100, [1])[0]


def test_only_intervals_that_all_ranks_have_count() -> None:
    short = message({"workers": 4}, **USED)
    short["intervals"] = short["intervals"][:2]
    evidence = evidence_of([message({"workers": 4}, **USED), short])
    assert [each.step for each in evidence.intervals] == [10, 20]
    assert evidence.intervals[0].images_per_s == pytest.approx(1280.0)


def test_rules_compare_a_few_long_intervals_with_all_steps() -> None:
    long = message({"workers": 4}, **USED)
    row = long["intervals"][0]
    long["intervals"] = [{**row, "step": step, "steps": 10} for step in range(10, 1010, 10)]
    intervals = evidence_of([long]).intervals
    assert intervals[0].step == 10, "the first steps stay apart"
    assert 5 <= len(intervals) <= 13
    assert sum(each.steps for each in intervals) == 1000
    assert intervals[-1].step == 1000
    long["intervals"] = long["intervals"][:7]  # seven seconds: the last one joins the five before it
    assert [each.steps for each in evidence_of([long]).intervals] == [10, 60]


def test_progress_is_one_line() -> None:
    text = progress_line(message({"workers": 0}, host_data_ms=80.0, data_cpu_ms=80.0, **USED))
    assert text.startswith("drumline.clock, step 30: 640 img/s, 100 ms per step: ")
    assert text.endswith("workers: DataLoader(num_workers=4, persistent_workers=True)")
    assert lines(Evidence([]), [], 80) == ["drumline.clock: no step was timed"]
