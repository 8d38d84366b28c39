"""What `drumline.clock` costs per step: a hand-written loop with and without it, alternating in one process.

    python benchmarks/clock_cost.py            # on a GPU if there is one
    python benchmarks/clock_cost.py --small    # few steps of the smallest loop: a check that the script works

The loops read a DataLoader in their own process. CPU time is that of the whole process, so it includes the clock's
thread; it does not depend on what else the machine does. Rounds alternate. Prints a markdown table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drumline
from harness import Parser, name_of, pick_device, synchronize

WARM = 20
"""Steps of a round before the measured ones."""


def main() -> None:
    parser = Parser(__doc__, rounds=1, steps=40)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    device = pick_device(options.small)
    print(f"{name_of(device)}; {options.rounds} rounds of {options.steps} steps\n")
    print("| loop | step, ms | CPU time without | with a clock | more per step |")
    print("|---|---|---|---|---|")
    linear = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    models = {
        "linear, batch 2": (linear, 2),
        "resnet8, batch 16": (drumline.create_model("resnet8", classes=10), 16),
    }
    for name, (model, batch) in list(models.items())[: 1 if options.small else None]:
        row(name, model.to(device), batch, device, options.rounds, options.steps)


def row(name: str, model: nn.Module, batch: int, device: torch.device, rounds: int, steps: int) -> None:
    """One line of the table."""
    count = batch * (steps + WARM)
    loader = DataLoader(
        TensorDataset(torch.randn(count, 3, 8, 8), torch.zeros(count, dtype=torch.long)), batch
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    plain, timed, walls = [], [], []
    for number in range(2 * rounds):
        if number % 2:
            with drumline.clock(loader, model, optimizer, report=False):
                timed.append(train(loader, model, optimizer, device)[0] / steps)
        else:
            cpu_s, wall_s = train(loader, model, optimizer, device)
            plain.append(cpu_s / steps)
            walls.append(wall_s / steps)
    before, after, wall = (statistics.median(each) for each in (plain, timed, walls))
    cells = [f"{1e3 * wall:.2f}", *(f"{1e6 * each:.0f} us" for each in (before, after, after - before))]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def train(
    loader: Iterable[tuple[torch.Tensor, torch.Tensor]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> tuple[float, float]:
    """CPU and wall seconds of the steps after the first ones."""
    began = cpu = 0.0
    for step, (images, labels) in enumerate(loader):
        if step == WARM:
            synchronize(device)
            began, cpu = time.perf_counter(), time.process_time()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    synchronize(device)
    return time.process_time() - cpu, time.perf_counter() - began


if __name__ == "__main__":
    main()
