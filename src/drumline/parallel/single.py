"""The whole model in each process, computed in micro-batches: layout `single`, and the base of `dp`, `ddp` and
`fsdp`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.data.feed.batch import Batch
from drumline.parallel.lanes import Kind, Lanes, Recorder, Span, timed
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.strategy import Cut, ForwardPass, Log, Strategy, split_batch
from drumline.parallel.world import World


class SingleStrategy(Strategy):
    """One process, one device. Gradients of micro-batches accumulate."""

    name = "single"

    def __init__(self, recipe: Recipe, world: World) -> None:
        super().__init__(recipe, world)
        self._recorder = Recorder(world.rank, world.device)

    def _lay_out(self, cut: Cut, image_size: int, saved: Mapping[str, Any], log: Log) -> nn.Module:
        self._buffer_mean = BufferMean(self.module, self.world)
        return self.wrap(self.module)

    def wrap(self, module: nn.Module) -> nn.Module:
        """What a step calls."""
        return module

    def gradients(self, batch: Batch, forward: ForwardPass, draws: ModelDraws) -> None:
        draws.switch(0)
        if self.recording:
            self._recorder.start()
        for micro, piece in enumerate(split_batch(batch, self.micro_batches)):
            with self.accumulating(last=micro == self.micro_batches - 1):
                self._forward_backward(forward, piece, micro)

    def _forward_backward(self, forward: ForwardPass, piece: Batch, micro: int) -> None:
        recorder = self._recorder if self.recording else None
        loss = timed(recorder, Kind.FORWARD, micro, lambda: forward.loss(piece))
        timed(recorder, Kind.BACKWARD, micro, loss.backward)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch: holds back the exchange of gradients for all but the last."""
        return nullcontext()

    def average_buffers(self) -> None:
        self._buffer_mean()

    def lanes(self) -> Lanes | None:
        if self.world.size == 1 and self.micro_batches == 1:
            return None
        title = f"{self.name}, {self.world.size} process(es), {self.micro_batches} micro-batch(es)"
        return Lanes(title, [f"rank {rank}" for rank in range(self.world.size)], self.world)

    def spans(self) -> list[Span]:
        return self._recorder.spans()


class BufferMean:
    """Averages the floating-point buffers (running statistics) over the processes of a world, in one message.

    Buffers of layers in evaluation mode are left alone: nothing changes them, and a mean of equal numbers may round.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        self.world = world
        found = {
            id(buffer): buffer
            for layer in module.modules()
            if layer.training
            for buffer in layer.buffers(recurse=False)
            if buffer.is_floating_point() and not buffer.is_meta  # those belong to other processes
        }
        self.buffers = list(found.values())

    @torch.no_grad()
    def __call__(self) -> None:
        if self.world.size == 1 or not self.buffers:
            return
        flat = torch.cat([buffer.reshape(-1) for buffer in self.buffers])
        # Dividing after the sum keeps the values of a constant table of integers.
        self.world.all_reduce(flat).div_(self.world.size)
        means = flat.split([buffer.numel() for buffer in self.buffers])
        torch._foreach_copy_(
            self.buffers, [mean.view_as(b) for mean, b in zip(means, self.buffers, strict=True)]
        )


def used_anywhere(parameters: Sequence[nn.Parameter], world: World) -> list[bool]:
    """Which of them have a gradient on this process or another. All processes call it."""
    here = torch.tensor([each.grad is not None for each in parameters])
    found: list[bool] = world.all_gather_integers(here).any(dim=0).tolist()
    return found
