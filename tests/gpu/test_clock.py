"""The clock on a real GPU: right within a few per cent, without one synchronisation."""

from __future__ import annotations

import time

import pytest
import torch

from drumline.observe.clock import StepClock
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
