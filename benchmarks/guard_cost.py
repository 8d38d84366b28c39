"""What `drumline.guard` costs per step: a hand-written loop with and without it, alternating in one process.

    python benchmarks/guard_cost.py            # on one GPU
    python benchmarks/guard_cost.py --small    # a tiny model on a CPU: a check that the script works

The loop is a careful hand-written one: resident batches, bf16 autocast, channels_last, no host sync. With the
guard, each step adds the hooks, one fused norm over the gradients and one wait for its result before the optimizer.
Rounds alternate, so that a change of clock speed affects both. The comparison of ranks, every 100 steps, is timed
separately: the fingerprints of parameters, gradients and optimizer state. Prints a markdown table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import drumline
from drumline.guards.checks.drift import digest, fingerprints
from harness import Parser, name_of, pick_device, synchronize

EVERY = 100


def main() -> None:
    parser = Parser(__doc__, rounds=1, steps=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    device = pick_device(options.small)
    print(name_of(device))
    settings = (
        [("resnet50", 256, 224), ("resnet50", 64, 224), ("resnet18", 64, 64)]
        if device.type == "cuda"
        else [("resnet8", 32, 32)]
    )
    print("\n| model, batch | optimizer | plain ms | guarded ms | guard | comparison ms | per 100 steps |")
    print("|---|---|---|---|---|---|---|")
    for name, batch, size in settings:
        for fused in (False, True):
            row(name, batch, size, fused, device, options.rounds, options.steps)


def row(name: str, batch: int, size: int, fused: bool, device: torch.device, rounds: int, steps: int) -> None:
    """One line of the table."""
    torch.manual_seed(0)
    model = drumline.create_model(name, classes=1000).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=fused)
    x = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(1000, (batch,), device=device)
    step = stepper(model, optimizer, x, y)
    timed(step, steps, device)
    plain, guarded = [], []
    for _ in range(rounds):
        plain.append(timed(step, steps, device))
        with drumline.guard(model, optimizer):
            timed(step, 5, device)
            guarded.append(timed(step, steps, device))
    before, after = statistics.median(plain), statistics.median(guarded)
    meeting = statistics.median(timed(lambda: compare(model, optimizer), 3, device) for _ in range(5))
    kind = "fused" if fused else "foreach"
    print(
        f"| {name}, {batch} x {size} | SGD {kind} | {before:.2f} | {after:.2f} | {100 * (after / before - 1):+.2f} % "
        f"| {meeting:.2f} | {100 * meeting / (EVERY * before):.2f} % |",
        flush=True,
    )


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], None]:
    """The step without a guard."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def compare(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What a rank computes every 100 steps, without the exchange."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    state = {
        f"{number} {key}": value
        for number, held in enumerate(optimizer.state.values())
        for key, value in held.items()
        if isinstance(value, torch.Tensor)
    }
    for tensors in (dict(model.named_parameters()), gradients, state):
        digest(fingerprints(tensors))


def timed(work: Callable[[], None], times: int, device: torch.device) -> float:
    """Milliseconds per call, the device idle before and after."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return 1000 * (time.perf_counter() - began) / times


if __name__ == "__main__":
    main()
