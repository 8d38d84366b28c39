"""AcrossRanks rows and world-wide norms on real processes over gloo, and what each rank found.

As a program (`python -m tests.distillation.gather_ranks FOLDER`) it is one rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.environment import read_rank_info
from drumline.distillation.objective import AcrossRanks
from drumline.parallel.norm import over_all, world_total
from drumline.parallel.process_group import init_world
from drumline.parallel.world import World
from tests.launch.ranks import results_of

COUNTS = {2: (5, 3), 3: (4, 1, 3)}
"""Samples of each rank; eight in all, uneven."""
GLOBAL = 8
CHANNELS = 4
NORMS: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "1-d": ((CHANNELS,), torch.float64, {}),
    "2-d": ((CHANNELS, 3, 5), torch.float64, {}),
    "2-d fp32": ((CHANNELS, 3, 5), torch.float32, {}),
    "2-d bf16": ((CHANNELS, 3, 5), torch.bfloat16, {}),
    "1-d without weights": ((CHANNELS,), torch.float64, {"affine": False}),
    "2-d without statistics": ((CHANNELS, 2, 2), torch.float64, {"track_running_stats": False}),
    "1-d other numbers": ((CHANNELS,), torch.float64, {"momentum": 0.3, "eps": 0.1}),
}


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Means far from zero, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator, dtype=torch.float64) + 5).to(dtype)


def norm_of(name: str) -> nn.Module:
    shape, dtype, options = NORMS[name]
    made: nn.Module = (nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d)(CHANNELS, **options)
    for seed, parameter in enumerate(made.parameters(), 50):
        parameter.data.copy_(drawn(tuple(parameter.shape), seed))
    # Weights stay in fp32 under autocast, where bf16 comes in.
    return made.to(torch.float32 if dtype == torch.bfloat16 else dtype)


def normed(norm: nn.Module, name: str, own: slice) -> dict[str, Tensor]:
    """Two steps in training, then one evaluation. The loss is a sum over own samples of something nonlinear."""
    shape, dtype, _ = NORMS[name]
    found: dict[str, Tensor] = {}
    for step in range(2):
        rows = drawn((GLOBAL, *shape), step, dtype)[own].clone().requires_grad_()
        targets = drawn((GLOBAL, *shape), 10 + step)[own]
        out = norm(rows)
        (out.double() - targets).pow(3).sum().backward()
        assert rows.grad is not None
        found[f"out{step}"], found[f"rows{step}"] = out.detach(), rows.grad
    for key, parameter in norm.named_parameters():
        assert parameter.grad is not None
        found[f"grad {key}"] = parameter.grad
    found.update({f"buffer {key}": buffer.clone() for key, buffer in norm.named_buffers()})
    if getattr(norm, "track_running_stats", False):
        found["evaluated"] = norm.eval()(drawn((GLOBAL, *shape), 20, dtype)[own]).detach()
    return found


def related(rows: Tensor) -> Tensor:
    """A loss of the whole batch that no sum over samples can give."""
    return (rows @ rows.T).tanh().square().mean() + (rows.max(0).values * rows.min(0).values).sum()


def gathered(world: World) -> dict[str, Tensor]:
    """A loss of gathered rows, weighed as the step does it: own samples over the global batch."""
    counts = COUNTS[world.size]
    first = sum(counts[: world.rank])
    own = slice(first, first + counts[world.rank])
    weight = (drawn((3, 6), 31) / 8).requires_grad_()
    inputs = ((drawn((GLOBAL, 3), 30) - 5) / 4)[own].clone().requires_grad_()
    everywhere = AcrossRanks(world, counts)
    rows = everywhere(inputs @ weight)
    loss = related(rows)
    (loss * counts[world.rank] / GLOBAL).backward()
    assert weight.grad is not None
    assert inputs.grad is not None
    labels = everywhere(torch.arange(GLOBAL)[own])
    return {
        "loss": loss.detach(),
        "rows": rows.detach(),
        "weight": world.all_reduce(weight.grad.clone()),
        "inputs": inputs.grad,
        "labels": labels,
    }


def results(size: int) -> list[dict[str, dict[str, Tensor]]]:
    """What every rank of a world of `size` found, in rank order."""
    return results_of("tests.distillation.gather_ranks", size)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = init_world(read_rank_info(os.environ), "cpu", "auto", 60)
    counts = COUNTS[world.size]
    first = sum(counts[: world.rank])
    own = slice(first, first + counts[world.rank])
    found = {name: normed(over_all(norm_of(name), world_total(world)), name, own) for name in NORMS}
    found["gathered"] = gathered(world)
    torch.save(found, folder / f"{world.rank}.pt")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
