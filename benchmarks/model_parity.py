"""Speed and memory of Drumline's ResNets and torchvision's, on one GPU.

    python benchmarks/model_parity.py [--rounds 5] [--steps 10]
    python benchmarks/model_parity.py --small       # one step on a CPU: a check that the script works

Both models are in one process and alternate, round by round, so that clocks, temperature and the allocator favour
neither. Prints a markdown table.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.models import create_model
from harness import Parser, name_of, pick_device, synchronize

NAMES = ("resnet18", "resnet50")
BATCH, SIDE, CLASSES = 256, 224, 1000


@dataclass
class Runner:
    """One model and its measurements, one value per round."""

    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    speeds: list[float] = field(default_factory=list)
    """Images per second of forward and backward."""
    peaks: list[float] = field(default_factory=list)
    """GiB that a step needs on top of what is held between steps."""


def main() -> int:
    parser = Parser(__doc__, rounds=1, steps=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps per round and model")
    options = parser.parse_args()
    device = pick_device(options.small)
    if device.type != "cuda" and not options.small:
        print("model_parity.py needs a CUDA device (--small runs without one)", file=sys.stderr)
        return 2
    try:
        from torchvision import models as torchvision_models
    except ModuleNotFoundError:
        if not options.small:
            print("model_parity.py needs torchvision", file=sys.stderr)
            return 2
        print("needs torchvision: skipped its models; Drumline's run in their place")
        torchvision_models = None
    names, modes, batch, side = NAMES, ("eager", "compiled"), BATCH, SIDE
    if options.small:
        print("needs CUDA: skipped compiled models and memory")
        names, modes, batch, side = NAMES[:1], ("eager",), 2, 32

    began = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
    targets = torch.randint(CLASSES, (batch,), device=device)
    rows = []
    for name in names:
        # Otherwise the second model would be compiled as a variation of the first.
        torch.compiler.reset()
        ours = create_model(name, CLASSES)
        theirs: nn.Module = (
            torchvision_models.get_model(name, weights=None, num_classes=CLASSES)
            if torchvision_models
            else create_model(name, CLASSES)
        )
        theirs.load_state_dict(ours.state_dict())
        pair = [model.to(device, memory_format=torch.channels_last).train() for model in (ours, theirs)]
        for mode in modes:
            runners = [Runner(model, torch.compile(model) if mode == "compiled" else model) for model in pair]
            measure(runners, images, targets, options.rounds, options.steps)
            rows.append(row(name, mode, *runners))
            print(f"{name} {mode}: done after {time.perf_counter() - began:.0f} s", file=sys.stderr)

    print(
        f"{name_of(device)}, torch {torch.__version__}, forward + backward, batch {batch}, "
        f"{side}x{side}, bf16 autocast, channels_last; medians of {options.rounds} rounds of {options.steps} "
        f"alternating steps; {time.perf_counter() - began:.0f} s in total\n"
    )
    print(
        "| model | mode | Drumline img/s | torchvision img/s | ratio | Drumline GiB | torchvision GiB | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    return 0


def measure(runners: list[Runner], images: Tensor, targets: Tensor, rounds: int, steps: int) -> None:
    """Warms up both models, then alternates between them. The order alternates too."""
    for runner in runners:
        for _ in range(3):
            step(runner, images, targets)
    for number in range(rounds):
        for runner in runners if number % 2 == 0 else reversed(runners):
            synchronize(images.device)
            held = _allocated(images, reset=True)
            began = time.perf_counter()
            for _ in range(steps):
                step(runner, images, targets)
            synchronize(images.device)
            runner.speeds.append(steps * len(images) / (time.perf_counter() - began))
            runner.peaks.append((_allocated(images) - held) / 2**30)


def _allocated(images: Tensor, reset: bool = False) -> float:
    """The peak of allocated bytes since the last reset; NaN on a CPU."""
    if images.device.type != "cuda":
        return math.nan
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def step(runner: Runner, images: Tensor, targets: Tensor) -> None:
    """Forward and backward; gradients are dropped, so that a step's memory includes them."""
    with torch.autocast(images.device.type, dtype=torch.bfloat16):
        loss = F.cross_entropy(runner.forward(images), targets)
    loss.backward()
    runner.model.zero_grad(set_to_none=True)


def row(name: str, mode: str, ours: Runner, theirs: Runner) -> str:
    """One row of the table, with half the range of the speeds over the rounds."""
    speeds = [statistics.median(runner.speeds) for runner in (ours, theirs)]
    peaks = [statistics.median(runner.peaks) for runner in (ours, theirs)]
    spreads = [(max(runner.speeds) - min(runner.speeds)) / 2 for runner in (ours, theirs)]
    return (
        f"| {name} | {mode} | {speeds[0]:.0f} ± {spreads[0]:.0f} | {speeds[1]:.0f} ± {spreads[1]:.0f} "
        f"| {speeds[0] / speeds[1]:.3f} | {peaks[0]:.3f} | {peaks[1]:.3f} | {peaks[0] / peaks[1]:.3f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
