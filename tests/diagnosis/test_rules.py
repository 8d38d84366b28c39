"""Every rule on evidence written by hand: what it says, what it advises, and when it is silent.

The GPU's rules (launches, copies, clocks, power, a late host) are tested here alone: no run on a GPU has shown them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from drumline.config.fields import recipe_fields
from drumline.core.account import PARTS
from drumline.diagnosis.evidence import Evidence, Interval, merged
from drumline.diagnosis.figures import Figures
from drumline.diagnosis.rules import diagnose
from drumline.diagnosis.rules.host import own_line
from drumline.diagnosis.slowdown import Slowdown

RECIPE: Mapping[str, Any] = {
    name: list(field.default) if isinstance(field.default, tuple) else field.default
    for name, field in recipe_fields().items()
} | {"data.batch": 256, "data.path": "photos", "optim.lr": 0.1, "train.epochs": 10}
HEALTHY = {
    "step_ms": 100.0,
    "data_ms": 1.0,
    "compute_ms": 97.0,
    "late_ms": 2.0,
    "host_data_ms": 1.0,
    "host_compute_ms": 1.0,
    "host_forward_ms": 30.0,
    "host_backward_ms": 62.0,
    "host_optimizer_ms": 4.0,
    "host_guards_ms": 1.0,
    "host_log_ms": 0.5,
    "host_other_ms": 0.5,
    "feed_read_ms": 5.0,
    "feed_make_ms": 40.0,
    "feed_space_ms": 50.0,
    "feed_work_ms": 5.0,
    "workers_read_ms": 10.0,
    "workers_make_ms": 80.0,
    "workers_make_cpu_ms": 79.0,
    "own_cores": 2.0,
    "busy_cores": 2.2,
    "memory_mb": 1000.0,
    "free_memory_mb": 8000.0,
    "descriptors": 40.0,
    "loop_cores": 0.95,
    "loop_queued": 0.01,
}
FACTS = {
    "workers": 2,
    "pool": "threads",
    "cores": 8,
    "machine_cores": 8,
    "local_ranks": 1,
    "torch_threads": 1,
    "rank_batch": 256,
    "machine_memory_mb": 16000.0,
}
GPU = {**FACTS, "gpu": "H200", "captured": False, "not_captured": "train.capture = off"}


def interval(
    number: int = 1, facts: Mapping[str, Any] = FACTS, **values: float | tuple[float, ...]
) -> Interval:
    """100 steps, an epoch each. A plain number is that of every rank."""
    ranks = next((len(value) for value in values.values() if isinstance(value, tuple)), 1)
    rows = {
        name: value if isinstance(value, tuple) else (value,) * ranks
        for name, value in {**HEALTHY, **values}.items()
    }
    facts = {**facts, "local_ranks": ranks}
    return Interval(100 * number, float(number), 100, 256e3 / max(rows["step_ms"]), rows, facts)


def codes(found: list[Slowdown]) -> set[str]:
    return {each.code for each in found}


def evidence(
    *intervals: Interval, recipe: Mapping[str, Any] | None = None, **values: float | tuple[float, ...]
) -> Evidence:
    return Evidence(intervals or [interval(**values)], {**RECIPE, **(recipe or {})})


def only(found: list[Slowdown]) -> Slowdown:
    assert len(found) == 1, [each.code for each in found]
    return found[0]


def test_nothing_is_found_in_a_healthy_run_with_or_without_a_gpu_and_recipe() -> None:
    assert diagnose(evidence()) == []
    assert diagnose(Evidence([interval()])) == []
    assert diagnose(evidence(interval(facts={**GPU, "captured": True}))) == []
    assert diagnose(evidence(interval(step_ms=(100.0, 100.0)))) == []
    assert diagnose(Evidence([])) == []


WAITS = {"step_ms": 100.0, "data_ms": 50.0, "compute_ms": 48.0, "host_data_ms": 50.0, "feed_space_ms": 0.0}
BY_MAKING = {
    **WAITS,
    "feed_make_ms": 95.0,
    "feed_read_ms": 1.0,
    "feed_work_ms": 4.0,
    "workers_make_ms": 190.0,
}


def test_more_workers_are_advised_as_far_as_they_help_and_cores_are_free() -> None:
    busy = {**BY_MAKING, "workers_make_cpu_ms": 188.0}
    enough = only(diagnose(evidence(**busy)))
    assert (enough.code, enough.flag) == ("workers", "data.workers=4")
    assert enough.saving == pytest.approx(0.475, abs=0.01), "95 ms of making become 47.5"
    assert enough.predicted_images_per_s == pytest.approx(2560 / (1 - enough.saving), rel=1e-6)
    few = only(diagnose(evidence(interval(**{**busy, "own_cores": 6.8, "busy_cores": 7.0}))))
    assert (few.code, few.flag) == ("workers", "data.workers=3"), "one core is free"
    assert few.saving == pytest.approx(95 / 300, abs=0.01)
    none = only(diagnose(evidence(**busy, own_cores=7.8, busy_cores=8.0)))
    assert (none.code, none.flag) == ("decode", "")
    assert "8.0 of 8 cores are busy" in none.text


def test_workers_that_wait_need_no_cores() -> None:
    found = only(diagnose(evidence(**BY_MAKING, workers_make_cpu_ms=2.0, busy_cores=8.0, own_cores=7.9)))
    assert (found.code, found.flag) == ("workers", "data.workers=4")


def test_the_number_of_workers_is_per_process() -> None:
    two = {**BY_MAKING, "workers_make_cpu_ms": 188.0, "step_ms": (100.0, 100.0)}
    found = only(diagnose(evidence(interval(**two, own_cores=3.0, busy_cores=6.0))))
    assert found.flag == "data.workers=3", "one of the two free cores for each process"


def test_files_that_are_waited_for_are_the_disks_fault() -> None:
    found = only(
        diagnose(
            evidence(**{**WAITS, "feed_read_ms": 90.0, "feed_make_ms": 5.0, "feed_work_ms": 5.0}, read_mb=9.5)
        )
    )
    assert found.code == "disk"
    assert "it reads 95 MB/s and needs 190 MB/s" in found.text
    assert "pack" in found.fix


def test_loader_processes_are_judged_by_what_their_time_goes_into() -> None:
    facts = {**FACTS, "pool": "processes"}
    values = {**BY_MAKING, "workers_read_ms": 150.0, "workers_make_ms": 40.0}
    assert only(diagnose(evidence(interval(facts=facts, **values)))).code == "disk"


def test_more_workers_are_advised_where_each_of_them_waits_for_files() -> None:
    values = {**WAITS, "feed_read_ms": 90.0, "feed_make_ms": 5.0, "feed_work_ms": 5.0}
    native = only(diagnose(evidence(**values)))
    assert (native.code, native.flag) == ("disk", ""), "native threads read with a fixed number of readers"
    own = only(diagnose(evidence(recipe={"data.source": "own:files"}, **values)))
    assert (own.code, own.flag) == ("disk", "data.workers=4")
    assert own.saving == pytest.approx(0.45, abs=0.01), "twice as many halve the 90 ms"
    assert "drumline pack" in own.fix


def test_a_transform_that_takes_the_feeds_time_is_named() -> None:
    values = {**BY_MAKING, "workers_make_ms": 10.0, "workers_own_ms": 180.0, "workers_make_cpu_ms": 9.0}
    found = only(diagnose(evidence(recipe={"data.transform": "own:slow"}, **values)))
    assert (found.code, found.flag) == ("transform", "data.workers=4")
    assert "data.transform = own:slow takes 90 %" in found.text


def test_a_loop_of_the_users_own_that_waits_for_data_is_found_without_a_feed() -> None:
    values = {name: value for name, value in HEALTHY.items() if not name.startswith(("feed", "workers"))}
    values |= {"step_ms": 100.0, "data_ms": 41.0, "compute_ms": 57.0}
    rows = {name: (value,) for name, value in values.items()}
    found = only(diagnose(Evidence([Interval(100, 1.0, 100, 2560.0, rows, {"workers": 4, "cores": 8})])))
    assert (found.code, found.flag) == ("data", "")
    assert "41 % of each step (41.0 ms of 100 ms)" in found.text
    assert "with 4 workers" in found.text


def test_on_a_busy_machine_waiting_for_data_must_exceed_waiting_for_a_core() -> None:
    values = {**WAITS, "data_ms": 30.0, "host_data_ms": 30.0, "feed_make_ms": 90.0, "loop_queued": 0.5}
    values |= {"busy_cores": 8.0, "own_cores": 1.0}
    assert only(diagnose(evidence(**values))).code == "machine-busy"


def test_other_programs_are_those_of_one_machine_and_unknown_if_a_rank_is_missing() -> None:
    """Two machines with two ranks each: the second one uses more cores, all of them for the run."""

    def others(own: tuple[float, ...], busy: tuple[float, ...], local_ranks: int = 2) -> float:
        rows = interval(own_cores=own, busy_cores=busy)
        facts = {**rows.facts, "local_ranks": local_ranks}
        return Figures(Evidence([replace(rows, facts=facts)])).other_cores

    assert others((1.0, 1.0, 4.0, 4.0), (2.0, 2.0, 8.0, 8.0)) == 0.0
    assert others((1.0, 1.0, 4.0, 4.0), (5.0, 5.0, 8.0, 8.0)) == 3.0
    assert others((1.0,), (8.0,), local_ranks=8) == 0.0, "the other seven ranks have not reported"


def test_the_line_that_is_named_is_the_most_frequent_one_of_all_intervals() -> None:
    def line(number: int, place: str, share: float) -> Interval:
        return interval(number, {**FACTS, "own_code": [place]}, own_code_share=share)

    places = [
        line(1, "", 0.0),
        line(2, "a.py:1 in f", 0.6),
        line(3, "a.py:1 in f", 0.6),
        line(4, "b.py:2 in g", 0.1),
    ]
    assert own_line(Figures(Evidence(places))) == "a.py:1 in f (40 % of the time)"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_slow_rank_is_named_with_the_part_of_its_excess(rank: int) -> None:
    def on(slow: float, usual: float) -> tuple[float, ...]:
        return tuple(slow if each == rank else usual for each in range(3))

    values = {
        "host_forward_ms": on(54.0, 30.0),
        "host_exchange_ms": on(1.0, 25.0),
        "own_code_share": on(0.4, 0.0),
    }
    values |= {"host_backward_ms": (43.0,) * 3, "loop_cores": on(0.97, 0.75), "step_ms": (100.0,) * 3}
    facts = {**FACTS, "own_code": ["own.py:7 in loss"] * 3}
    found = only(diagnose(evidence(interval(facts=facts, **values))))
    assert found.code == ("rank-0" if rank == 0 else "slow-rank")
    assert found.text.startswith(f"rank {rank} is 32 % slower than the others")
    assert "in forward (24.0 ms of 24.0 ms), at own.py:7 in loss" in found.text
    assert found.saving == pytest.approx(0.24)


def test_the_own_work_of_a_rank_is_never_negative() -> None:
    """A rank whose waits for a core overlap with its waits for the others."""
    values = {"host_exchange_ms": (90.0, 1.0), "step_ms": (100.0, 100.0), "loop_queued": (0.3, 0.0)}
    (found,) = [each for each in diagnose(evidence(interval(**values))) if each.code == "slow-rank"]
    assert "rank 1 takes far longer than the others" in found.text
    assert "against 0.00 ms" in found.text


def test_a_rank_that_only_waits_for_a_core_is_not_the_slow_one() -> None:
    values = {"host_exchange_ms": (30.0, 1.0), "step_ms": (100.0, 100.0), "loop_queued": (0.0, 0.3)}
    assert diagnose(evidence(interval(**values, loop_cores=(0.7, 0.7)))) == []


def test_the_exchange_is_exposed_if_even_the_slowest_rank_waits() -> None:
    values = {"host_exchange_ms": (24.0, 28.0), "step_ms": (100.0, 100.0), "loop_cores": 0.7}
    found = only(diagnose(evidence(interval(**values))))
    assert (found.code, found.flag) == ("exchange", "data.batch=512")
    assert found.saving == pytest.approx(0.115, abs=0.01)
    on_gpu = {**values, "device_exchange_ms": (22.0, 22.0), "device_backward_ms": 50.0}
    assert "adds 22.0 ms" in only(diagnose(evidence(interval(facts=GPU, **on_gpu)))).text
    assert diagnose(evidence(interval(facts=GPU, **values))) == [], (
        "the host of a GPU waits for other reasons"
    )


def test_a_loop_that_sleeps_inside_its_step_is_named_with_its_line() -> None:
    facts = {**FACTS, "own_code": ["train.py:88 in loss"]}
    found = only(diagnose(evidence(interval(facts=facts, loop_cores=0.6, own_code_share=0.38))))
    assert found.code == "stall"
    assert "38 % of each step (38.0 ms" in found.text
    assert "train.py:88 in loss (38 % of the time)" in found.text
    assert diagnose(evidence(loop_cores=0.3, loop_queued=0.66)) == [], "it waits for a core"
    many = {**FACTS, "torch_threads": 4}
    assert diagnose(evidence(interval(facts=many, loop_cores=0.6, own_cores=3.0))) == [], (
        "its threads compute"
    )


def test_logging_and_guards_name_their_settings() -> None:
    logs = only(diagnose(evidence(recipe={"train.log_every": 1}, host_log_ms=20.0)))
    assert (logs.code, logs.flag) == ("logging", "train.log_every=50")
    series = [interval(number, host_guards_ms=20.0) for number in range(1, 4)]
    found = only(diagnose(evidence(*series, recipe={"guard.every": 1})))
    assert (found.code, found.flag) == ("guards", "guard.every=100")
    assert diagnose(evidence(*series, recipe={"guard.every": 1000})) == [], "the first steps, and saves"
    busy = {"host_guards_ms": 20.0, "loop_queued": 0.6, "loop_cores": 0.4, "busy_cores": 8.0}
    series = [interval(number, **busy) for number in range(1, 4)]
    assert "guards" in codes(diagnose(evidence(*series, recipe={"guard.every": 1}))), "a mean of many"
    assert "guards" not in codes(diagnose(evidence(*series, recipe={"guard.every": 10}))), (
        "20 may all be unlucky"
    )


def test_an_own_loss_in_which_the_loop_is_often_found_is_named() -> None:
    facts = {**FACTS, "own_code": ["mine.py:7 in focal"]}
    recipe = {"train.loss": "mine:focal"}
    found = only(diagnose(evidence(interval(facts=facts, own_code_share=0.3), recipe=recipe)))
    assert (found.code, found.saving) == ("loss", 0.0)
    assert "mine.py:7 in focal (30 % of the time)" in found.text
    assert diagnose(evidence(interval(facts=facts, own_code_share=0.05), recipe=recipe)) == []
    facts["own_code"] = ["mine.py:20 in forward"]
    assert diagnose(evidence(interval(facts=facts, own_code_share=0.9), recipe=recipe)) == [], (
        "a model computes"
    )


def test_an_evaluation_soon_before_the_end_counts_as_often_as_it_happens() -> None:
    series = [interval(1), interval(2, host_evaluation_ms=60.0)]
    assert codes(diagnose(evidence(*series))) == {"evaluation"}
    assert diagnose(evidence(*series, recipe={"train.eval_every": 5})) == []


def test_a_small_batch_is_found_by_what_does_not_depend_on_it_or_by_fast_evaluations() -> None:
    facts = {**FACTS, "rank_batch": 8}
    own = only(diagnose(evidence(interval(facts=facts, host_optimizer_ms=30.0, host_other_ms=15.0))))
    assert (own.code, own.flag) == ("small-batch", "data.batch=1024")
    assert own.saving == pytest.approx((30 + 15 + 1.5) * 0.75 / 100, abs=0.01)
    fast = {**facts, "eval_samples": 1000}
    found = only(diagnose(evidence(interval(facts=fast, host_evaluation_ms=1.0))))
    assert "in forward and backward" in found.text, "1,000 images in 100 ms, but 8 in 30 ms of training"
    assert diagnose(evidence(interval(facts={**facts, "eval_samples": 30}, host_evaluation_ms=1.0))) == []
    assert diagnose(evidence(interval(facts={**fast, "rank_batch": 256}, host_evaluation_ms=1.0))) == []


def test_threads_that_compete_are_counted() -> None:
    found = only(diagnose(evidence(interval(facts={**FACTS, "torch_threads": 32}, loop_cores=0.99))))
    assert (found.code, found.flag) == ("threads", "parallel.threads=8")
    assert "34 threads compete for 8 cores" in found.text
    workers = only(diagnose(evidence(interval(facts={**FACTS, "workers": 40}))))
    assert (workers.code, workers.flag) == ("threads", "data.workers=8")
    assert diagnose(evidence(interval(facts={**FACTS, "torch_threads": 8}))) == []


def test_evaluations_and_saves_that_take_long_are_to_be_rarer() -> None:
    found = only(diagnose(evidence(host_evaluation_ms=100.0, loop_cores=0.99)))
    assert (found.code, found.flag) == ("evaluation", "train.eval_every=16")
    assert found.saving == pytest.approx(0.5 * 15 / 16, abs=0.01)
    saves = only(diagnose(evidence(recipe={"checkpoint.every_steps": 100}, host_checkpoint_ms=25.0)))
    assert (saves.code, saves.flag) == ("checkpoint", "checkpoint.every_steps=1600")
    often = {"checkpoint.every_steps": 1, "guard.every": 4}
    guarded = diagnose(evidence(recipe=often, host_checkpoint_ms=25.0, host_guards_ms=10.0))
    (saves,) = (each for each in guarded if each.code == "checkpoint")
    saved = (25 + 10 * 4 / 5) * 15 / 16
    assert saves.saving == pytest.approx(saved / 125, abs=0.01), (
        "with the fingerprints of saves, four of five"
    )
    assert diagnose(evidence(host_evaluation_ms=30.0, host_checkpoint_ms=5.0)) == []


def test_a_cold_first_epoch_is_told_from_a_slow_first_step() -> None:
    cold = interval(1, step_ms=340.0, data_ms=240.0, host_data_ms=240.0, feed_read_ms=250.0, disk_mb_s=95.0)
    series = [cold, *(interval(number) for number in range(2, 6))]
    found = only(diagnose(evidence(*series)))
    assert found.code == "cold-start"
    assert found.text.startswith("epoch 1 was 3.4 times slower")
    assert found.saving == pytest.approx(240 / (340 + 400), abs=0.01)
    compiled = interval(1, step_ms=340.0, compute_ms=330.0)
    assert diagnose(evidence(compiled, *series[1:])) == []


def _decaying(**changes: tuple[float, float]) -> list[Interval]:
    """Ten epochs; the values change from the first to the second after the sixth."""
    return [
        interval(number, **{name: pair[number > 6] for name, pair in changes.items()})
        for number in range(1, 11)
    ]


def test_decay_is_reported_with_its_cause() -> None:
    slower = {"step_ms": (100.0, 145.0), "loop_cores": (0.98, 0.98)}
    page_cache = _decaying(**slower, host_data_ms=(1.0, 46.0), data_ms=(1.0, 46.0), disk_mb_s=(2.0, 90.0))
    found = next(each for each in diagnose(evidence(*page_cache)) if each.code == "decay")
    assert "the speed fell by 31 %" in found.text
    assert "by epoch 7" in found.text
    assert "data takes 45.0 ms longer" in found.text
    assert "reads from the disk rose from 2 to 90 MB/s" in found.text
    hot = [
        replace(each, facts={**GPU, "captured": True})
        for each in _decaying(
            **slower,
            compute_ms=(97.0, 142.0),
            gpu_clock=(0.95, 0.66),
            gpu_hot=(0.0, 0.9),
            gpu_celsius=(60.0, 91.0),
        )
    ]
    codes = {each.code: each for each in diagnose(evidence(*hot))}
    assert "its clock fell by 29 % of its maximum, because it is hot" in codes["decay"].text
    assert "91 °C" in codes["thermal"].text or "°C" in codes["thermal"].text
    once = [interval(number, step_ms=180.0 if number == 8 else 100.0) for number in range(1, 11)]
    assert "decay" not in [each.code for each in diagnose(evidence(*once))]


def test_memory_that_grows_to_the_end_is_a_leak_and_memory_that_levels_off_is_not() -> None:
    leak = [interval(number, memory_mb=1000.0 + 100 * number) for number in range(1, 10)]
    found = only(diagnose(evidence(*leak)))
    assert found.code == "memory"
    assert (
        "from 1,200 to 1,900 MB, 1 MB a step: the machine's 16 GB will be full in about 13 minutes"
        in found.text
    )
    caches = [interval(number, memory_mb=2000.0 - 1000 / number) for number in range(1, 10)]
    assert diagnose(evidence(*caches)) == []
    files = [interval(number, descriptors=40.0 + 20 * number) for number in range(1, 10)]
    assert only(diagnose(evidence(*files))).code == "descriptors"


def test_a_gpu_that_waits_for_launches_is_told_from_one_that_is_full() -> None:
    values = {"behind": 1.0, "gpu_use": 0.62, "compute_ms": 97.0}
    found = only(diagnose(evidence(interval(facts=GPU, **values), recipe={"train.capture": "off"})))
    assert (found.code, found.flag) == ("launch", "train.capture=auto")
    assert found.saving == pytest.approx(0.38 * 0.97, abs=0.01)
    again = only(diagnose(evidence(interval(facts=GPU, **values))))
    assert again.flag == "train.compile=true", "capture is on already"
    assert diagnose(evidence(interval(facts=GPU, **{**values, "behind": 0.1}))) == []
    assert diagnose(evidence(interval(facts=GPU, **{**values, "gpu_use": 0.97}))) == []
    short = dict.fromkeys(("host_forward_ms", "host_backward_ms", "host_optimizer_ms"), 2.0)
    assert diagnose(evidence(interval(facts=GPU, **values, **short))) == []


def test_a_late_host_and_copies_are_found_by_the_gpus_own_gaps() -> None:
    facts = {**GPU, "captured": True, "own_code": ["train.py:88 in log"]}
    late = interval(facts=facts, late_ms=30.0, compute_ms=69.0, host_log_ms=31.0, own_code_share=0.3)
    codes = {each.code: each for each in diagnose(evidence(late))}
    assert set(codes) == {"late-host", "logging"}
    assert (
        "is log (31.0 ms); in your own code, the host is most often at train.py:88 in log"
        in codes["late-host"].text
    )
    copied = only(diagnose(evidence(interval(facts=GPU, copy_ms=9.0, data_ms=9.5, compute_ms=89.0))))
    assert copied.code == "copy"
    unpinned = interval(facts={**GPU, "pinned": False}, copy_ms=9.0, data_ms=9.5, compute_ms=89.0)
    assert "batches are not pinned" in only(diagnose(evidence(unpinned))).text


def test_a_host_that_is_ahead_of_the_gpu_waits_for_nothing_that_matters() -> None:
    """The host of a captured step waits 94 % of its time for the next batch, while the GPU computes."""
    host = dict.fromkeys((f"host_{part}_ms" for part in PARTS), 0.5) | {"host_data_ms": 94.0}
    values = {"data_ms": 0.0, "compute_ms": 99.5, "late_ms": 0.5, **host, "behind": 0.0, "gpu_use": 0.99}
    assert diagnose(evidence(interval(facts={**GPU, "captured": True}, **values))) == []


def test_power_and_heat_hold_clocks_back() -> None:
    held = {"gpu_capped": 0.8, "gpu_clock": 0.71, "gpu_watts": 699.0, "gpu_watts_limit": 700.0}
    found = only(diagnose(evidence(interval(facts={**GPU, "captured": True}, **held))))
    assert found.code == "power"
    assert "71 % of its maximum, at 699 of 700 W" in found.text


def test_a_teacher_is_to_be_cached_unless_it_is() -> None:
    found = only(diagnose(evidence(host_teacher_ms=60.0)))
    assert (found.code, found.flag) == ("teacher", "distill.cache=teacher-cache")
    assert found.saving == pytest.approx(0.6)
    assert diagnose(evidence(host_teacher_ms=60.0, recipe={"distill.cache": "cache"})) == []
    balanced = only(diagnose(evidence(host_teacher_ms=60.0, recipe={"data.balance": "sqrt"})))
    assert balanced.flag == "", "it cannot be cached"


def test_an_optimizer_that_is_not_fused_is_named() -> None:
    own = {"optim.name": "torch.optim:AdamW", "optim.args": ["amsgrad:true"]}
    found = only(diagnose(evidence(host_optimizer_ms=25.0, recipe=own)))
    assert (found.code, found.flag) == ("optimizer", "optim.args=amsgrad:true,fused:true")
    assert diagnose(evidence(host_optimizer_ms=25.0)) == [], "the built-in ones are fused"


def test_the_largest_saving_comes_first() -> None:
    found = diagnose(evidence(host_evaluation_ms=300.0, host_teacher_ms=60.0, loop_cores=0.99))
    assert [each.code for each in found] == ["evaluation", "teacher"]
    assert found[0].saving > found[1].saving


def test_a_flag_is_only_given_if_it_changes_something_that_the_recipe_accepts() -> None:
    figures = Figures(evidence())
    assert figures.flag("data.batch", 512) == "data.batch=512"
    assert figures.flag("data.batch", 256) == ""
    assert figures.flag("data.decode", "magnetic") == ""
    on_cpu = Figures(evidence(recipe={"run.device": "cpu"}))
    assert on_cpu.flag("data.decode", "gpu") == ""
    assert Figures(Evidence([interval()])).flag("data.batch", 512) == ""


def test_intervals_merge_by_their_steps_and_what_was_not_recorded_is_not_zero() -> None:
    one, other = interval(1, data_ms=1.0), interval(2, data_ms=4.0, gpu_use=0.5)
    both = merged([replace(one, steps=200), other])
    assert (both.steps, both.mean("data_ms"), both.mean("gpu_use")) == (300, 2.0, 0.5)
    assert both.step == 200
