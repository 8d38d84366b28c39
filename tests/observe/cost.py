"""What a step's timing costs the host."""

from __future__ import annotations

import math
import time

import torch

from drumline.core.account import PARTS, account
from drumline.observe.clock import StepClock

ROUNDS = 25


def seconds_per_step(device: torch.device, steps: int) -> float:
    """CPU seconds: the best round of `steps` steps that do nothing but be timed."""
    clock = StepClock(device)
    best = math.inf
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.thread_time()
        for _ in range(steps):
            for part in PARTS:  # as a loop enters them
                account.enter(part)
            clock.step_begin()
            clock.step_end()
        best = min(best, (time.thread_time() - began) / steps)
    return best
