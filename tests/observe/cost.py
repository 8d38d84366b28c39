"""What a step's timing costs the host."""

from __future__ import annotations

import math
import time

import torch

from drumline.observe.clock import StepClock


def seconds_per_step(device: torch.device, steps: int) -> float:
    """The best of five rounds of `steps` steps that do nothing but be timed."""
    clock = StepClock(device)
    best = math.inf
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            clock.data_begin()
            clock.data_end()
            clock.step_begin()
            clock.step_end()
        best = min(best, (time.perf_counter() - began) / steps)
    return best
