"""Vectors of length 1, for the methods that compare directions.

Promises: a vector of zeros has no direction: it stays zero and passes no gradient instead of an endless one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """The vectors of the last axis, x / ‖x‖; zero where ‖x‖² is below the smallest normal number."""
    square = x.square().sum(-1, keepdim=True)
    some = square > torch.finfo(x.dtype).tiny
    return torch.where(some, x, 0) / torch.where(some, square, 1).sqrt()
