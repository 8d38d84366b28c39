"""What a step's timing costs the host."""

from __future__ import annotations

import math
import time

import torch

from drumline.core.account import PARTS, account
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
            for part in PARTS:  # as a loop enters them
                account.enter(part)
            clock.step_begin()
            clock.step_end()
        best = min(best, (time.perf_counter() - began) / steps)
    return best
