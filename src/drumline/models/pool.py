"""Mean pooling to a grid, with a backward that repeats where deterministic algorithms are asked for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pool_to(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Adaptive mean pooling of N x C x H x W, as torch's, by way of kernels whose backward is deterministic.

    A map of that size is its own pool. A map that the grid divides is a plain average pool. Any other map goes
    through torch's adaptive kernel, unless deterministic algorithms are asked for on a GPU, where that kernel has
    none: then the same means are taken slice by slice, equal up to rounding.
    """
    height, width = x.shape[-2:]
    if (height, width) == grid:
        return x
    if height % grid[0] == 0 and width % grid[1] == 0:
        return F.avg_pool2d(x, (height // grid[0], width // grid[1]))
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return _means(_means(x, 2, grid[0]), 3, grid[1])
    return F.adaptive_avg_pool2d(x, grid)


def _means(x: Tensor, axis: int, count: int) -> Tensor:
    """Means over the adaptive windows of one axis; window i spans floor(i n / count) to ceil((i + 1) n / count)."""
    length = x.shape[axis]
    windows = [(i * length // count, -((i + 1) * length // -count)) for i in range(count)]
    return torch.stack([x.narrow(axis, a, b - a).mean(axis) for a, b in windows], axis)
