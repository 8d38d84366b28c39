"""What a clock costs a step of a user's loop."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drumline

WARM = 50
"""Steps before the measured ones."""


def seconds_per_step(rounds: int, steps: int) -> tuple[float, float]:
    """CPU seconds of a step of this process without and with a clock: the least of alternating rounds."""
    data = TensorDataset(torch.randn(2 * steps, 8), torch.zeros(2 * steps, dtype=torch.long))
    loader = DataLoader(data, 2)
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * rounds):
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clock = drumline.clock(loader, model, optimizer, report=False) if number % 2 else None
        for step, (inputs, labels) in enumerate(loader):
            if step == WARM:
                began = time.process_time()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        found[number % 2].append((time.process_time() - began) / (steps - WARM))
        if clock is not None:
            clock.close()
    return min(found[0]), min(found[1])


if __name__ == "__main__":
    plain, timed = seconds_per_step(7, 3000)
    print(f"{1e6 * plain:.1f} us, with a clock {1e6 * timed:.1f} us: {1e6 * (timed - plain):.1f} us more")
