"""The clock on a real GPU: right within a few per cent, without one synchronisation."""

from __future__ import annotations

import time

import pytest
import torch

from drumline.core.account import Account
from drumline.observe.clock import BatchEvents, StepClock
from drumline.observe.nvml import gpu_reader
from tests.observe.cost import seconds_per_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_gpu_compute_time_is_right_and_never_synchronises() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    for _ in range(10):
        matrix @ matrix
    torch.cuda.synchronize()
    clock = StepClock(device)
    began = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            clock.step_begin()
            for _ in range(4):
                matrix @ matrix
            clock.step_end()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    truth = time.perf_counter() - began
    times = clock.take()
    assert times.steps == 100
    assert times.compute_s == pytest.approx(truth, rel=0.1)
    assert times.data_s == 0
    assert times.late_s < 0.05 * truth


def test_a_step_costs_the_host_less_than_20_us_on_a_gpu() -> None:
    assert seconds_per_step(torch.device("cuda"), 700) < 20e-6


def test_a_copy_that_is_waited_for_and_the_parts_of_a_step_are_timed() -> None:
    device = torch.device("cuda")
    parts = Account()
    clock = StepClock(device, sample_every=1, parts=parts)
    matrix = torch.randn(4096, 4096, device=device)
    batch = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    side = torch.cuda.Stream(device)
    clock.begin()
    for _ in range(20):
        arrived, ready = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream(device))
            arrived.record(side)
            batch.to(device, non_blocking=True)
            ready.record(side)
        torch.cuda.current_stream(device).wait_event(ready)
        events = BatchEvents(arrived, ready)
        clock.batch_events = lambda events=events: events
        clock.step_begin()
        for part in ("forward", "backward"):
            parts.enter(part)
            matrix @ matrix
        clock.step_end()
    torch.cuda.synchronize()
    times = clock.take()
    assert times.copy_s > 0.5 * times.data_s > 0
    halves = times.device_parts["forward"], times.device_parts["backward"]
    assert sum(halves) == pytest.approx(times.compute_s, rel=0.1)
    assert halves[0] == pytest.approx(halves[1], rel=0.2)


def test_the_driver_reports_the_gpu_that_torch_uses() -> None:
    found = gpu_reader(torch.device("cuda", 0))()
    free, total = torch.cuda.mem_get_info(0)
    assert found["gpu_memory_mb"] == pytest.approx((total - free) / 2**20, abs=2048)
    assert 0 <= found["gpu_use"] <= 1
    assert 0 < found["gpu_clock"] <= 1
