"""Where the time went: every part once, on a CPU and on a GPU."""

from __future__ import annotations

import pytest

from drumline.diagnosis.evidence import Evidence, Interval
from drumline.diagnosis.slowdown import Slowdown
from drumline.report.elements import html
from drumline.report.speed import LOOKS, NAMES, grouped, parts_of, verdict

CPU = {
    "host_data_ms": 7.0,
    "host_compute_ms": 1.0,
    "host_forward_ms": 20.0,
    "host_backward_ms": 40.0,
    "host_exchange_ms": 5.0,
    "host_optimizer_ms": 3.0,
    "host_guards_ms": 2.0,
    "host_log_ms": 1.0,
    "host_other_ms": 1.0,
}
GPU = {"compute_ms": 60.0, "data_ms": 12.0, "copy_ms": 4.0, "late_ms": 8.0, "device_exchange_ms": 10.0}
BETWEEN = {"host_evaluation_ms": 9.0, "host_checkpoint_ms": 6.0}


def interval(steps: int = 10, **values: float) -> Interval:
    return Interval(10, 1.0, steps, 100.0, {name: (value, value) for name, value in values.items()})


def test_the_parts_add_up_to_the_time_of_a_step() -> None:
    on_cpu = parts_of(Evidence([interval(step_ms=80.0, **CPU, **BETWEEN)]), 1)
    assert sum(on_cpu.values()) == pytest.approx(80 + 15)
    assert on_cpu["other"] == 5.0
    on_gpu = parts_of(Evidence([interval(step_ms=80.0, **GPU, **BETWEEN)], environment={"cuda": "13.0"}), 1)
    assert sum(on_gpu.values()) == pytest.approx(80 + 15)
    assert (on_gpu["compute"], on_gpu["exchange"], on_gpu["data"], on_gpu["copy"]) == (50, 10, 8, 4)
    assert {*on_cpu, *on_gpu} <= LOOKS.keys() <= NAMES.keys()


def test_short_intervals_join_their_neighbours() -> None:
    found = grouped([interval(steps) for steps in (100, 3, 100, 97, 2)])
    assert [sum(each.steps for each in group) for group in found] == [100, 103, 99]
    assert len(grouped([interval(10)] * 1000)) <= 50
    assert len(grouped([interval(1)])) == 1


def test_the_verdict_names_the_change_and_its_gain() -> None:
    found = [Slowdown("decode", "workers spend <72 %> decoding", 0.5, "data.workers=8", "use them", 100.0)]
    shown = verdict(found)
    assert shown is not None
    text = html(shown)
    assert "Workers spend &lt;72 %&gt; decoding." in text
    assert "<code>data.workers=8</code>" in text
    assert "100 img/s → 200 img/s, 50 % of the time saved" in text
    nothing = verdict([])
    assert nothing is not None
    assert "Nothing stands out" in html(nothing)
    assert verdict(None) is None
