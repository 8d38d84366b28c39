"""A model in stages for evaluation: images in, logits out.

Promises: the scores of the whole model. All processes go through the same batches, so that one stage computes a batch
while the stage before it computes the next. A process without the last stage returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drumline.parallel.grid import Grid
from drumline.parallel.pipeline.boundary import TensorSpec, boundaries
from drumline.parallel.pipeline.cut import Segment
from drumline.parallel.pipeline.execute import Lane
from drumline.parallel.pipeline.schedule import forward_lists
from drumline.parallel.pipeline.shape import Shape
from drumline.parallel.pipeline.transport import ProcessTransport


class Chain(nn.Module):
    """Calls the stages of a model. Setting its mode sets the mode of the model."""

    def __init__(
        self,
        model: nn.Module,
        segments: Sequence[Segment],
        shape: Shape,
        grid: Grid,
        devices: Sequence[torch.device],
        autocast: torch.dtype | None,
    ) -> None:
        super().__init__()
        self._held = (model,)
        self.training = model.training
        self._stages = [segment.bind(model) for segment in segments]
        self._shape, self._grid, self._devices, self._autocast = shape, grid, devices, autocast
        self._specs: dict[tuple[int, ...], list[tuple[TensorSpec, ...]]] = {}
        self._wire = ProcessTransport(grid.down, grid.up) if shape.over_processes else None

    def train(self, mode: bool = True) -> Chain:
        """Sets the mode of the model, too."""
        self.training = mode
        self._held[0].train(mode)
        return self

    def forward(self, images: Tensor) -> Tensor | None:
        """One batch."""
        found = self.several([tuple(images.shape)], lambda number: images)
        return found[0] if found else None

    def several(self, shapes: Sequence[tuple[int, ...]], feed: Callable[[int], Tensor]) -> list[Any]:
        """Several batches of these shapes, pipelined: the last stage's output for each; an empty list on a process
        without it. `feed` is called on the process with the first stage."""
        if self._wire is None:
            return [self._here(feed(number)) for number in range(len(shapes))]
        return self._over_processes(shapes, feed, self._wire)

    def _here(self, images: Tensor) -> Tensor:
        """All stages in this process, one after the other."""
        values: tuple[Tensor, ...] = (images,)
        for number, stage in enumerate(self._stages):
            device = self._devices[number % len(self._devices)]
            values = stage(*(value.to(device) for value in values))
        logits: Tensor = values  # type: ignore[assignment]
        return logits

    def _over_processes(
        self, shapes: Sequence[tuple[int, ...]], feed: Callable[[int], Tensor], wire: ProcessTransport
    ) -> list[Any]:
        shape, place = self._shape, self._grid.place
        specs = [self._entering(size) for size in shapes]
        lane = Lane(
            forward_lists(shape.lanes, shape.chunks, len(shapes))[place],
            {number: stage for number, stage in enumerate(self._stages) if number % shape.lanes == place},
            shape.stages - 1,
            lambda stage, micro: specs[micro][stage],
            wire,
            self._devices[0],
        )
        return lane.forward_only(feed)

    def _entering(self, key: tuple[int, ...]) -> list[tuple[TensorSpec, ...]]:
        if key not in self._specs:
            # Fake tensors need version counters, which inference mode does not keep.
            with torch.inference_mode(False), torch.no_grad():
                sample = torch.empty(key, device=self._devices[0])
                self._specs[key] = boundaries(self._stages, sample, self._autocast)
        return self._specs[key]
