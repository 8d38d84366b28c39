"""The layers of a network as a comparison sees them: one row for each operator.

Promises: a layer knows the layers that it reads, so the flow of values can be followed without the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

IMAGE = -1
"""The source of a layer that reads the images."""


@dataclass(frozen=True, eq=False)
class Layer:
    """One row of the table."""

    kind: str
    name: str
    """The innermost module that called it. Names of modules are unique, those of layers are not."""
    settings: Mapping[str, Any]
    output: tuple[int, ...]
    """Shape, with the batch."""
    sources: tuple[int, ...]
    """The layers whose outputs it reads, or `IMAGE`."""
    parameters: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    statistics: tuple[str, ...] = ()
    """Buffers that it reads."""
    in_place: bool = False
    depth: int = 0
    """The length of the longest chain from the images to it."""
    used: bool = True
    """Whether the output of the network depends on it."""
    flops: int = 0
    """Of the forward."""
    kept_bytes: int = 0
    """What autograd keeps for the backward, except for what an earlier layer keeps already."""
    seconds: float = 0.0
    """Forward and backward."""

    @property
    def weights(self) -> int:
        """How many parameters it reads."""
        return sum(map(prod, self.shapes))


@dataclass(frozen=True)
class Walk:
    """The layers of one step."""

    layers: tuple[Layer, ...]
    values: tuple[Tensor, ...] = ()
    """Samples of each layer's output, if they were asked for."""
    output: Tensor | None = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
